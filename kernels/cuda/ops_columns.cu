// Column sums (bias gradients), and the last step of all sums over rows.
#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/cuda_ops.cuh"

namespace spipe::cuda {
namespace {

constexpr unsigned kThreads = 128;

// Reads parts * 4 bytes a column, writes 4 (and reads 4 to accumulate).
__global__ void __launch_bounds__(kThreads) combine_kernel(const float* partials, std::int64_t parts, std::int64_t stride,
                                                           std::int64_t cols, bool accumulate, float* out) {
  const std::int64_t col = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (col >= cols) return;
  float sum = 0;
  for (std::int64_t part = 0; part < parts; ++part) sum = __fadd_rn(sum, partials[part * stride + col]);
  out[col] = accumulate ? __fadd_rn(out[col], sum) : sum;
}

struct Element {
  const void* x;
  DType type;
  std::int64_t ldx;
  __device__ __forceinline__ ColumnTerm operator()(std::int64_t row, std::int64_t col) const {
    return {{load_one(x, type, row * ldx + col), 0.0F}};
  }
};

}  // namespace

void combine_columns(StreamHandle* stream, const float* partials, std::int64_t parts, std::int64_t stride, std::int64_t cols,
                     bool accumulate, void* out) {
  launch(stream, {.blocks_x = blocks_of(cols, kThreads), .threads = kThreads}, combine_kernel, partials, parts, stride, cols,
         accumulate, static_cast<float*>(out));
}

void CudaOps::column_sum(StreamHandle* stream, const ColumnSumArgs& args) {
  SPIPE_CHECK(is_storage(args.x.dtype) && args.out.dtype == DType::f32, "column_sum: fp32 out");
  SPIPE_CHECK(args.rows >= 0 && args.cols >= 0, "column_sum: size");
  const std::int64_t ldx = or_packed(args.ldx, args.cols);
  SPIPE_CHECK(ldx >= args.cols, "column_sum: ldx is shorter than a row");
  sum_columns<1>(stream, Element{args.x.data, args.x.dtype, ldx}, args.rows, args.cols, scratch_, args.accumulate, {args.out});
}

}  // namespace spipe::cuda
