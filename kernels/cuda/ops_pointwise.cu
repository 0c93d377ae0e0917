// Rotary positions, activations, gated activations: one read and one write of every element.
#include "kernels/cuda/cuda_ops.cuh"
#include "kernels/cuda/device.cuh"

namespace spipe::cuda {
namespace {

constexpr int kRun = 8;  // elements of a thread
constexpr unsigned kThreads = 256;

__device__ __forceinline__ std::int64_t thread_index() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// ---- activations ----------------------------------------------------------------------------------------------------------

// s(t) = 1 / (1 + exp(-t)) and s'(t), both with full relative accuracy on either side.
struct Logistic {
  float s, derivative;
  __device__ __forceinline__ explicit Logistic(float t) {
    const float e = expf(-fabsf(t)), r = __fdiv_rn(1.0F, 1.0F + e), er = e * r;
    s = t < 0 ? er : r;
    derivative = er * r;
  }
};
// |x| limited so that a derivative's polynomial factor stays finite; beyond it the other factor is 0. NaN stays.
__device__ __forceinline__ float limit(float x, float bound) { return x > bound ? bound : x < -bound ? -bound : x; }

// 0.5 x (1 + tanh u) = x s(2u), 2u = c x (1 + a x^2), c = 2 sqrt(2/pi), a = 0.044715.
constexpr float kC = 1.5957691216057308F, kA = 0.044715F;
__device__ __forceinline__ float tanh_argument(float x) { return kC * x * __fmaf_rn(kA, x * x, 1.0F); }

__device__ __forceinline__ float value(Activation kind, float x) {
  switch (kind) {
    case Activation::gelu_tanh:
      return x * Logistic(tanh_argument(x)).s;
    case Activation::gelu_erf:
      return x * normcdff(x);
    case Activation::relu:
      return x > 0 || is_nan(x) ? x : 0.0F;
    case Activation::silu:
      return x * Logistic(x).s;
  }
  return 0;
}
__device__ __forceinline__ float slope(Activation kind, float x) {
  switch (kind) {
    case Activation::gelu_tanh: {
      const float b = limit(x, 30.0F);
      const Logistic l(tanh_argument(b));
      return __fmaf_rn(b * kC * __fmaf_rn(3 * kA, b * b, 1.0F), l.derivative, l.s);
    }
    case Activation::gelu_erf: {
      const float b = limit(x, 15.0F);
      return __fmaf_rn(b * 0.3989422804014327F, expf(-0.5F * b * b), normcdff(b));  // 1 / sqrt(2 pi)
    }
    case Activation::relu:
      return x > 0 ? 1.0F : 0.0F;
    case Activation::silu: {
      const Logistic l(x);
      return __fmaf_rn(limit(x, 200.0F), l.derivative, l.s);
    }
  }
  return 0;
}

// Bytes an element: read and write (4 for bf16); about 20 FLOPs.
__global__ void __launch_bounds__(kThreads) activation_forward_kernel(const ActivationForwardArgs args, bool vector) {
  const std::int64_t i = thread_index() * kRun;
  Floats<kRun> x = load_as<kRun>(args.x.data, args.x.dtype, i, args.elements, vector);
  for (int j = 0; j < kRun; ++j) x.v[j] = value(args.kind, x.v[j]);
  store_as<kRun>(args.y.data, args.y.dtype, i, args.elements, vector, x);
}
// Bytes an element: x and dy read, dx written (6 for bf16); about 25 FLOPs.
__global__ void __launch_bounds__(kThreads) activation_backward_kernel(const ActivationBackwardArgs args, bool vector) {
  const std::int64_t i = thread_index() * kRun;
  Floats<kRun> x = load_as<kRun>(args.x.data, args.x.dtype, i, args.elements, vector);
  const Floats<kRun> dy = load_as<kRun>(args.dy.data, args.dy.dtype, i, args.elements, vector);
  for (int j = 0; j < kRun; ++j) x.v[j] = dy.v[j] * slope(args.kind, x.v[j]);
  store_as<kRun>(args.dx.data, args.dx.dtype, i, args.elements, vector, x);
}

// A thread takes kRun columns of one row. Bytes a result element: gate and up read, y written (6 for bf16).
__global__ void __launch_bounds__(kThreads) gated_forward_kernel(const GatedForwardArgs args, std::int64_t runs, bool vector) {
  const std::int64_t index = thread_index();
  if (index >= args.rows * runs) return;
  const std::int64_t row = index / runs, col = index % runs * kRun;
  const std::int64_t gate = row * 2 * args.cols, up = gate + args.cols, out = row * args.cols;
  Floats<kRun> g = load_as<kRun>(args.x.data, args.x.dtype, gate + col, gate + args.cols, vector);
  const Floats<kRun> u = load_as<kRun>(args.x.data, args.x.dtype, up + col, up + args.cols, vector);
  for (int j = 0; j < kRun; ++j) g.v[j] = value(args.kind, g.v[j]) * u.v[j];
  store_as<kRun>(args.y.data, args.y.dtype, out + col, out + args.cols, vector, g);
}
// Bytes a dy element: gate, up and dy read, both gradients written (10 for bf16). dx may be x: a thread writes where it read.
__global__ void __launch_bounds__(kThreads)
    gated_backward_kernel(const GatedBackwardArgs args, std::int64_t runs, bool vector) {
  const std::int64_t index = thread_index();
  if (index >= args.rows * runs) return;
  const std::int64_t row = index / runs, col = index % runs * kRun;
  const std::int64_t gate = row * 2 * args.cols, up = gate + args.cols, out = row * args.cols;
  Floats<kRun> g = load_as<kRun>(args.x.data, args.x.dtype, gate + col, gate + args.cols, vector);
  Floats<kRun> u = load_as<kRun>(args.x.data, args.x.dtype, up + col, up + args.cols, vector);
  const Floats<kRun> dy = load_as<kRun>(args.dy.data, args.dy.dtype, out + col, out + args.cols, vector);
  for (int j = 0; j < kRun; ++j) {
    const float of_value = value(args.kind, g.v[j]);
    g.v[j] = dy.v[j] * u.v[j] * slope(args.kind, g.v[j]);
    u.v[j] = dy.v[j] * of_value;
  }
  store_as<kRun>(args.dx.data, args.dx.dtype, gate + col, gate + args.cols, vector, g);
  store_as<kRun>(args.dx.data, args.dx.dtype, up + col, up + args.cols, vector, u);
}

// ---- rotary positions -----------------------------------------------------------------------------------------------------

constexpr int kPairs = 4;  // pairs of a thread

// Bytes an element: read and write; the tables (8 bytes a pair of a position) come from the caches. 3 FLOPs.
__global__ void __launch_bounds__(kThreads) rope_kernel(const RopeArgs args, std::int64_t runs, bool vector) {
  const std::int64_t index = thread_index();
  if (index >= args.tokens * args.heads * runs) return;
  const std::int64_t half = args.head_dim / 2, i = index % runs * kPairs;
  const std::int64_t head = index / runs % args.heads, token = index / runs / args.heads;
  const std::int64_t table = (args.first_position + token % args.seq_len) * half;
  const std::int64_t first = token * args.x_stride + head * args.head_dim, second = first + half;
  const Floats<kPairs> c = load_some<kPairs>(args.cos, table + i, table + half, vector);
  Floats<kPairs> s = load_some<kPairs>(args.sin, table + i, table + half, vector);
  Floats<kPairs> a = load_as<kPairs>(args.x.data, args.x.dtype, first + i, first + half, vector);
  Floats<kPairs> b = load_as<kPairs>(args.x.data, args.x.dtype, second + i, second + half, vector);
  for (int j = 0; j < kPairs; ++j) {
    if (args.backward) s.v[j] = -s.v[j];
    const float x = a.v[j], y = b.v[j];
    a.v[j] = __fmaf_rn(x, c.v[j], -(y * s.v[j]));
    b.v[j] = __fmaf_rn(y, c.v[j], x * s.v[j]);
  }
  store_as<kPairs>(args.x.data, args.x.dtype, first + i, first + half, vector, a);
  store_as<kPairs>(args.x.data, args.x.dtype, second + i, second + half, vector, b);
}

Shape shape_of(std::int64_t threads) { return {.blocks_x = blocks_of(threads, kThreads), .threads = kThreads}; }

}  // namespace

void CudaOps::rope(StreamHandle* stream, const RopeArgs& args) {
  SPIPE_CHECK(is_storage(args.x.dtype), "rope: fp32, bf16 or fp16");
  SPIPE_CHECK(args.head_dim > 0 && args.head_dim % 2 == 0, "rope: an even head size");
  SPIPE_CHECK(args.tokens >= 0 && args.seq_len > 0 && args.x_stride >= args.heads * args.head_dim, "rope: size");
  const std::int64_t runs = blocks_of(args.head_dim / 2, kPairs), threads = args.tokens * args.heads * runs;
  if (threads == 0) return;
  const bool vector = is_aligned(args.x.data) && is_aligned(args.cos) && is_aligned(args.sin) &&
                      args.head_dim % (2 * kPairs) == 0 && args.x_stride % kPairs == 0;
  launch(stream, shape_of(threads), rope_kernel, args, runs, vector);
}

void CudaOps::activation_forward(StreamHandle* stream, const ActivationForwardArgs& args) {
  SPIPE_CHECK(is_storage(args.x.dtype) && args.y.dtype == args.x.dtype, "activation: one of fp32, bf16, fp16");
  SPIPE_CHECK(args.elements >= 0, "activation: size");
  if (args.elements == 0) return;
  launch(stream, shape_of(blocks_of(args.elements, kRun)), activation_forward_kernel, args, all_aligned(args.x, args.y));
}

void CudaOps::activation_backward(StreamHandle* stream, const ActivationBackwardArgs& args) {
  SPIPE_CHECK(is_storage(args.x.dtype) && args.dy.dtype == args.x.dtype && args.dx.dtype == args.x.dtype,
              "activation: one of fp32, bf16, fp16");
  SPIPE_CHECK(args.elements >= 0, "activation: size");
  if (args.elements == 0) return;
  launch(stream, shape_of(blocks_of(args.elements, kRun)), activation_backward_kernel, args,
         all_aligned(args.x, args.dy, args.dx));
}

void CudaOps::gated_forward(StreamHandle* stream, const GatedForwardArgs& args) {
  SPIPE_CHECK(is_storage(args.x.dtype) && args.y.dtype == args.x.dtype, "gated: one of fp32, bf16, fp16");
  SPIPE_CHECK(args.rows >= 0 && args.cols >= 0, "gated: size");
  const std::int64_t runs = blocks_of(args.cols, kRun);
  if (args.rows * runs == 0) return;
  launch(stream, shape_of(args.rows * runs), gated_forward_kernel, args, runs,
         all_aligned(args.x, args.y) && args.cols % kRun == 0);
}

void CudaOps::gated_backward(StreamHandle* stream, const GatedBackwardArgs& args) {
  SPIPE_CHECK(is_storage(args.x.dtype) && args.dy.dtype == args.x.dtype && args.dx.dtype == args.x.dtype,
              "gated: one of fp32, bf16, fp16");
  SPIPE_CHECK(args.rows >= 0 && args.cols >= 0, "gated: size");
  const std::int64_t runs = blocks_of(args.cols, kRun);
  if (args.rows * runs == 0) return;
  launch(stream, shape_of(args.rows * runs), gated_backward_kernel, args, runs,
         all_aligned(args.x, args.dy, args.dx) && args.cols % kRun == 0);
}

}  // namespace spipe::cuda
