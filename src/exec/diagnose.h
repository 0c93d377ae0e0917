// Finds the first non-finite value of a step by replaying it with every output checked: steps are deterministic, so a replay
// without the update shows what the failed step did.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "spipe/model/layers.h"
#include "spipe/plan/plan.h"

namespace spipe::exec {

class Diagnosis {
 public:
  Diagnosis() = default;
  Diagnosis& operator=(const Diagnosis&);  // resets; used between steps only
  // After a compute task: checks its boundary, its boundary gradient and its token losses.
  void check_compute(const plan::Task& task, const model::UnitCall& call, const model::ModelShape& shape);
  // A finding at a task; the earliest in program order is kept.
  void report(const plan::Task& task, const std::string& text);
  void report_loss(int micro_batch);
  [[nodiscard]] std::string text() const;
  [[nodiscard]] std::uint32_t first_task() const;  // of the finding; ~0 for a loss, which is the last thing to blame

 private:
  mutable std::mutex mutex_;
  std::uint32_t first_task_ = ~0U;
  std::string text_;
};

// Whether any of `elements` values of this type is infinite or NaN.
[[nodiscard]] bool has_nonfinite(const void* data, DType dtype, std::uint64_t elements);

}  // namespace spipe::exec
