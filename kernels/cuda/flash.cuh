// What the attention kernels on tensor cores share. A block of four warps owns 64 rows (queries, or keys in the kernel for dk
// and dv), 16 to a warp, and goes over tiles of the other side. A head is padded with zeros to `kDim` elements: 64, 128 or 256.
#pragma once

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/flash.h"
#include "kernels/cuda/mma.cuh"

namespace spipe::cuda {

inline constexpr int kFlashRows = 64, kFlashWarps = 4;
inline constexpr unsigned kFlashThreads = 32 * kFlashWarps;
inline constexpr float kLog2E = 1.4426950408889634F, kLn2 = 0.6931471805599453F;

// Rows of shared memory are 16 bytes longer than their content: eight neighbouring rows lie in different banks.
template <int kDim>
inline constexpr int kFlashStride = kDim + 8;

template <typename T>
struct FlashHead {  // element d of token t is at data[t * stride + d]
  const T* data;
  std::int64_t stride;
};
template <typename T>
__device__ __forceinline__ FlashHead<T> flash_head(const void* data, std::int64_t first, std::int64_t stride) {
  return {static_cast<const T*>(data) + first, stride};
}

// tile[r][0, kDim) = token t0 + r, zeros beyond `tokens` and `head_dim` (a multiple of 8; rows are multiples of 16 bytes).
template <int rows, int kDim, typename T>
__device__ __forceinline__ void load_flash_tile(T* tile, const FlashHead<T>& head, std::int64_t t0, std::int64_t tokens,
                                                std::int64_t head_dim) {
  constexpr int kPieces = kDim / 8;
  for (int e = static_cast<int>(threadIdx.x); e < rows * kPieces; e += static_cast<int>(kFlashThreads)) {
    const int r = e / kPieces, d = e % kPieces * 8;
    uint4 piece = make_uint4(0, 0, 0, 0);
    if (t0 + r < tokens && d < head_dim) {
      piece = *reinterpret_cast<const uint4*>(head.data + (t0 + r) * head.stride + d);
    }
    *reinterpret_cast<uint4*>(tile + r * kFlashStride<kDim> + d) = piece;
  }
}

// s[.][4] = rows [row0, row0 + 16) of `a` times `columns` rows of `b`, over kDim.
template <int columns, int kDim, typename T>
__device__ __forceinline__ void multiply_rows(float (&s)[columns / 8][4], const T* a, int row0, const T* b) {
  constexpr int kStride = kFlashStride<kDim>;
  SPIPE_UNROLL
  for (int j = 0; j < columns / 8; ++j) {
    SPIPE_UNROLL
    for (int e = 0; e < 4; ++e) s[j][e] = 0;
  }
  SPIPE_UNROLL
  for (int k = 0; k < kDim; k += 16) {
    unsigned left[4];
    load_tiles<false>(left, a_address<kStride>(a, row0, k));
    SPIPE_UNROLL
    for (int j = 0; j < columns / 8; j += 2) {
      unsigned right[4];
      load_tiles<false>(right, b_address<kStride>(b, j * 8, k));
      mma<T>(s[j], left, right[0], right[1]);
      mma<T>(s[j + 1], left, right[2], right[3]);
    }
  }
}

// sum[.][4] += p (16 rows, rounded to T) times the `columns` rows of `b`: 16 x kDim.
template <int columns, int kDim, typename T>
__device__ __forceinline__ void accumulate_rows(float (&sum)[kDim / 8][4], const float (&p)[columns / 8][4], const T* b) {
  constexpr int kStride = kFlashStride<kDim>;
  SPIPE_UNROLL
  for (int k = 0; k < columns; k += 16) {
    unsigned left[4];
    as_a<T>(left, p[k / 8], p[k / 8 + 1]);
    SPIPE_UNROLL
    for (int d = 0; d < kDim; d += 16) {
      unsigned right[4];
      load_tiles<true>(right, b_rows_address<kStride>(b, k, d));
      mma<T>(sum[d / 8], left, right[0], right[1]);
      mma<T>(sum[d / 8 + 1], left, right[2], right[3]);
    }
  }
}

// Over the four lanes that share a row.
__device__ __forceinline__ float quad_sum(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, 1));
  return __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, 2));
}
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

// Row g + 8 * half of this warp's 16, element c of the result's 8 columns: stores two neighbours.
template <typename T>
__device__ __forceinline__ void store_pair(void* data, std::int64_t at, std::int64_t d, std::int64_t head_dim, bool pairs,
                                           float x, float y) {
  T* to = static_cast<T*>(data) + at;
  if (pairs && d + 1 < head_dim) {
    *reinterpret_cast<unsigned*>(to + d) = pack<T>(x, y);
    return;
  }
  if (d < head_dim) to[d] = rounded<T>(x);
  if (d + 1 < head_dim) to[d + 1] = rounded<T>(y);
}

// Whether these kernels take the operands: half types of one kind, head sizes that are multiples of 8, 16-byte rows.
[[nodiscard]] inline bool takes_flash(std::int64_t head_dim, DType type) {
  return head_dim % 8 == 0 && (type == DType::bf16 || type == DType::f16);
}
[[nodiscard]] inline bool is_flash_operand(ConstPtr p, DType type, std::int64_t stride) {
  return p.dtype == type && is_aligned(p.data) && stride % 8 == 0;
}

// Calls f with the type, and the padded head size as an integral constant.
template <typename F>
void with_flash_form(DType type, std::int64_t head_dim, const F& f) {
  const auto sized = [&](auto t) {
    if (head_dim <= 64) {
      f(t, std::integral_constant<int, 64>{});
    } else if (head_dim <= 128) {
      f(t, std::integral_constant<int, 128>{});
    } else {
      f(t, std::integral_constant<int, 256>{});
    }
  };
  if (type == DType::bf16) {
    sized(Bf16{});
  } else {
    sized(Half{});
  }
}

}  // namespace spipe::cuda
