// The last add of a gradient with its norm, and the update rules: the bits of the contract in kernels/ops.h. Every operation
// that rounds is named here (_rn); the build also forbids contraction, and a test reads the PTX for it.
#include "kernels/cuda/cuda_ops.cuh"
#include "kernels/cuda/device.cuh"

namespace spipe::cuda {
namespace {

constexpr int kRun = 4;  // elements of a thread: 16 bytes of fp32
constexpr int kThreads = 256;

// ---- finish_gradient ------------------------------------------------------------------------------------------------------

// A block takes one or more norm blocks of 4,096 elements. Reads 4 B an element (8 with b), writes 2 or 4; 3 FLOPs.
// dst may be a narrower tensor over a: norm blocks must go in order then, so it is launched as one block, whose writes of one
// norm block land on what it has read before.
template <typename T>
__global__ void __launch_bounds__(kThreads) finish_gradient_kernel(const FinishGradientArgs args, bool vector) {
  constexpr int kRuns = static_cast<int>(kNormBlock) / (kThreads * kRun);
  __shared__ float values[kNormBlock];
  T* dst = static_cast<T*>(args.dst.data);
  for (std::int64_t block = blockIdx.x; block * kNormBlock < args.elements; block += gridDim.x) {
    const std::int64_t first = block * kNormBlock;
    Floats<kRun> rounded_values[kRuns];
    for (int r = 0; r < kRuns; ++r) {
      const int at = (r * kThreads + static_cast<int>(threadIdx.x)) * kRun;
      Floats<kRun> g = load_some<kRun>(args.a, first + at, args.elements, vector);
      if (args.b != nullptr) {
        const Floats<kRun> b = load_some<kRun>(args.b, first + at, args.elements, vector);
        for (int j = 0; j < kRun; ++j) g.v[j] = __fadd_rn(g.v[j], b.v[j]);
      }
      for (int j = 0; j < kRun; ++j) {
        g.v[j] = widen(rounded<T>(g.v[j]));
        values[at + j] = g.v[j];  // 0 beyond the end, which changes no sum of squares
      }
      rounded_values[r] = g;
    }
    __syncthreads();
    for (int r = 0; r < kRuns; ++r) {
      const int at = (r * kThreads + static_cast<int>(threadIdx.x)) * kRun;
      store_some<kRun>(dst, first + at, args.elements, vector, rounded_values[r]);
    }
    if (args.block_sums != nullptr &&
        threadIdx.x < 16) {  // the sixteen lanes of the contract; squares of floats are exact in double
      double sum = 0;
      for (int i = static_cast<int>(threadIdx.x); i < kNormBlock; i += 16) {
        const double x = static_cast<double>(values[i]);
        sum = __fma_rn(x, x, sum);
      }
      for (unsigned half = 8; half > 0; half /= 2) sum = __dadd_rn(sum, __shfl_xor_sync(0xffffU, sum, static_cast<int>(half)));
      if (threadIdx.x == 0) {
        args.block_sums[block] = sum;
        const unsigned long long bits = static_cast<unsigned long long>(__double_as_longlong(sum));
        if ((bits >> 52 & 0x7ffU) == 0x7ffU) atomicOr(args.nonfinite, 1U);
      }
    }
    __syncthreads();
  }
}

// ---- update rules ---------------------------------------------------------------------------------------------------------

// Four 16-bit patterns.
__device__ __forceinline__ void store_patterns(void* pointer, std::int64_t i, std::int64_t count, bool vector,
                                               const unsigned (&x)[kRun]) {
  auto* p = static_cast<std::uint16_t*>(pointer);
  if (vector && i + kRun <= count) {
    const unsigned words[2] = {x[0] | x[1] << 16, x[2] | x[3] << 16};
    return store_words<kRun>(p + i, words);
  }
  for (int j = 0; j < kRun; ++j) {
    if (i + j < count) p[i + j] = static_cast<std::uint16_t>(x[j]);
  }
}

__device__ __forceinline__ unsigned mix(unsigned x) {
  x = (x ^ x >> 16) * 0x7feb352dU;
  x = (x ^ x >> 15) * 0x846ca68bU;
  return x ^ x >> 16;
}
// The upper half of x + random; NaN stays one.
__device__ __forceinline__ unsigned round_at_random(float x, unsigned random) {
  const unsigned bits = __float_as_uint(x);
  return (is_nan(x) ? bits | 0x400000U : bits + random) >> 16;
}
template <typename T>
__device__ __forceinline__ unsigned copy_bits(float x) {
  T copy;
  round_copy(copy, x);
  return copy.bits;
}
__device__ __forceinline__ float sign_of(float x) { return x > 0 ? 1.0F : x < 0 ? -1.0F : 0.0F; }

template <UpdateRule rule>
struct Step {  // of one element
  float p, m, v;
  __device__ __forceinline__ Step(const UpdateArgs& a, float g, float old, float old_m, float old_v) : v(0) {
    if constexpr (rule == UpdateRule::adamw || rule == UpdateRule::adam) {
      const float d = rule == UpdateRule::adam ? __fmaf_rn(a.l2, old, g) : g;
      m = __fmaf_rn(a.beta1, old_m, __fmul_rn(a.one_minus_beta1, d));
      v = __fmaf_rn(a.beta2, old_v, __fmul_rn(__fmul_rn(a.one_minus_beta2, d), d));
      const float denominator = __fadd_rn(__fmul_rn(__fsqrt_rn(v), a.inv_sqrt_bias2), a.eps);
      p = __fmaf_rn(-a.step_size, __fdiv_rn(m, denominator), rule == UpdateRule::adam ? old : __fmul_rn(old, a.decay));
    } else if constexpr (rule == UpdateRule::lion) {
      const float c = __fmaf_rn(a.beta1, old_m, __fmul_rn(a.one_minus_beta1, g));
      p = __fmaf_rn(-a.step_size, sign_of(c), __fmul_rn(old, a.decay));
      m = __fmaf_rn(a.beta2, old_m, __fmul_rn(a.one_minus_beta2, g));
    } else {
      const float d = __fmaf_rn(a.l2, old, g);
      m = __fmaf_rn(a.beta1, old_m, d);
      p = __fmaf_rn(-a.step_size, rule == UpdateRule::sgd_nesterov ? __fmaf_rn(a.beta1, m, d) : m, old);
    }
  }
};

// One pass. Bytes an element, AdamW: fp32 state with bf16 gradient and copy 14 read + 14 written; split with bf16 moments 10
// + 8. About 14 FLOPs: memory-bound by far.
template <UpdateRule rule>
__global__ void __launch_bounds__(kThreads) update_kernel(const UpdateArgs a, bool vector) {
  constexpr bool second = rule == UpdateRule::adamw || rule == UpdateRule::adam;
  const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kRun;
  if (i >= a.elements) return;
  const bool split = a.to.master.dtype == DType::u16, copies = a.to.compute.data != nullptr;
  const bool bf16_copy = a.to.compute.dtype == DType::bf16;
  const Floats<kRun> grad = load_as<kRun>(a.grad.data, a.grad.dtype, i, a.elements, vector);
  const Ptr& old = split ? a.from.compute : a.from.master;
  Floats<kRun> p = load_as<kRun>(old.data, old.dtype, i, a.elements, vector);
  if (split) {
    const Floats<kRun> low = load_as<kRun>(a.from.master.data, a.from.master.dtype, i, a.elements, vector);
    for (int j = 0; j < kRun; ++j) {
      const unsigned sign_extended = (__float_as_uint(low.v[j]) >> 16 ^ 0x8000U) - 0x8000U;
      p.v[j] = __uint_as_float(__float_as_uint(p.v[j]) + sign_extended);
    }
  }
  Floats<kRun> m = load_as<kRun>(a.from.m.data, a.from.m.dtype, i, a.elements, vector), v = {};
  if constexpr (second) v = load_as<kRun>(a.from.v.data, a.from.v.dtype, i, a.elements, vector);
  bool overflow = false;
  for (int j = 0; j < kRun; ++j) {
    const Step<rule> step(a, __fmul_rn(grad.v[j], a.grad_scale), p.v[j], m.v[j], v.v[j]);
    p.v[j] = step.p;
    m.v[j] = step.m;
    v.v[j] = step.v;
    const unsigned magnitude =
        __float_as_uint(step.p) & 0x7fffffffU;  // 65520 and 0x1.ffp127 are the first to round to infinity
    if (copies && i + j < a.elements && magnitude < 0x7f800000U && magnitude >= (bf16_copy ? 0x7f7f8000U : 0x477ff000U)) {
      overflow = true;
    }
  }
  if (a.to.m.dtype == DType::bf16) {
    unsigned m_bits[kRun], v_bits[kRun];
    for (int j = 0; j < kRun; ++j) {
      const unsigned random = mix(static_cast<unsigned>(a.first_element + static_cast<std::uint64_t>(i + j)) ^ a.moment_key);
      m_bits[j] = round_at_random(m.v[j], random & 0xffffU);
      v_bits[j] = round_at_random(v.v[j], random >> 16);
    }
    store_patterns(a.to.m.data, i, a.elements, vector, m_bits);
    if constexpr (second) store_patterns(a.to.v.data, i, a.elements, vector, v_bits);
  } else {
    store_some<kRun>(static_cast<float*>(a.to.m.data), i, a.elements, vector, m);
    if constexpr (second) store_some<kRun>(static_cast<float*>(a.to.v.data), i, a.elements, vector, v);
  }
  if (split) {
    unsigned low[kRun];
    for (int j = 0; j < kRun; ++j) low[j] = __float_as_uint(p.v[j]) & 0xffffU;
    store_patterns(a.to.master.data, i, a.elements, vector, low);
  } else {
    store_some<kRun>(static_cast<float*>(a.to.master.data), i, a.elements, vector, p);
  }
  if (copies) {
    unsigned copy[kRun];
    for (int j = 0; j < kRun; ++j) copy[j] = bf16_copy ? copy_bits<Bf16>(p.v[j]) : copy_bits<Half>(p.v[j]);
    store_patterns(a.to.compute.data, i, a.elements, vector, copy);
  }
  if (overflow) atomicOr(a.nonfinite_master, 1U);
}

template <UpdateRule rule>
void launch_update(StreamHandle* stream, const UpdateArgs& args) {
  const UpdatePlanes &from = args.from, &to = args.to;
  bool vector = is_aligned(args.grad.data);
  for (const UpdatePlanes* planes : {&from, &to}) {
    for (const Ptr& p : {planes->compute, planes->master, planes->m, planes->v}) vector = vector && is_aligned(p.data);
  }
  launch(stream, {.blocks_x = blocks_of(args.elements, kThreads * kRun), .threads = kThreads}, update_kernel<rule>, args,
         vector);
}

}  // namespace

void CudaOps::finish_gradient(StreamHandle* stream, const FinishGradientArgs& args) {
  SPIPE_CHECK(args.elements >= 0, "finish_gradient: size");
  if (args.elements == 0) return;
  const bool in_order = args.dst.data == args.a && args.dst.dtype != DType::f32;
  const bool vector = is_aligned(args.a) && is_aligned(args.b) && is_aligned(args.dst.data);
  with_storage(args.dst.dtype, [&](auto t) {
    using T = decltype(t);
    launch(stream, {.blocks_x = in_order ? 1 : blocks_of(args.elements, kNormBlock), .threads = kThreads},
           finish_gradient_kernel<T>, args, vector);
  });
}

void CudaOps::adamw(StreamHandle* stream, const AdamWArgs& args) {
  const bool out = args.from_master != nullptr;
  SPIPE_CHECK(out == (args.from_m != nullptr) && out == (args.from_v != nullptr),
              "adamw: all of the state out of place or none");
  const auto floats = [](const float* p) { return Ptr{const_cast<float*>(p), DType::f32}; };
  UpdateArgs all;
  all.grad = args.grad;
  all.to = {.compute = args.compute_copy, .master = floats(args.master), .m = floats(args.m), .v = floats(args.v)};
  all.from = all.to;
  if (out) {
    all.from.master = floats(args.from_master);
    all.from.m = floats(args.from_m);
    all.from.v = floats(args.from_v);
  }
  all.nonfinite_master = args.nonfinite_master;
  all.elements = args.elements;
  all.grad_scale = args.grad_scale;
  all.beta1 = args.beta1;
  all.one_minus_beta1 = args.one_minus_beta1;
  all.beta2 = args.beta2;
  all.one_minus_beta2 = args.one_minus_beta2;
  all.decay = args.decay;
  all.inv_sqrt_bias2 = args.inv_sqrt_bias2;
  all.eps = args.eps;
  all.step_size = args.step_size;
  update(stream, all);
}

void CudaOps::update(StreamHandle* stream, const UpdateArgs& args) {
  SPIPE_CHECK(is_storage(args.grad.dtype), "update: fp32, bf16 or fp16 gradients");
  SPIPE_CHECK(args.elements >= 0, "update: size");
  const UpdatePlanes &from = args.from, &to = args.to;
  const bool split = to.master.dtype == DType::u16;
  SPIPE_CHECK(split || to.master.dtype == DType::f32, "update: the master is fp32, or its low half u16");
  SPIPE_CHECK(!split || (to.compute && to.compute.dtype == DType::bf16), "update: the upper half of a master is bf16");
  SPIPE_CHECK(!to.compute || to.compute.dtype == DType::bf16 || to.compute.dtype == DType::f16,
              "update: the compute copy is bf16 or fp16");
  SPIPE_CHECK(to.m.dtype == DType::f32 || to.m.dtype == DType::bf16, "update: moments are fp32 or bf16");
  SPIPE_CHECK(from.master.dtype == to.master.dtype && from.m.dtype == to.m.dtype, "update: old and new state are of one type");
  if (has_second_moment(args.rule)) {
    SPIPE_CHECK(from.v && to.v && from.v.dtype == to.m.dtype && to.v.dtype == to.m.dtype, "update: moments are of one type");
  }
  SPIPE_CHECK((from.master.data == to.master.data) == (from.m.data == to.m.data),
              "update: all of the state out of place or none");
  if (args.elements == 0) return;
  switch (args.rule) {
    case UpdateRule::adamw:
      return launch_update<UpdateRule::adamw>(stream, args);
    case UpdateRule::adam:
      return launch_update<UpdateRule::adam>(stream, args);
    case UpdateRule::sgd:
      return launch_update<UpdateRule::sgd>(stream, args);
    case UpdateRule::sgd_nesterov:
      return launch_update<UpdateRule::sgd_nesterov>(stream, args);
    case UpdateRule::lion:
      return launch_update<UpdateRule::lion>(stream, args);
  }
}

}  // namespace spipe::cuda
