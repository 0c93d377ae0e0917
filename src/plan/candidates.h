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

// Of several ranks (search.cpp): seconds of a unit's pass up to a factor; the stage counts to try; schedules whose two passes
// have the same stages.
[[nodiscard]] std::vector<double> stage_weights(const model::ModelShape& shape, bool backward);
[[nodiscard]] std::vector<int> stage_counts(const std::optional<int>& wanted, int ranks, int units);
[[nodiscard]] bool runs_both_passes_of_a_stage(const std::string& schedule);

// What a candidate needs at least, without emitting all of its micro-batches: memory is a maximum of functions linear in their
// number (in whole rounds of the sum groups), so it is convex, and the line through two small numbers stays below it.
[[nodiscard]] MemoryBound memory_bound(const FitRequest& request, const Candidate& candidate);

}  // namespace spipe::plan
