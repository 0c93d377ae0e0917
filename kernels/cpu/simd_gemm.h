// Small matrix products for attention: C[rows, vectors of 16] = (row_scale *) C + A B, with A read by broadcast through two
// strides (so it may be a transpose), B and C in rows of whole vectors. Every element of C is one chain of fma over k
// ascending, so register blocking, which differs by instruction set, does not show in the bits.
#pragma once

#include "kernels/cpu/simd.h"

namespace spipe::cpu::SPIPE_ISA {

struct SmallGemm {
  const float* a = nullptr;
  std::int64_t a_row = 0, a_k = 0;  // strides of A
  const float* b = nullptr;
  std::int64_t ldb = 0;
  float* c = nullptr;
  std::int64_t ldc = 0;
  int rows = 0, vectors = 0, depth = 0;
  bool accumulate = false;
  const float* row_scale = nullptr;  // of the old C; with accumulate only
};

template <int kRows, int kVectors>
SPIPE_INLINE void small_gemm_tile(const SmallGemm& g, int row, int vector) {
  Vec acc[kRows][kVectors];
  float* c = g.c + row * g.ldc + vector * kLanes;
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVectors; ++j) acc[i][j] = g.accumulate ? load(c + i * g.ldc + j * kLanes) : zero();
    if (g.row_scale != nullptr) {
      const Vec scale = set(g.row_scale[row + i]);
      for (int j = 0; j < kVectors; ++j) acc[i][j] = acc[i][j] * scale;
    }
  }
  const float* a = g.a + row * g.a_row;
  const float* b = g.b + vector * kLanes;
  const std::int64_t a_row = g.a_row, a_k = g.a_k, ldb = g.ldb;
  for (int k = 0; k < g.depth; ++k) {
    Vec bk[kVectors];
    for (int j = 0; j < kVectors; ++j) bk[j] = load(b + j * kLanes);
    for (int i = 0; i < kRows; ++i) {
      const Vec ai = set(a[i * a_row]);
      for (int j = 0; j < kVectors; ++j) acc[i][j] = fma(ai, bk[j], acc[i][j]);
    }
    a += a_k;
    b += ldb;
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVectors; ++j) store(c + i * g.ldc + j * kLanes, acc[i][j]);
  }
}

// One column of tiles: as many rows at a time as the registers hold.
template <int kRows, int kVectors>
inline void small_gemm_column(const SmallGemm& g, int vector) {
  int row = 0;
  for (; row + kRows <= g.rows; row += kRows) small_gemm_tile<kRows, kVectors>(g, row, vector);
  for (; row + 4 <= g.rows; row += 4) small_gemm_tile<4, kVectors>(g, row, vector);
  for (; row < g.rows; ++row) small_gemm_tile<1, kVectors>(g, row, vector);
}

inline void small_gemm(const SmallGemm& g) {
  int vector = 0;
#if defined(__AVX512F__)  // 32 registers
  for (; vector + 4 <= g.vectors; vector += 4) small_gemm_column<6, 4>(g, vector);
  for (; vector + 2 <= g.vectors; vector += 2) small_gemm_column<8, 2>(g, vector);
  for (; vector < g.vectors; ++vector) small_gemm_column<8, 1>(g, vector);
#else  // 16 registers, two to a vector
  for (; vector < g.vectors; ++vector) small_gemm_column<6, 1>(g, vector);
#endif
}

}  // namespace spipe::cpu::SPIPE_ISA
