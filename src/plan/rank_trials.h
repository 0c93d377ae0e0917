// What is tried for several ranks: schedules, stages, ways to use memory.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "spipe/base/error.h"
#include "spipe/plan/search.h"

namespace spipe::plan {

// Ways to use memory, the fastest first: what a rank keeps on its device to have it early. They stand for themselves;
// PipelineInput::fuse_last is left to the schedules: spipe with a fused last stage is roundpipe, and the others would no longer
// be what their names say.
struct Thrift {
  int prefetch = 1;
  bool park = false;
};
inline constexpr Thrift kThrifts[] = {{1, false}, {1, true}, {0, false}, {0, true}};

struct TrialList {
  std::vector<Trial> trials;  // with cuts, none twice; `refused` by a schedule's rule or still empty
  std::optional<Error> rule;  // the first that something broke
};

// Stage counts per rank 1, 2, 3, 4, 6, 8 and one stage a unit for each pass, or the totals that are asked for (throws Error
// when they are out of range). Stages are balanced by the time of a micro-batch. Makes no plan.
[[nodiscard]] TrialList list_trials(const PipelineInput& input, const std::vector<std::string>& schedules,
                                    const std::optional<int>& forward_stages, const std::optional<int>& backward_stages);

// The order of trials: those that fit by step time, then by the number of stages; then the refused.
[[nodiscard]] bool faster(const Trial& a, const Trial& b);

}  // namespace spipe::plan
