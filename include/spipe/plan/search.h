// Schedules, stage counts and uses of memory for given hardware, tried in the simulator (`spipe plan --hardware`). What a job
// of several ranks runs is chosen by plan/fit_ranks.h from the same trials.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "spipe/plan/hardware.h"
#include "spipe/plan/schedules.h"
#include "spipe/plan/simulator.h"

namespace spipe::plan {

struct SearchRequest {
  PipelineInput input;  // cuts are filled by the search
  Hardware hardware;
  std::uint64_t store_bytes = 0;       // state of the whole model, over all hosts
  std::vector<std::string> schedules;  // empty: all
  // Totals over the ranks of a replica; unset: tried. One alone is meant for both passes where a schedule has the same stages.
  std::optional<int> forward_stages, backward_stages;
};

struct Trial {
  std::string schedule;
  int forward_stages = 0, backward_stages = 0;     // totals; 0: the only stage runs forward in its backward
  std::string refused;                             // why it cannot be: a schedule's rule or a memory limit; empty: it fits
  std::uint64_t device_bytes = 0, host_bytes = 0;  // per rank; per host with the state split evenly
  double step_seconds = 0, bubble = 0, exposed_optimizer_seconds = 0;
  PipelineInput input;  // with its cuts: make_schedule(schedule, input) is the plan
  UpdateSplit split;    // of input.updates
};

// All trials, the fitting ones first by step time (ties: fewer stages), then the refused ones; none twice. Every plan that fits
// was verified. Stage counts tried per rank: 1, 2, 3, 4, 6, 8 and one stage a unit for each pass. Units are balanced by FLOPs
// (by bytes where a unit has none). Plans that do not fit are tried with parking, then with later fetches. Throws Error for
// unknown schedules and for stage counts that no schedule can have.
[[nodiscard]] std::vector<Trial> search_schedules(const SearchRequest& request);

}  // namespace spipe::plan
