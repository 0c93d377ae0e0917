// The embedding and its gradient. The gradient needs no atomics: tokens are put in order by (token, place), then every row of
// the table sums its own, ascending.
#include "kernels/cuda/cuda_ops.cuh"
#include "kernels/cuda/device.cuh"

namespace spipe::cuda {
namespace {

constexpr int kRun = 8;
constexpr unsigned kThreads = 128, kOrderThreads = 256;

// A block takes a token. Bytes an element (bf16): table 2 (position 2), out 2; 1 FLOP. A token outside the vocabulary gives
// NaN.
__global__ void __launch_bounds__(kThreads) embedding_forward_kernel(const EmbeddingForwardArgs args, bool vector) {
  const std::int64_t t = blockIdx.x, token = args.tokens[t], cols = args.cols;
  const bool known = token >= 0 && token < args.vocab;
  const DType type = args.out.dtype;
  for (std::int64_t c = threadIdx.x * kRun; c < cols; c += static_cast<std::int64_t>(kThreads) * kRun) {
    Floats<kRun> x;
    if (known) {
      x = load_as<kRun>(args.table.data, type, token * cols + c, (token + 1) * cols, vector);
    } else {
      for (int j = 0; j < kRun; ++j) x.v[j] = __uint_as_float(0x7fc00000U);
    }
    if (args.positions.data != nullptr) {
      const std::int64_t row = args.first_position + t % args.seq_len;
      const Floats<kRun> p = load_as<kRun>(args.positions.data, type, row * cols + c, (row + 1) * cols, vector);
      for (int j = 0; j < kRun; ++j) x.v[j] = __fadd_rn(x.v[j], p.v[j]);
    }
    store_as<kRun>(args.out.data, type, t * cols + c, (t + 1) * cols, vector, x);
  }
}

// order[rank] = t, rank being how many tokens come before t by (token, place): every token is compared with every other,
// count^2 integer comparisons (10^9 for 32,768 tokens: below a millisecond) on count * 4 bytes that stay in the caches.
__global__ void __launch_bounds__(kOrderThreads)
    order_kernel(const std::int32_t* tokens, std::int64_t count, std::int64_t* order) {
  __shared__ std::int32_t others[kOrderThreads];
  const std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * kOrderThreads + threadIdx.x;
  const std::int32_t own = t < count ? tokens[t] : 0;
  std::int64_t rank = 0;
  for (std::int64_t first = 0; first < count; first += kOrderThreads) {
    const std::int64_t other = first + threadIdx.x;
    others[threadIdx.x] = other < count ? tokens[other] : 0;
    __syncthreads();
    const int here = static_cast<int>(count - first < kOrderThreads ? count - first : kOrderThreads);
    for (int i = 0; i < here; ++i) rank += others[i] < own || (others[i] == own && first + i < t) ? 1 : 0;
    __syncthreads();
  }
  if (t < count) order[rank] = t;
}

// The number of ordered tokens that are less than `token`.
__device__ __forceinline__ std::int64_t lower_bound(const std::int32_t* tokens, const std::int64_t* order, std::int64_t count,
                                                    std::int64_t token) {
  std::int64_t low = 0, high = count;
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if (tokens[order[middle]] < token) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// out[row, :] (+)= sum of the rows of dout that `place(k)` names, k ascending from `begin` to `end`. By all threads of a block.
template <typename Place>
__device__ __forceinline__ void sum_rows(const EmbeddingBackwardArgs& args, void* out, std::int64_t row, std::int64_t begin,
                                         std::int64_t end, const Place& place, bool vector) {
  if (begin >= end && args.accumulate) return;
  const std::int64_t cols = args.cols;
  auto* sums = static_cast<float*>(out);
  for (std::int64_t c = threadIdx.x * kRun; c < cols; c += static_cast<std::int64_t>(kThreads) * kRun) {
    Floats<kRun> sum = {};
    for (std::int64_t k = begin; k < end; ++k) {
      const std::int64_t t = place(k);
      const Floats<kRun> x = load_as<kRun>(args.dout.data, args.dout.dtype, t * cols + c, (t + 1) * cols, vector);
      for (int j = 0; j < kRun; ++j) sum.v[j] = __fadd_rn(sum.v[j], x.v[j]);
    }
    if (args.accumulate) {
      const Floats<kRun> old = load_some<kRun>(sums, row * cols + c, (row + 1) * cols, vector);
      for (int j = 0; j < kRun; ++j) sum.v[j] = __fadd_rn(old.v[j], sum.v[j]);
    }
    store_some<kRun>(sums, row * cols + c, (row + 1) * cols, vector, sum);
  }
}

// A block takes a row of the table. Bytes: dout read once, the table written once (when accumulating, only rows with tokens are
// touched); 1 FLOP an element of dout.
__global__ void __launch_bounds__(kThreads)
    table_gradient_kernel(const EmbeddingBackwardArgs args, const std::int64_t* order, bool vector) {
  const std::int64_t v = blockIdx.x;
  const std::int64_t begin = lower_bound(args.tokens, order, args.count, v);
  const std::int64_t end = lower_bound(args.tokens, order, args.count, v + 1);
  sum_rows(
      args, args.dtable.data, v, begin, end, [order](std::int64_t k) { return order[k]; }, vector);
}

// A block takes a row of positions: one row of dout of each sequence.
__global__ void __launch_bounds__(kThreads) position_gradient_kernel(const EmbeddingBackwardArgs args, bool vector) {
  const std::int64_t row = blockIdx.x, first = row - args.first_position, step = args.seq_len;
  const bool used = first >= 0 && first < step && first < args.count;
  const std::int64_t sequences = used ? (args.count - first - 1) / step + 1 : 0;
  sum_rows(
      args, args.dpositions.data, row, 0, sequences, [first, step](std::int64_t k) { return first + k * step; }, vector);
}

}  // namespace

void CudaOps::embedding_forward(StreamHandle* stream, const EmbeddingForwardArgs& args) {
  SPIPE_CHECK(is_storage(args.out.dtype) && args.table.dtype == args.out.dtype, "embedding: one of fp32, bf16, fp16");
  SPIPE_CHECK(!args.positions || args.positions.dtype == args.out.dtype, "embedding: positions of the table's type");
  SPIPE_CHECK(args.count >= 0 && args.cols >= 0 && (!args.positions || args.seq_len > 0), "embedding: size");
  if (args.count == 0 || args.cols == 0) return;
  launch(stream, {.blocks_x = args.count, .threads = kThreads}, embedding_forward_kernel, args,
         all_aligned(args.table, args.positions, args.out) && args.cols % kRun == 0);
}

void CudaOps::embedding_backward(StreamHandle* stream, const EmbeddingBackwardArgs& args) {
  SPIPE_CHECK(is_storage(args.dout.dtype), "embedding: one of fp32, bf16, fp16");
  SPIPE_CHECK((!args.dtable || args.dtable.dtype == DType::f32) && (!args.dpositions || args.dpositions.dtype == DType::f32),
              "embedding: gradients are fp32");
  SPIPE_CHECK(args.count >= 0 && args.cols >= 0 && args.vocab >= 0, "embedding: size");
  if (args.cols == 0) return;
  const bool vector = all_aligned(args.dout, args.dtable, args.dpositions) && args.cols % kRun == 0;
  if (args.dtable && args.vocab > 0) {
    auto* order = static_cast<std::int64_t*>(args.workspace);
    if (args.count > 0) {
      launch(stream, {.blocks_x = blocks_of(args.count, kOrderThreads), .threads = kOrderThreads}, order_kernel, args.tokens,
             args.count, order);
    }
    launch(stream, {.blocks_x = args.vocab, .threads = kThreads}, table_gradient_kernel, args,
           static_cast<const std::int64_t*>(order), vector);
  }
  if (args.dpositions && args.position_rows > 0) {
    SPIPE_CHECK(args.seq_len > 0, "embedding: seq_len");
    launch(stream, {.blocks_x = args.position_rows, .threads = kThreads}, position_gradient_kernel, args, vector);
  }
}

}  // namespace spipe::cuda
