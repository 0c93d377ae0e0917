// Observers of running tasks: timers, traces, progress. The executor calls them; it holds no such code itself.
#pragma once

#include <cstdint>

#include "spipe/plan/plan.h"

namespace spipe::plan {

// Called on a stream's thread at the end of every task. Times are nanoseconds of the steady clock; `step` is the run's global
// step, 0-based, or the largest number for an evaluation (kNoStep in plan/timeline.h). Must be thread safe and quick.
class TaskObserver {
 public:
  virtual ~TaskObserver() = default;
  virtual void on_task(const Task& task, std::int64_t begin_ns, std::int64_t end_ns, std::uint64_t step) = 0;
};

}  // namespace spipe::plan
