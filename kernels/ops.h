// Ops: the arithmetic of the engine, one declaration per op, one implementation per backend (kernels/cpu, kernels/cuda) and a
// float64 scalar reference used only by tests (tests/kernels/reference_ops.h).
//
// Common rules
//  - Arguments travel in structs with named fields; all matrices are row-major; `ld*` is the distance between rows in elements.
//  - Dtypes: `Ptr` carries its element type. Activations and parameters: fp32, bf16, fp16. Gradients accumulate in fp32.
//  Statistics
//    (mean, rstd, log-sum-exp, losses) are fp32. Half types are storage: operands are widened, arithmetic is fp32, results are
//    rounded once to nearest even when stored.
//  - Determinism: tile and split sizes are functions of the argument struct only, never of threads or timing; the same
//    arguments give the same bits with any number of threads.
//  - `accumulate`: false overwrites the destination (its old content is never read, so it may be uninitialised), true adds to
//  it.
//  - Aliasing: forbidden unless an op says otherwise.
//  - `stream` is where the op runs. A CPU backend runs it to completion on the calling thread (a stream's thread) with its
//  pool;
//    a CUDA backend enqueues it.
//  - Errors: SPIPE_CHECK on impossible arguments; an unsupported dtype or size is refused at plan time by `supports`.
#pragma once

#include <cstdint>

#include "spipe/base/dtype.h"

