// Kernels of rope, activations, gated units and dropout over a range of elements or rows.
#pragma once

#include "kernels/cpu/kernel_table.h"
#include "kernels/ops.h"

namespace spipe::cpu {

// Sixteen-element groups of dropout words come from consecutive Philox counters {quad, sequence, step, site}.
struct DropoutRange {
  const void* x = nullptr;
  void* y = nullptr;
  DType dtype = DType::f32;
  std::int64_t elements = 0;
  std::uint32_t first_quad = 0, sequence = 0, step = 0, site = 0, key_lo = 0, key_hi = 0;
  std::uint32_t threshold = 0;  // keep when (word >> 8) >= threshold
  float factor = 1;
};

struct PointwiseTable {
  void (*rope)(const RopeArgs& args, std::int64_t first_token, std::int64_t tokens);
  void (*activation_forward)(const ActivationForwardArgs& args, std::int64_t first, std::int64_t count);
  void (*activation_backward)(const ActivationBackwardArgs& args, std::int64_t first, std::int64_t count);
  void (*gated_forward)(const GatedForwardArgs& args, std::int64_t first_row, std::int64_t rows);
  void (*gated_backward)(const GatedBackwardArgs& args, std::int64_t first_row, std::int64_t rows);
  void (*dropout)(const DropoutRange& range);
};
SPIPE_DECLARE_TABLES(PointwiseTable, pointwise_table)

}  // namespace spipe::cpu
