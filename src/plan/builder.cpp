// Appends tasks, buffers and uses in program order.
#include "spipe/plan/builder.h"

#include <utility>

#include "spipe/base/checked.h"

namespace spipe::plan {

Builder::Builder(ScheduleOptions options, int ranks, int store_units, int compute_units) {
  plan_.options = std::move(options);
  plan_.ranks = ranks;
  plan_.host_of_rank.assign(static_cast<std::size_t>(ranks), 0);
  plan_.store_units = store_units;
  plan_.compute_units = compute_units;
}

std::uint32_t Builder::buffer(Buffer description) {
  description.bytes = round_up(description.bytes, 256);
  plan_.buffers.push_back(description);
  return narrow<std::uint32_t>(plan_.buffers.size() - 1);
}

std::uint32_t Builder::task(Task task, const std::vector<Use>& uses) {
  task.id = narrow<std::uint32_t>(plan_.tasks.size());
  task.first_use = narrow<std::uint32_t>(plan_.uses.size());
  task.use_count = narrow<std::uint16_t>(uses.size());
  task.first_wait = 0;
  task.wait_count = 0;
  plan_.uses.insert(plan_.uses.end(), uses.begin(), uses.end());
  plan_.tasks.push_back(task);
  return task.id;
}

Plan Builder::take() { return std::move(plan_); }

}  // namespace spipe::plan
