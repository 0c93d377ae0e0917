// LayerNorm and RMSNorm, forward with the residual's add, backward with the residual gradient's.
//
// A vector of up to 1,024 elements belongs to a warp (four to a block), a longer one to a block of 256 threads. A thread takes
// runs of eight elements; its second pass over the row is served by the caches.
#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/cuda_ops.cuh"
#include "kernels/cuda/device.cuh"

namespace spipe::cuda {
namespace {

constexpr int kRun = 8;
constexpr std::int64_t kWarpColumns = 1024;
constexpr unsigned kWarpsOfBlock = 4, kLongThreads = 256;

// Which vector a thread works on, and the sums over those who work on it.
template <bool whole_block>
struct Team {
  std::int64_t vector, first, step;  // first run and distance to the next, in elements
  __device__ __forceinline__ Team() {
    const std::int64_t warp = threadIdx.x / 32, member = whole_block ? threadIdx.x : threadIdx.x % 32;
    vector = whole_block ? blockIdx.x : static_cast<std::int64_t>(blockIdx.x) * kWarpsOfBlock + warp;
    first = member * kRun;
    step = static_cast<std::int64_t>(whole_block ? kLongThreads : 32) * kRun;
  }
  __device__ __forceinline__ bool leads() const { return first == 0; }
  static __device__ __forceinline__ float sum(float x) {
    if constexpr (whole_block) {
      return block_sum<static_cast<int>(kLongThreads)>(x);
    } else {
      return warp_sum(x);
    }
  }
};

// Eight products or squares in order, then across the row: the accumulator of a thread takes its runs ascending.
__device__ __forceinline__ void add_products(float& sum, const Floats<kRun>& a, const Floats<kRun>& b) {
  for (int j = 0; j < kRun; ++j) sum = __fmaf_rn(a.v[j], b.v[j], sum);
}

// One form for both norms: for RMSNorm bias is absent, mean is null, inner may exceed 1.
struct ForwardArgs {
  ConstPtr x, residual, weight, bias;
  Ptr sum_out, y;
  float* mean;
  float* rstd;
  std::int64_t vectors, inner, cols, x_stride, y_stride;
  float eps;
};

// The run at column c of the vector that starts at x_at; the sum with the residual is rounded to sum_out and read so.
__device__ __forceinline__ Floats<kRun> first_read(const ForwardArgs& args, std::int64_t x_at, std::int64_t c, bool vector) {
  const std::int64_t end = x_at + args.cols;
  Floats<kRun> h = load_as<kRun>(args.x.data, args.x.dtype, x_at + c, end, vector);
  if (args.residual.data == nullptr) return h;
  const Floats<kRun> r = load_as<kRun>(args.residual.data, args.x.dtype, x_at + c, end, vector);
  for (int j = 0; j < kRun; ++j) h.v[j] = as_stored(args.x.dtype, __fadd_rn(h.v[j], r.v[j]));
  store_as<kRun>(args.sum_out.data, args.x.dtype, x_at + c, end, vector, h);
  return h;
}

// Bytes an element (bf16): x 2 (residual 2, sum 2), y 2; weight and bias from the caches. RMSNorm 4 FLOPs, LayerNorm 8.
template <bool layer, bool whole_block>
__global__ void norm_forward_kernel(const ForwardArgs args, bool vector) {
  const Team<whole_block> team;
  if (team.vector >= args.vectors) return;  // a whole warp, or nobody
  const std::int64_t at = team.vector / args.inner, part = team.vector % args.inner * args.cols;
  const std::int64_t x_at = at * args.x_stride + part, y_at = at * args.y_stride + part;
  const void* h_data = args.residual.data != nullptr ? args.sum_out.data : args.x.data;
  const auto again = [&](std::int64_t c) { return load_as<kRun>(h_data, args.x.dtype, x_at + c, x_at + args.cols, vector); };
  const float n = static_cast<float>(args.cols);
  float mean = 0, square = 0;
  if constexpr (layer) {
    float sum = 0;
    for (std::int64_t c = team.first; c < args.cols; c += team.step) {
      const Floats<kRun> h = first_read(args, x_at, c, vector);
      for (int j = 0; j < kRun; ++j) sum = __fadd_rn(sum, h.v[j]);
    }
    mean = __fdiv_rn(team.sum(sum), n);
    for (std::int64_t c = team.first; c < args.cols; c += team.step) {
      Floats<kRun> h = again(c);
      for (int j = 0; j < kRun; ++j) h.v[j] = c + j < args.cols ? __fsub_rn(h.v[j], mean) : 0.0F;
      add_products(square, h, h);
    }
  } else {
    for (std::int64_t c = team.first; c < args.cols; c += team.step) {
      const Floats<kRun> h = first_read(args, x_at, c, vector);
      add_products(square, h, h);
    }
  }
  const float rstd = __fdiv_rn(1.0F, __fsqrt_rn(__fadd_rn(__fdiv_rn(team.sum(square), n), args.eps)));
  if (team.leads()) {
    if (layer) args.mean[team.vector] = mean;
    args.rstd[team.vector] = rstd;
  }
  for (std::int64_t c = team.first; c < args.cols; c += team.step) {
    Floats<kRun> h = again(c);
    const Floats<kRun> weight = load_as<kRun>(args.weight.data, args.weight.dtype, c, args.cols, vector);
    Floats<kRun> bias = {};
    if constexpr (layer) bias = load_as<kRun>(args.bias.data, args.bias.dtype, c, args.cols, vector);
    for (int j = 0; j < kRun; ++j) {
      const float normed = __fmul_rn(__fsub_rn(h.v[j], mean), rstd);
      h.v[j] = layer ? __fmaf_rn(normed, weight.v[j], bias.v[j]) : __fmul_rn(normed, weight.v[j]);
    }
    store_as<kRun>(args.y.data, args.x.dtype, y_at + c, y_at + args.cols, vector, h);
  }
}

struct BackwardArgs {
  ConstPtr dy, x, weight, residual_grad;
  const float* mean;  // null for RMSNorm
  const float* rstd;
  Ptr dx;
  std::int64_t vectors, inner, cols, dy_stride, x_stride, dx_stride;
  [[nodiscard]] __device__ __forceinline__ std::int64_t start(std::int64_t v, std::int64_t stride) const {
    return v / inner * stride + v % inner * cols;
  }
};

// dx = rstd (g - mean(g) - n mean(g n)), g = dy weight, n = (x - mean) rstd; RMSNorm has no mean(g).
// Bytes an element (bf16): dy 2, x 2 (residual gradient 2), dx 2; 10 FLOPs.
template <bool layer, bool whole_block>
__global__ void norm_backward_kernel(const BackwardArgs args, bool vector) {
  const Team<whole_block> team;
  if (team.vector >= args.vectors) return;
  const DType type = args.x.dtype;
  const std::int64_t dy_at = args.start(team.vector, args.dy_stride), x_at = args.start(team.vector, args.x_stride);
  const std::int64_t dx_at = args.start(team.vector, args.dx_stride), cols = args.cols;
  const float rstd = args.rstd[team.vector], mean = layer ? args.mean[team.vector] : 0.0F;
  // g and n of the run at column c; both 0 beyond the end.
  const auto read = [&](std::int64_t c, Floats<kRun>& g, Floats<kRun>& normed) {
    g = load_as<kRun>(args.dy.data, type, dy_at + c, dy_at + cols, vector);
    normed = load_as<kRun>(args.x.data, type, x_at + c, x_at + cols, vector);
    const Floats<kRun> weight = load_as<kRun>(args.weight.data, args.weight.dtype, c, cols, vector);
    for (int j = 0; j < kRun; ++j) {
      g.v[j] = __fmul_rn(g.v[j], weight.v[j]);
      normed.v[j] = __fmul_rn(__fsub_rn(normed.v[j], mean), rstd);
    }
  };
  Floats<kRun> g, normed;
  float sum_g = 0, sum_gn = 0;
  for (std::int64_t c = team.first; c < cols; c += team.step) {
    read(c, g, normed);
    add_products(sum_gn, g, normed);  // what lies beyond the end has g = 0
    if constexpr (layer) {
      for (int j = 0; j < kRun; ++j) sum_g = __fadd_rn(sum_g, g.v[j]);
    }
  }
  const float n = static_cast<float>(cols);
  const float mean_gn = __fdiv_rn(team.sum(sum_gn), n), mean_g = layer ? __fdiv_rn(team.sum(sum_g), n) : 0.0F;
  for (std::int64_t c = team.first; c < cols; c += team.step) {
    read(c, g, normed);
    Floats<kRun> residual = {};
    if (args.residual_grad.data != nullptr) {
      residual = load_as<kRun>(args.residual_grad.data, type, dx_at + c, dx_at + cols, vector);
    }
    for (int j = 0; j < kRun; ++j) {
      const float inner = __fmaf_rn(-normed.v[j], mean_gn, __fsub_rn(g.v[j], mean_g));
      g.v[j] = __fmaf_rn(rstd, inner, residual.v[j]);
    }
    store_as<kRun>(args.dx.data, type, dx_at + c, dx_at + cols, vector, g);
  }
}

// What an element adds to its weight's gradient, and to its bias's. Bytes an element (bf16): dy 2 and x 2, read a second time.
template <bool layer>
struct WeightTerm {
  BackwardArgs args;
  __device__ __forceinline__ ColumnTerm operator()(std::int64_t v, std::int64_t c) const {
    const float dy = load_one(args.dy.data, args.x.dtype, args.start(v, args.dy_stride) + c);
    const float x = load_one(args.x.data, args.x.dtype, args.start(v, args.x_stride) + c);
    const float mean = layer ? args.mean[v] : 0.0F;
    return {{__fmul_rn(dy, __fmul_rn(__fsub_rn(x, mean), args.rstd[v])), dy}};
  }
};

bool same_or_absent(ConstPtr p, DType dtype) { return !p || p.dtype == dtype; }

// Launches one of two forms by the length of a vector.
template <typename Args>
void launch_rows(StreamHandle* stream, std::int64_t vectors, std::int64_t cols, void (*of_warp)(Args, bool),
                 void (*of_block)(Args, bool), const Args& args, bool aligned) {
  if (vectors == 0) return;
  if (cols <= kWarpColumns) {
    launch(stream, {.blocks_x = blocks_of(vectors, kWarpsOfBlock), .threads = 32 * kWarpsOfBlock}, of_warp, args, aligned);
  } else {
    launch(stream, {.blocks_x = vectors, .threads = kLongThreads}, of_block, args, aligned);
  }
}

template <bool layer>
void forward(StreamHandle* stream, const ForwardArgs& args) {
  const bool aligned = all_aligned(args.x, args.residual, args.weight, args.bias, args.sum_out, args.y) &&
                       args.cols % kRun == 0 && args.x_stride % kRun == 0 && args.y_stride % kRun == 0;
  launch_rows<ForwardArgs>(stream, args.vectors, args.cols, norm_forward_kernel<layer, false>, norm_forward_kernel<layer, true>,
                           args, aligned);
}
template <bool layer>
void backward(StreamHandle* stream, const BackwardArgs& args) {
  const bool aligned = all_aligned(args.dy, args.x, args.weight, args.residual_grad, args.dx) && args.cols % kRun == 0 &&
                       args.dy_stride % kRun == 0 && args.x_stride % kRun == 0 && args.dx_stride % kRun == 0;
  launch_rows<BackwardArgs>(stream, args.vectors, args.cols, norm_backward_kernel<layer, false>,
                            norm_backward_kernel<layer, true>, args, aligned);
}

}  // namespace

void CudaOps::layernorm_forward(StreamHandle* stream, const LayerNormForwardArgs& args) {
  const DType type = args.x.dtype;
  SPIPE_CHECK(
      is_storage(type) && args.y.dtype == type && same_or_absent(args.residual, type) && same_or_absent(args.sum_out, type),
      "layernorm: activations of one type");
  SPIPE_CHECK(is_storage(args.weight.dtype) && is_storage(args.bias.dtype), "layernorm: parameter types");
  SPIPE_CHECK(!args.residual || args.sum_out, "layernorm: a residual needs sum_out");
  SPIPE_CHECK(args.rows >= 0 && args.cols > 0, "layernorm: size");
  forward<true>(stream, {.x = args.x,
                         .residual = args.residual,
                         .weight = args.weight,
                         .bias = args.bias,
                         .sum_out = args.sum_out,
                         .y = args.y,
                         .mean = args.mean,
                         .rstd = args.rstd,
                         .vectors = args.rows,
                         .inner = 1,
                         .cols = args.cols,
                         .x_stride = args.cols,
                         .y_stride = args.cols,
                         .eps = args.eps});
}

void CudaOps::layernorm_backward(StreamHandle* stream, const LayerNormBackwardArgs& args) {
  const DType type = args.x.dtype;
  SPIPE_CHECK(is_storage(type) && args.dy.dtype == type && args.dx.dtype == type && same_or_absent(args.residual_grad, type),
              "layernorm: activations of one type");
  SPIPE_CHECK(is_storage(args.weight.dtype) && args.dweight.dtype == DType::f32 && args.dbias.dtype == DType::f32,
              "layernorm: weight gradients are fp32");
  SPIPE_CHECK(args.rows >= 0 && args.cols > 0, "layernorm: size");
  const BackwardArgs rows{.dy = args.dy,
                          .x = args.x,
                          .weight = args.weight,
                          .residual_grad = args.residual_grad,
                          .mean = args.mean,
                          .rstd = args.rstd,
                          .dx = args.dx,
                          .vectors = args.rows,
                          .inner = 1,
                          .cols = args.cols,
                          .dy_stride = args.cols,
                          .x_stride = args.cols,
                          .dx_stride = args.cols};
  sum_columns<2>(stream, WeightTerm<true>{rows}, args.rows, args.cols, scratch_, args.accumulate, {args.dweight, args.dbias});
  backward<true>(stream, rows);
}

void CudaOps::rmsnorm_forward(StreamHandle* stream, const RmsNormForwardArgs& args) {
  const std::int64_t x_stride = or_packed(args.x_stride, args.inner * args.cols);
  const DType type = args.x.dtype;
  SPIPE_CHECK(
      is_storage(type) && args.y.dtype == type && same_or_absent(args.residual, type) && same_or_absent(args.sum_out, type),
      "rmsnorm: activations of one type");
  SPIPE_CHECK(is_storage(args.weight.dtype), "rmsnorm: weight type");
  SPIPE_CHECK(!args.residual || (args.sum_out && args.inner == 1 && x_stride == args.cols),
              "rmsnorm: a residual needs sum_out and packed rows");
  SPIPE_CHECK(args.outer >= 0 && args.inner > 0 && args.cols > 0, "rmsnorm: size");
  forward<false>(stream, {.x = args.x,
                          .residual = args.residual,
                          .weight = args.weight,
                          .bias = {},
                          .sum_out = args.sum_out,
                          .y = args.y,
                          .mean = nullptr,
                          .rstd = args.rstd,
                          .vectors = args.outer * args.inner,
                          .inner = args.inner,
                          .cols = args.cols,
                          .x_stride = x_stride,
                          .y_stride = or_packed(args.y_stride, args.inner * args.cols),
                          .eps = args.eps});
}

void CudaOps::rmsnorm_backward(StreamHandle* stream, const RmsNormBackwardArgs& args) {
  const std::int64_t packed = args.inner * args.cols;
  const DType type = args.x.dtype;
  SPIPE_CHECK(is_storage(type) && args.dy.dtype == type && args.dx.dtype == type && same_or_absent(args.residual_grad, type),
              "rmsnorm: activations of one type");
  SPIPE_CHECK(is_storage(args.weight.dtype) && args.dweight.dtype == DType::f32, "rmsnorm: weight gradients are fp32");
  SPIPE_CHECK(!args.residual_grad || args.inner == 1, "rmsnorm: a residual gradient needs whole rows");
  SPIPE_CHECK(args.outer >= 0 && args.inner > 0 && args.cols > 0, "rmsnorm: size");
  const BackwardArgs rows{.dy = args.dy,
                          .x = args.x,
                          .weight = args.weight,
                          .residual_grad = args.residual_grad,
                          .mean = nullptr,
                          .rstd = args.rstd,
                          .dx = args.dx,
                          .vectors = args.outer * args.inner,
                          .inner = args.inner,
                          .cols = args.cols,
                          .dy_stride = or_packed(args.dy_stride, packed),
                          .x_stride = or_packed(args.x_stride, packed),
                          .dx_stride = or_packed(args.dx_stride, packed)};
  // First the weights' gradients: dx may lie over dy.
  sum_columns<1>(stream, WeightTerm<false>{rows}, rows.vectors, args.cols, scratch_, args.accumulate, {args.dweight});
  backward<false>(stream, rows);
}

}  // namespace spipe::cuda
