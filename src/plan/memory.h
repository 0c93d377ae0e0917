// Inside of the planner: plans before placement, and how little memory they can need.
#pragma once

#include "spipe/plan/builder.h"

namespace spipe::plan {

// The streaming schedule without waits and offsets.
[[nodiscard]] Plan emit_streaming(const ScheduleInput& input, const ScheduleOptions& options);

// Bytes alive at once at the worst moment: no placement of the plan needs less.
struct MemoryBound {
  std::uint64_t arena = 0, in_place = 0, parking = 0, resident = 0;
  [[nodiscard]] std::uint64_t device() const { return arena + in_place + resident; }
};
[[nodiscard]] MemoryBound memory_bound(const Plan& plan, const model::ModelShape& shape, std::uint64_t bytes_per_gradient);

}  // namespace spipe::plan
