// Softmax cross-entropy on a chunk of logits, in place.
#include "kernels/cuda/cuda_ops.cuh"
#include "kernels/cuda/device.cuh"

namespace spipe::cuda {
namespace {

constexpr int kRun = 4, kThreads = 256;

// A block takes a row. The largest logit and the sum of exponentials relative to it in one pass (each thread rescales its sum
// when its largest grows), the gradient in a second: 8 bytes read and 4 written an element, 4 read for the loss alone; about 10
// FLOPs and two exponentials. A target beyond the vocabulary gives NaN.
__global__ void __launch_bounds__(kThreads) cross_entropy_kernel(const SoftmaxCrossEntropyArgs args, bool vector) {
  const std::int64_t row = blockIdx.x, cols = args.cols, target = args.targets[row];
  float* logits = args.logits + row * args.ld;
  if (target < 0) {  // masked: the whole block takes this way
    if (threadIdx.x == 0) args.nll[row] = 0;
    if (args.scale == 0) return;
    for (std::int64_t c = threadIdx.x * kRun; c < cols; c += kThreads * kRun) {
      store_some<kRun>(logits, c, cols, vector, Floats<kRun>{});
    }
    return;
  }
  constexpr float kLowest = -3.4028234663852886e38F;
  float largest = kLowest, sum = 0;
  for (std::int64_t c = threadIdx.x * kRun; c < cols; c += kThreads * kRun) {
    const Floats<kRun> x = load_some<kRun>(logits, c, cols, vector);
    float top = largest;
    for (int j = 0; j < kRun; ++j) {
      if (c + j < cols) top = fmaxf(top, x.v[j]);
    }
    if (top > largest) {
      sum *= expf(largest - top);
      largest = top;
    }
    for (int j = 0; j < kRun; ++j) {
      if (c + j < cols) sum += expf(x.v[j] - largest);
    }
  }
  __shared__ float of_warp[kThreads / 32];
  const float warp_top = warp_max(largest);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = warp_top;
  __syncthreads();
  float top = of_warp[0];
  for (int warp = 1; warp < kThreads / 32; ++warp) top = fmaxf(top, of_warp[warp]);
  // exp(lowest - top) is 0 for the threads that saw nothing.
  const float total = block_sum<kThreads>(sum * expf(largest - top));
  const bool known = target < cols;
  if (threadIdx.x == 0) {
    args.nll[row] = known ? (top - logits[target]) + logf(total) : __uint_as_float(0x7fc00000U);
  }
  if (args.scale == 0) return;
  __syncthreads();  // the target's logit has been read
  const float inverse = __fdiv_rn(1.0F, total);
  for (std::int64_t c = threadIdx.x * kRun; c < cols; c += kThreads * kRun) {
    Floats<kRun> x = load_some<kRun>(logits, c, cols, vector);
    for (int j = 0; j < kRun; ++j) {
      const float p = expf(x.v[j] - top) * inverse;
      x.v[j] = args.scale * (c + j == target ? p - 1.0F : p);
    }
    store_some<kRun>(logits, c, cols, vector, x);
  }
}

}  // namespace

void CudaOps::softmax_cross_entropy(StreamHandle* stream, const SoftmaxCrossEntropyArgs& given) {
  SoftmaxCrossEntropyArgs args = given;
  SPIPE_CHECK(args.rows >= 0 && args.cols > 0, "softmax_cross_entropy: size");
  args.ld = or_packed(args.ld, args.cols);
  SPIPE_CHECK(args.ld >= args.cols, "softmax_cross_entropy: ld is shorter than a row");
  if (args.rows == 0) return;
  launch(stream, {.blocks_x = args.rows, .threads = kThreads}, cross_entropy_kernel, args,
         is_aligned(args.logits) && args.ld % kRun == 0);
}

}  // namespace spipe::cuda
