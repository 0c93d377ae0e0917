// Tensor cores: products of 16x16 by 16x8 tiles of bf16 or fp16, summed in fp32, and the loads that bring tiles of shared
// memory into the registers they want (PTX ISA, "mma.m16n8k16" and "ldmatrix"). Compute capability 8.0 and newer.
//
// With g = lane / 4 and t = lane % 4, a lane holds, two elements to a register:
//   A [16 rows][16]:  a0 = A[g][2t, 2t+1], a1 = A[g+8][same], a2 = A[g][2t+8, 2t+9], a3 = A[g+8][same]
//   B [16][8 columns]: b0 = B[2t, 2t+1][g], b1 = B[2t+8, 2t+9][g]
//   C [16 rows][8]:   c0, c1 = C[g][2t, 2t+1], c2, c3 = C[g+8][same]
#pragma once

#include <type_traits>

#include "kernels/cuda/device.cuh"

namespace spipe::cuda {

// c += a b. All lanes of a warp.
template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  [[maybe_unused]] constexpr bool bf16 = std::is_same_v<T, Bf16>;
#if defined(SPIPE_CUDA_EMULATED)
  emulator::mma_16x8x16(c, a, b0, b1, bf16);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (bf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#elif defined(__CUDA_ARCH__)
  __trap();  // the host launches such kernels on newer devices only
#endif
}

// Four 8x8 tiles of 16-bit elements: lane 8 i + r gives the address of row r of tile i (in shared memory, a multiple of 16
// bytes). Register i gets M[g][2t, 2t+1] of tile i, or with `transposed` M[2t, 2t+1][g].
template <bool transposed>
__device__ __forceinline__ void load_tiles(unsigned (&x)[4], const void* row) {
#if defined(SPIPE_CUDA_EMULATED)
  emulator::ldmatrix_x4(x, row, transposed);
#elif defined(__CUDA_ARCH__)
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  if constexpr (transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
  }
#endif
}

// A tile of a row-major matrix in shared memory, `stride` elements a row; the address of this lane's row for load_tiles.
// A from rows [row, row + 16) and columns [col, col + 16).
template <int stride, typename T>
__device__ __forceinline__ const T* a_address(const T* tile, int row, int col) {
  const int lane = static_cast<int>(threadIdx.x) % 32, part = lane / 8, r = lane % 8;
  return tile + (row + part % 2 * 8 + r) * stride + col + part / 2 * 8;
}
// Two Bs beside each other, B[k][n] = M[row + n][col + k]: registers 0, 1 for n < 8, and 2, 3.
template <int stride, typename T>
__device__ __forceinline__ const T* b_address(const T* tile, int row, int col) {
  const int lane = static_cast<int>(threadIdx.x) % 32, part = lane / 8, r = lane % 8;
  return tile + (row + part / 2 * 8 + r) * stride + col + part % 2 * 8;
}
// Two Bs beside each other, B[k][n] = M[row + k][col + n], to be loaded transposed: registers 0, 1 for n < 8, and 2, 3.
template <int stride, typename T>
__device__ __forceinline__ const T* b_rows_address(const T* tile, int row, int col) {
  return a_address<stride>(tile, row, col);
}

template <typename T>
__device__ __forceinline__ unsigned pack(float low, float high) {
  return rounded<T>(low).bits | static_cast<unsigned>(rounded<T>(high).bits) << 16;
}
// Two neighbouring 16x8 results as one 16x16 A, rounded.
template <typename T>
__device__ __forceinline__ void as_a(unsigned (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = pack<T>(left[0], left[1]);
  a[1] = pack<T>(left[2], left[3]);
  a[2] = pack<T>(right[0], right[1]);
  a[3] = pack<T>(right[2], right[3]);
}

}  // namespace spipe::cuda
