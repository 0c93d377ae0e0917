// The vector functions of kernels/cpu/simd*.h over arrays, for tests; compiled for each instruction set.
#pragma once

#include "kernels/cpu/kernel_table.h"

namespace spipe::cpu {

struct SimdProbe {
  // y[16 n] = f(x[16 n])
  void (*exp)(const float* x, float* y, std::int64_t n);
  void (*log)(const float* x, float* y, std::int64_t n);
  // Rounding stores and widening loads of 16 elements, and of the first n of them; out keeps what is beyond n.
  void (*to_bf16)(const float* x, std::uint16_t* y, int n);
  void (*to_bf16_half_up)(const float* x, std::uint16_t* y);
  void (*to_f16)(const float* x, std::uint16_t* y, int n);
  void (*from_bf16)(const std::uint16_t* x, float* y, int n);
  void (*from_f16)(const std::uint16_t* x, float* y, int n);
  // Lane trees, and the transpose of 16 x 16.
  float (*sum)(const float* x);
  float (*max_lane)(const float* x);
  void (*transpose)(const float* x, float* y);
};
SPIPE_DECLARE_TABLES(SimdProbe, simd_probe)

}  // namespace spipe::cpu
