// Inside of the planner: the schedules among which fit() chooses.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "memory.h"
#include "spipe/plan/fit.h"

namespace spipe::plan {

struct Candidate {
  ScheduleOptions options;
  double seconds = 0;  // of a step, by a simple model: orders candidates, decides no bits
};

// Fastest first. Empty when the request's wishes exclude each other.
[[nodiscard]] std::vector<Candidate> training_candidates(const FitRequest& request);
[[nodiscard]] std::vector<Candidate> evaluation_candidates(const FitRequest& request);

// The contiguous parts of `weights` whose heaviest is lightest: first index of each, at most `parts` of them.
[[nodiscard]] std::vector<int> balanced_cuts(const std::vector<double>& weights, int parts);

// What a candidate needs at least, without emitting all of its micro-batches: memory is a maximum of functions linear in their
// number (in whole rounds of the sum groups), so it is convex, and the line through two small numbers stays below it.
[[nodiscard]] MemoryBound memory_bound(const FitRequest& request, const Candidate& candidate);

}  // namespace spipe::plan
