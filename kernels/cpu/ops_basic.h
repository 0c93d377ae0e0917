// Kernels of the plain ops: conversion, sums, cross-entropy, and what surrounds a matmul tile.
#pragma once

#include "kernels/cpu/kernel_table.h"

namespace spipe::cpu {

struct BasicTable {
  void (*convert)(const void* src, DType src_type, void* dst, DType dst_type, bool half_up, std::int64_t elements);
  void (*add)(const void* a, DType a_type, const void* b, DType b_type, void* out, DType out_type, std::int64_t elements);
  // out[cols] (+)= sum over rows of x[rows, cols].
  void (*column_sum)(const void* x, DType type, std::int64_t ldx, std::int64_t rows, std::int64_t cols, bool accumulate,
                     float* out);
  // One row; returns its nll. target >= 0.
  float (*cross_entropy)(float* logits, std::int64_t cols, std::int64_t target, float scale);
  // dst[rows, cols] = src[rows, cols], widened.
  void (*widen_matrix)(const void* src, DType type, std::int64_t src_ld, float* dst, std::int64_t dst_ld, std::int64_t rows,
                       std::int64_t cols);
  // c[rows, cols] = round(tile + bias); bias may be null; c may be tile.
  void (*finish_tile)(const float* tile, std::int64_t tile_ld, const void* bias, DType bias_type, void* c, DType c_type,
                      std::int64_t ldc, std::int64_t rows, std::int64_t cols);
};
SPIPE_DECLARE_TABLES(BasicTable, basic_table)

}  // namespace spipe::cpu
