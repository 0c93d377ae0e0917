// What the plain attention kernels share: tiles of a matrix in shared memory, sums over the threads of a row, argument checks.
#pragma once

#include "kernels/cuda/device.cuh"

namespace spipe::cuda {

inline constexpr int kRows = 16, kColumns = 32, kChunk = 32;  // a tile's rows, columns, and dimensions at a time
inline constexpr int kOwn = kColumns / kRows;                 // columns of a thread: 16 threads share a row
inline constexpr unsigned kAttentionThreads = kRows * 16;
inline constexpr std::int64_t kMaxHeadDim = 256;

// A head of a tensor [tokens, heads, head_dim]: element d of token t is at data[first + t * stride + d].
struct Head {
  const void* data;
  DType type;
  std::int64_t first, stride;
};

// tile[r][d] = element d0 + d of token t0 + r; 0 beyond `tokens` and `head_dim`. By all threads of the block.
template <int rows>
__device__ __forceinline__ void load_tile(float (&tile)[rows][kChunk + 1], const Head& head, std::int64_t t0,
                                          std::int64_t tokens, std::int64_t d0, std::int64_t head_dim) {
  for (int e = static_cast<int>(threadIdx.x); e < rows * kChunk; e += static_cast<int>(kAttentionThreads)) {
    const int r = e / kChunk, d = e % kChunk;
    const bool there = t0 + r < tokens && d0 + d < head_dim;
    tile[r][d] = there ? load_one(head.data, head.type, head.first + (t0 + r) * head.stride + d0 + d) : 0.0F;
  }
}

// Over the 16 threads that share a row; all get it.
__device__ __forceinline__ float row_sum(float x) {
  for (int lanes = 8; lanes > 0; lanes /= 2) x = __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, lanes));
  return x;
}
__device__ __forceinline__ float row_max(float x) {
  for (int lanes = 8; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, lanes));
  return x;
}

// Keys that a query at `position` sees: the last `window` (0: all) up to its own.
__device__ __forceinline__ bool sees(std::int64_t position, std::int64_t key, std::int64_t window) {
  return key <= position && (window == 0 || key > position - window);
}

void check_attention(std::int64_t heads, std::int64_t kv_heads, std::int64_t head_dim, std::int64_t window, float scale);
// 0 becomes the packed stride.
void default_stride(std::int64_t& stride, std::int64_t packed);

}  // namespace spipe::cuda
