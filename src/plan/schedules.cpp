// The schedules by name.
#include "spipe/plan/schedules.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "assignment.h"
#include "spipe/base/error.h"
#include "spipe/plan/builder.h"

namespace spipe::plan {

namespace {

const std::vector<Schedule>& schedules() {
  static const std::vector<Schedule> list = {spipe_schedule(), mobius_schedule(),    one_forward_one_backward_schedule(),
                                             gpipe_schedule(), roundpipe_schedule(), streaming_dp_schedule()};
  return list;
}

}  // namespace

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const Schedule& schedule : schedules()) list.push_back(schedule.name);
    return list;
  }();
  return names;
}

const Schedule& schedule_named(const std::string& name) {
  const auto found = std::find_if(schedules().begin(), schedules().end(), [&](const auto& s) { return s.name == name; });
  if (found == schedules().end()) {
    throw Error(fmt::format("unknown schedule \"{}\"", name), "parallel.schedule",
                fmt::format("one of {}", fmt::join(schedule_names(), ", ")));
  }
  return *found;
}

Plan make_schedule(const std::string& name, const PipelineInput& input) {
  Plan plan = emit_pipeline(schedule_named(name), input);
  complete(plan, *input.shape, input.grad_dtype_size);
  return plan;
}

}  // namespace spipe::plan
