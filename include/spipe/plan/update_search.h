// Finds how much of a model should speculate, be updated on devices or stay there, by trying splits.
#pragma once

#include <functional>

#include "spipe/plan/updates.h"

namespace spipe::plan {

// Fractions of an UpdateSplit that may be chosen; the others are as configured.
struct SplitSpace {
  bool speculate = false, device = false, resident = false;
  [[nodiscard]] bool is_free() const { return speculate || device || resident; }
};

// The fastest split found by `seconds` (of a step; infinity for a split that does not fit), which is asked at most
// `most_trials` times. From the best of a coarse grid, or `start`, one fraction after the other is tried at quarters until
// none improves, then at eighths beside the best. A split with more of anything must be faster by 1/500, so that nothing is
// done for nothing. The same answers give the same split.
[[nodiscard]] UpdateSplit best_split(const SplitSpace& space, const UpdateSplit& start, int most_trials,
                                     const std::function<double(const UpdateSplit&)>& seconds);

}  // namespace spipe::plan
