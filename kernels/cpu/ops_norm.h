// Kernels of layernorm and rmsnorm over a range of rows (for rmsnorm: of vectors, outer * inner of them). Here weight and bias
// are fp32 and no stride is 0.
#pragma once

#include "kernels/cpu/kernel_table.h"
#include "kernels/ops.h"

namespace spipe::cpu {

struct NormTable {
  void (*layernorm_forward)(const LayerNormForwardArgs& args, std::int64_t first, std::int64_t count);
  // Also writes this range's contribution to dweight and dbias; count >= 1.
  void (*layernorm_backward)(const LayerNormBackwardArgs& args, std::int64_t first, std::int64_t count, float* dweight,
                             float* dbias);
  void (*rmsnorm_forward)(const RmsNormForwardArgs& args, std::int64_t first, std::int64_t count);
  void (*rmsnorm_backward)(const RmsNormBackwardArgs& args, std::int64_t first, std::int64_t count, float* dweight);
  // out[i] (+)= partials[i] + partials[stride + i] + ..., in that order; parts >= 1.
  void (*sum_partials)(const float* partials, std::int64_t parts, std::int64_t stride, std::int64_t elements, bool accumulate,
                       float* out);
};
SPIPE_DECLARE_TABLES(NormTable, norm_table)

}  // namespace spipe::cpu
