// Kernels of the optimizer update.
#pragma once

#include "kernels/cpu/kernel_table.h"
#include "kernels/ops.h"

namespace spipe::cpu {

struct UpdateTable {
  // One norm block: dst = round(a + b), b may be null, dst may lie over a; returns the block's sum of squares, which is finite
  // exactly when every rounded value is (squares of finite floats cannot overflow a double). Without `checks`: 0.
  double (*finish_gradient)(const float* a, const float* b, void* dst, DType type, std::int64_t elements, bool checks);
  // Elements [first, first + count) of args; returns whether a finite master became an infinite copy.
  bool (*update)(const UpdateArgs& args, std::int64_t first, std::int64_t count);
};
SPIPE_DECLARE_TABLES(UpdateTable, update_table)

}  // namespace spipe::cpu
