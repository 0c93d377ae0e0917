// The plain matmul: any shape, form, stride and type, without tensor cores. Each element is one sum over k ascending with fma.
// For what cuBLASLt does not take, and for the emulator.
#include "kernels/cuda/cuda_ops.cuh"
#include "kernels/cuda/device.cuh"

namespace spipe::cuda {
namespace {

constexpr int kTile = 64, kDepth = 16, kSide = 16, kPer = kTile / kSide;  // a block's tile of C, its step in k, threads a side
constexpr unsigned kThreads = kSide * kSide;

// Tiles of op(A) and op(B) go through shared memory; a thread sums 4x4 elements, rows and columns 16 apart.
// 2 m n k FLOPs; reads A n/64 times and B m/64 times, writes C once (reads it to accumulate).
__global__ void __launch_bounds__(kThreads) matmul_kernel(const MatmulArgs args) {
  __shared__ float a_tile[kDepth][kTile + 1], b_tile[kDepth][kTile + 1];
  const std::int64_t row0 = static_cast<std::int64_t>(blockIdx.x) * kTile, col0 = static_cast<std::int64_t>(blockIdx.y) * kTile;
  const int thread = static_cast<int>(threadIdx.x), ty = thread / kSide, tx = thread % kSide;
  float sum[kPer][kPer] = {};
  for (std::int64_t k0 = 0; k0 < args.k; k0 += kDepth) {
    for (int e = thread; e < kTile * kDepth; e += static_cast<int>(kThreads)) {
      // Neighbouring threads read neighbouring elements of a stored row.
      const int a_i = args.trans_a ? e % kTile : e / kDepth, a_l = args.trans_a ? e / kTile : e % kDepth;
      const std::int64_t row = row0 + a_i, a_k = k0 + a_l;
      float x = 0;
      if (row < args.m && a_k < args.k) {
        x = load_one(args.a.data, args.a.dtype, args.trans_a ? a_k * args.lda + row : row * args.lda + a_k);
      }
      a_tile[a_l][a_i] = x;
      const int b_j = args.trans_b ? e / kDepth : e % kTile, b_l = args.trans_b ? e % kDepth : e / kTile;
      const std::int64_t col = col0 + b_j, b_k = k0 + b_l;
      float y = 0;
      if (col < args.n && b_k < args.k) {
        y = load_one(args.b.data, args.b.dtype, args.trans_b ? col * args.ldb + b_k : b_k * args.ldb + col);
      }
      b_tile[b_l][b_j] = y;
    }
    __syncthreads();
    const int depth = static_cast<int>(args.k - k0 < kDepth ? args.k - k0 : kDepth);
    for (int l = 0; l < depth; ++l) {
      float a[kPer], b[kPer];
      for (int i = 0; i < kPer; ++i) a[i] = a_tile[l][ty + i * kSide];
      for (int j = 0; j < kPer; ++j) b[j] = b_tile[l][tx + j * kSide];
      for (int i = 0; i < kPer; ++i) {
        for (int j = 0; j < kPer; ++j) sum[i][j] = __fmaf_rn(a[i], b[j], sum[i][j]);
      }
    }
    __syncthreads();
  }
  for (int i = 0; i < kPer; ++i) {
    const std::int64_t row = row0 + ty + i * kSide;
    for (int j = 0; j < kPer; ++j) {
      const std::int64_t col = col0 + tx + j * kSide;
      if (row >= args.m || col >= args.n) continue;
      float x = sum[i][j];
      if (args.bias.data != nullptr) x = __fadd_rn(x, load_one(args.bias.data, args.bias.dtype, col));
      if (args.accumulate) x = __fadd_rn(static_cast<const float*>(args.c.data)[row * args.ldc + col], x);
      store_one(args.c.data, args.c.dtype, row * args.ldc + col, x);
    }
  }
}

}  // namespace

void CudaOps::matmul(StreamHandle* stream, const MatmulArgs& given) {
  MatmulArgs args = given;
  SPIPE_CHECK(is_storage(args.a.dtype) && is_storage(args.b.dtype) && is_storage(args.c.dtype), "matmul: fp32, bf16 or fp16");
  SPIPE_CHECK(args.m >= 0 && args.n >= 0 && args.k >= 0, "matmul: size");
  SPIPE_CHECK(!args.accumulate || (args.c.dtype == DType::f32 && !args.bias), "matmul: accumulate is fp32 without bias");
  SPIPE_CHECK(!args.bias || is_storage(args.bias.dtype), "matmul: bias is fp32, bf16 or fp16");
  const std::int64_t a_row = args.trans_a ? args.m : args.k, b_row = args.trans_b ? args.k : args.n;
  args.lda = or_packed(args.lda, a_row);
  args.ldb = or_packed(args.ldb, b_row);
  args.ldc = or_packed(args.ldc, args.n);
  SPIPE_CHECK(args.lda >= a_row && args.ldb >= b_row && args.ldc >= args.n,
              "matmul: a row is longer than its distance to the next");
  if (args.m == 0 || args.n == 0 || (args.k == 0 && args.accumulate)) return;
  launch(stream, {.blocks_x = blocks_of(args.m, kTile), .blocks_y = blocks_of(args.n, kTile), .threads = kThreads},
         matmul_kernel, args);
}

}  // namespace spipe::cuda