namespace spipe {

struct StreamHandle;  // opaque; owned by device/

struct Ptr {  // typed pointer into device memory; nullptr where an operand is optional and absent
  void* data = nullptr;
  DType dtype = DType::f32;
  explicit operator bool() const { return data != nullptr; }
};
struct ConstPtr {
  const void* data = nullptr;
  DType dtype = DType::f32;
  ConstPtr() = default;
  ConstPtr(const void* d, DType t) : data(d), dtype(t) {}
  ConstPtr(Ptr p) : data(p.data), dtype(p.dtype) {}  // NOLINT(google-explicit-constructor)
  explicit operator bool() const { return data != nullptr; }
};
// `p` advanced by `elements`.
inline Ptr offset(Ptr p, std::int64_t elements) {
  return {static_cast<char*>(p.data) + elements * static_cast<std::int64_t>(dtype_size(p.dtype)), p.dtype};
}
inline ConstPtr offset(ConstPtr p, std::int64_t elements) {
  return {static_cast<const char*>(p.data) + elements * static_cast<std::int64_t>(dtype_size(p.dtype)), p.dtype};
}

// C[m,n] = op(A)[m,k] op(B)[k,n] (+ bias[n] on every row) (+ C when accumulate).
// trans_a: A is stored [k,m]; trans_b: B is stored [n,k]. Default ld (0): the stored row length.
// Backward of y = x W^T + b: dx = dy W (NN), dW = dy^T x (TN), so all three forms are used. bias excludes accumulate;
// accumulate needs an fp32 C.
struct MatmulArgs {
  ConstPtr a, b;
  Ptr c;
  std::int64_t m = 0, n = 0, k = 0;
  bool trans_a = false, trans_b = false, accumulate = false;
  std::int64_t lda = 0, ldb = 0, ldc = 0;
  ConstPtr bias{};
};

// out[n] (+)= sum over rows of x[rows, n]; out fp32. Rows are summed in fixed blocks.
struct ColumnSumArgs {
  ConstPtr x;
  Ptr out;
  std::int64_t rows = 0, cols = 0, ldx = 0;
  bool accumulate = false;
};

// y = (h - mean) * rstd * weight + bias, h = x + residual when residual is given (then `sum_out` receives h; it may alias x or
// residual; what is normalised is h as rounded to sum_out, so that fused and separate adds agree). Biased variance, eps inside
// the root. mean, rstd: fp32 [rows], saved for backward.
struct LayerNormForwardArgs {
  ConstPtr x, residual{}, weight, bias;
  Ptr sum_out{}, y;
  float* mean = nullptr;
  float* rstd = nullptr;
  std::int64_t rows = 0, cols = 0;
  float eps = 0;
};
// dx = LayerNorm backward of dy at input x (+ residual_grad when given; residual_grad may alias dx).
// dweight, dbias: fp32 [cols].
struct LayerNormBackwardArgs {
  ConstPtr dy, x, weight, residual_grad{};
  const float* mean = nullptr;
  const float* rstd = nullptr;
  Ptr dx, dweight, dbias;
  std::int64_t rows = 0, cols = 0;
  bool accumulate = false;  // dweight, dbias
};

// y = h * rstd * weight, rstd = 1/sqrt(mean(h^2) + eps); h as in LayerNorm. Vectors are x[(outer, inner), cols]: vector (o, i)
// starts at o * outer_stride + i * cols, so a norm over head_dim inside a fused qkv row has outer = tokens, inner = heads. A
// plain norm has inner = 1. residual and sum_out need inner = 1 and outer_stride = cols. y may alias x when no residual is
// given and backward is given a saved copy of x. rstd: fp32 [outer * inner].
struct RmsNormForwardArgs {
  ConstPtr x, residual{}, weight;
  Ptr sum_out{}, y;
  float* rstd = nullptr;
  std::int64_t outer = 0, inner = 1, cols = 0;
  std::int64_t x_stride = 0, y_stride = 0;  // outer strides in elements; 0 = inner * cols
  float eps = 0;
};
struct RmsNormBackwardArgs {
  ConstPtr dy, x, weight, residual_grad{};  // residual_grad may alias dx (inner = 1); dy may alias dx
  const float* rstd = nullptr;
  Ptr dx, dweight;  // dweight fp32 [cols]
  std::int64_t outer = 0, inner = 1, cols = 0;
  std::int64_t dy_stride = 0, x_stride = 0, dx_stride = 0;
  bool accumulate = false;  // dweight
};

// Rotates pairs (i, i + head_dim/2) of every head in place by the angle of its position ("rotate half", as Hugging Face):
//   forward: (a, b) -> (a cos - b sin, b cos + a sin); backward: the inverse rotation.
// x[(tokens), heads, head_dim] with `x_stride` elements between tokens; token i has position first_position + i mod seq_len.
// cos, sin: fp32 [positions, head_dim/2], computed in double on the host (rope_table in model/).
struct RopeArgs {
  Ptr x;
  const float* cos = nullptr;
  const float* sin = nullptr;
  std::int64_t tokens = 0, seq_len = 0, heads = 0, head_dim = 0, x_stride = 0, first_position = 0;
  bool backward = false;
};

// Causal attention with grouped heads: query head h uses KV head h / (heads / kv_heads). Query i of a sequence sits at position
// (kv_len - q_len) + i and sees keys 0..position, the last `window` of them when window > 0. Scores are scaled by `scale`.
// q[batch * q_len, heads, head_dim], k and v[batch * kv_len, kv_heads, head_dim], out like q; *_stride are elements between
// tokens; k/v sequences are kv_batch_stride elements apart (0: kv_len * stride). lse: fp32 [batch, heads, q_len] log-sum-exp
// of the scaled scores, saved for backward. Blockwise online softmax; no q_len x kv_len matrix exists.
struct AttentionForwardArgs {
  ConstPtr q, k, v;
  Ptr out;
  float* lse = nullptr;
  std::int64_t batch = 0, q_len = 0, kv_len = 0, heads = 0, kv_heads = 0, head_dim = 0, window = 0;
  std::int64_t q_stride = 0, k_stride = 0, v_stride = 0, out_stride = 0, kv_batch_stride = 0;
  float scale = 0;
};
// Gradients by recomputation of the scores from q, k and lse (q_len = kv_len). Same layouts; dq, dk, dv use q_stride-like
// strides.
struct AttentionBackwardArgs {
  ConstPtr q, k, v, out, dout;
  const float* lse = nullptr;
  Ptr dq, dk, dv;
  std::int64_t batch = 0, seq_len = 0, heads = 0, kv_heads = 0, head_dim = 0, window = 0;
  std::int64_t q_stride = 0, k_stride = 0, v_stride = 0, out_stride = 0, dout_stride = 0, dq_stride = 0, dk_stride = 0,
               dv_stride = 0;
  float scale = 0;
};

enum class Activation : std::uint8_t { gelu_tanh, gelu_erf, relu, silu };
// y = f(x), x and y [rows, cols] packed; backward dx = dy f'(x), dx may alias dy.
struct ActivationForwardArgs {
  Activation kind = Activation::gelu_tanh;
  ConstPtr x;
  Ptr y;
  std::int64_t elements = 0;
};
struct ActivationBackwardArgs {
  Activation kind = Activation::gelu_tanh;
  ConstPtr x, dy;
  Ptr dx;
  std::int64_t elements = 0;
};
// Gated linear unit over a fused row [gate | up]: y[r, c] = f(g[r, c]) * u[r, c], g = x[r, c], u = x[r, cols + c]; x has row
// length 2 * cols. backward writes dx in the same layout; dx may alias x.
struct GatedForwardArgs {
  Activation kind = Activation::silu;
  ConstPtr x;
  Ptr y;
  std::int64_t rows = 0, cols = 0;
};
struct GatedBackwardArgs {
  Activation kind = Activation::silu;
  ConstPtr x, dy;
  Ptr dx;
  std::int64_t rows = 0, cols = 0;
};

// out[t, :] = table[tokens[t], :] (+ positions[first_position + t mod seq_len, :] when given). cols = hidden size.
struct EmbeddingForwardArgs {
  const std::int32_t* tokens = nullptr;
  ConstPtr table, positions{};
  Ptr out;
  std::int64_t count = 0, seq_len = 0, cols = 0, vocab = 0, first_position = 0;
};
// dtable[v, :] (+)= sum over t with tokens[t] = v of dout[t, :], t ascending; rows without tokens are zeroed when not
// accumulating. dpositions likewise by position (sequences ascending), [position_rows, cols]. Both fp32, either may be null.
// workspace: at least embedding_workspace_bytes(count, vocab).
struct EmbeddingBackwardArgs {
  const std::int32_t* tokens = nullptr;
  ConstPtr dout;
  Ptr dtable{}, dpositions{};
  void* workspace = nullptr;
  std::int64_t count = 0, seq_len = 0, cols = 0, vocab = 0, first_position = 0, position_rows = 0;
  bool accumulate = false;
};
[[nodiscard]] constexpr std::uint64_t embedding_workspace_bytes(std::int64_t count, std::int64_t vocab) {
  return static_cast<std::uint64_t>(count + vocab + 2) * 8;
}

// Row-wise softmax cross-entropy on a chunk of logits [rows, cols] (fp32, ld elements between rows; columns >= cols never take
// part).
//   nll[r] = logsumexp(logits[r]) - logits[r, target] in fp32, 0 where target < 0 (masked).
//   When `scale` != 0 the logits are overwritten by scale * (softmax - onehot), zero rows where masked.
struct SoftmaxCrossEntropyArgs {
  float* logits = nullptr;
  const std::int32_t* targets = nullptr;
  float* nll = nullptr;
  std::int64_t rows = 0, cols = 0, ld = 0;
  float scale = 0;
};

// y = keep ? x / (1 - p) : 0; the mask is a function of (seed, step, sequence, site, element within the sequence) only, by
// Philox, so forward and backward call the same op. y may alias x. Sequence b of the buffer is global sequence first_sequence +
// b of the step. Key: make_key(seed, RandomPurpose::dropout). Element e of global sequence s takes 32-bit word e mod 4 of
// philox4x32({e / 4, s, step, site}), each below 2^32; it is kept when (word >> 8) * 2^-24 >= p. The factor 1 / (1 - p) is
// computed in double and rounded to float once. 0 <= p < 1.
struct DropoutArgs {
  ConstPtr x;
  Ptr y;
  std::int64_t sequences = 0, elements_per_sequence = 0;
  std::uint64_t seed = 0, step = 0, first_sequence = 0;
  std::uint32_t site = 0;
  float p = 0;
};

// out = a + b (elementwise, out may alias either).
struct AddArgs {
  ConstPtr a, b;
  Ptr out;
  std::int64_t elements = 0;
};
// dst = convert(src); nearest even. `half_up`: fp32 -> bf16 as (bits + 0x8000) >> 16 (compute copy of a master).
struct ConvertArgs {
  ConstPtr src;
  Ptr dst;
  std::int64_t elements = 0;
  bool half_up = false;
};
struct ZeroArgs {
  Ptr dst;
  std::int64_t elements = 0;
};

// The last add and the rounding of a gradient, with its norm taken in the same pass (DESIGN section 5, canonical arithmetic):
//   g = a (+ b when given), fp32; dst = round(g) to dst.dtype (dst may alias a);
//   block_sums[i] = double sum of squares of the rounded values of elements [4096 i, 4096 (i+1)), in a fixed order: 16 double
//     lanes start at 0, lane j sums the squares (exact in double) of elements j, j+16, j+32, ... of the block ascending; then
//     lane j += lane j+8 for j < 8, lane j += lane j+4 for j < 4, and so on; lane 0 is the sum. (A NaN is any NaN.)
//   *nonfinite is set to 1 when any rounded value is inf or NaN (never cleared).
// Without block_sums nothing is checked (measurements of what the checks cost).
struct FinishGradientArgs {
  const float* a = nullptr;
  const float* b = nullptr;
  Ptr dst;
  double* block_sums = nullptr;
  std::uint32_t* nonfinite = nullptr;
  std::int64_t elements = 0;
};
inline constexpr std::int64_t kNormBlock = 4096;

// AdamW on a run of elements, one pass, fixed operation order with explicit fma so that scalar, SIMD and CUDA give the same
// bits:
//   g  = float(grad) * grad_scale                  (grad_scale = clip / loss scale, computed in double, then float)
//   m' = fma(beta1, m, (1-beta1) * g)              v' = fma(beta2, v, ((1-beta2) * g) * g)
//   p1 = p * decay                                  (decay = 1 - lr * weight_decay; 1 for undecayed tensors)
//   denom = sqrt(v') * inv_sqrt_bias2 + eps          (a multiply, then an add; inv_sqrt_bias2 = 1/sqrt(1-beta2^t))
//   p' = p1 - step_size * (m' / denom)               as fma(-step_size, m'/denom, p1)   (step_size = lr / (1-beta1^t))
// All scalars are computed in double on the host and rounded to float once. compute_copy (may be null, bf16/fp16) receives the
// rounded master: bf16 half-up, fp16 nearest even. *nonfinite_master is set to 1 when a finite master rounds to infinity.
// In place, or (from_* given, all three) out of place: the state is read there and written here; the two do not overlap.
struct AdamWArgs {
  ConstPtr grad;  // fp32, bf16 or fp16
  float* master = nullptr;
  float* m = nullptr;
  float* v = nullptr;
  const float* from_master = nullptr;
  const float* from_m = nullptr;
  const float* from_v = nullptr;
  Ptr compute_copy{};
  std::uint32_t* nonfinite_master = nullptr;
  std::int64_t elements = 0;
  float grad_scale = 1, beta1 = 0, one_minus_beta1 = 0, beta2 = 0, one_minus_beta2 = 0, decay = 1, inv_sqrt_bias2 = 1, eps = 0,
        step_size = 0;
};

// The update rules, on a run of elements in one pass; p is the parameter, g = float(grad) * grad_scale, every line rounds as
// written (fma once), all scalars in double on the host and rounded to float once. Decoupled decay: p1 = p * decay. L2 decay:
// d = fma(l2, p, g) (l2 = weight_decay; 0 for undecayed tensors).
//   adamw          as AdamWArgs, bit for bit
//   adam           m' and v' as AdamW's, of d instead of g; p' as AdamW's with p1 = p
//   sgd            m' = fma(beta1, m, d)    p' = fma(-step_size, m', p)                      (beta1 = momentum, step_size = lr)
//   sgd_nesterov   m' = fma(beta1, m, d)    p' = fma(-step_size, fma(beta1, m', d), p)
//   lion           c = fma(beta1, m, (1-beta1) * g)    p' = fma(-step_size, sign(c), p1)     (sign of 0 and of NaN: 0)
//                  m' = fma(beta2, m, (1-beta2) * g)
// Kingma and Ba 2015; Loshchilov and Hutter 2019; Sutskever et al. 2013; Chen et al. 2023, algorithm 2.
enum class UpdateRule : std::uint8_t { adamw, adam, sgd, sgd_nesterov, lion };
[[nodiscard]] inline bool has_second_moment(UpdateRule rule) { return rule == UpdateRule::adamw || rule == UpdateRule::adam; }

// Where the state of a run of elements lies. The parameter is in one of three forms:
//   master fp32, no compute;
//   master fp32 and a compute copy (bf16 half-up, fp16 nearest even), which updates write and do not read;
//   split: compute bf16 and master u16. The fp32 bits are (compute << 16) + (master as a signed number): the copy is the master
//   rounded half up, so that the low half says by sign in which direction. Lossless but for the low bits of a NaN.
struct UpdatePlanes {
  Ptr compute{};
  Ptr master{};
  Ptr m{}, v{};  // fp32 or bf16, both alike; v only where the rule has a second moment
};

// State is read from `from` and written to `to`: the same planes, or planes that do not overlap.
// bf16 moments are rounded at random when they are stored (the update uses them unrounded): upper half of bits + r, with r the
// low 16 bits of h(i) for m and the high ones for v. h(i) = mix((first_element + i mod 2^32) xor moment_key), where mix is x ^=
// x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16 (C. Wellons' lowbias32). The chance to go up is the
// fraction that is cut off, so the expected value is exact; infinities stay, NaNs become quiet.
struct UpdateArgs {
  UpdateRule rule = UpdateRule::adamw;
  ConstPtr grad;  // fp32, bf16 or fp16
  UpdatePlanes from{}, to{};
  std::uint32_t* nonfinite_master = nullptr;  // set to 1 when a finite master rounds to an infinite compute copy
  std::int64_t elements = 0;
  std::uint64_t first_element = 0;  // number of element 0 within its store unit
  std::uint32_t moment_key = 0;     // differs from unit to unit and from update to update
  float grad_scale = 1, beta1 = 0, one_minus_beta1 = 0, beta2 = 0, one_minus_beta2 = 0, decay = 1, l2 = 0, inv_sqrt_bias2 = 1,
        eps = 0, step_size = 0;
};

class Ops {
 public:
  virtual ~Ops() = default;
  virtual void matmul(StreamHandle* stream, const MatmulArgs& args) = 0;
  virtual void column_sum(StreamHandle* stream, const ColumnSumArgs& args) = 0;
  virtual void layernorm_forward(StreamHandle* stream, const LayerNormForwardArgs& args) = 0;
  virtual void layernorm_backward(StreamHandle* stream, const LayerNormBackwardArgs& args) = 0;
  virtual void rmsnorm_forward(StreamHandle* stream, const RmsNormForwardArgs& args) = 0;
  virtual void rmsnorm_backward(StreamHandle* stream, const RmsNormBackwardArgs& args) = 0;
  virtual void rope(StreamHandle* stream, const RopeArgs& args) = 0;
  virtual void attention_forward(StreamHandle* stream, const AttentionForwardArgs& args) = 0;
  virtual void attention_backward(StreamHandle* stream, const AttentionBackwardArgs& args) = 0;
  virtual void activation_forward(StreamHandle* stream, const ActivationForwardArgs& args) = 0;
  virtual void activation_backward(StreamHandle* stream, const ActivationBackwardArgs& args) = 0;
  virtual void gated_forward(StreamHandle* stream, const GatedForwardArgs& args) = 0;
  virtual void gated_backward(StreamHandle* stream, const GatedBackwardArgs& args) = 0;
  virtual void embedding_forward(StreamHandle* stream, const EmbeddingForwardArgs& args) = 0;
  virtual void embedding_backward(StreamHandle* stream, const EmbeddingBackwardArgs& args) = 0;
  virtual void softmax_cross_entropy(StreamHandle* stream, const SoftmaxCrossEntropyArgs& args) = 0;
  virtual void dropout(StreamHandle* stream, const DropoutArgs& args) = 0;
  virtual void add(StreamHandle* stream, const AddArgs& args) = 0;
  virtual void convert(StreamHandle* stream, const ConvertArgs& args) = 0;
  virtual void zero(StreamHandle* stream, const ZeroArgs& args) = 0;
  virtual void finish_gradient(StreamHandle* stream, const FinishGradientArgs& args) = 0;
  virtual void adamw(StreamHandle* stream, const AdamWArgs& args) = 0;  // plain AdamW: fp32 master and moments
  virtual void update(StreamHandle* stream, const UpdateArgs& args) = 0;
};

}  // namespace spipe
