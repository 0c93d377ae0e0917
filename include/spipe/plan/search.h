// `parallel.schedule: auto`, a first version: tries the schedules and stage counts in the simulator and takes the fastest that
// fits.
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
  std::uint64_t store_bytes = 0;                       // state of the whole model, over all hosts
  std::vector<std::string> schedules;                  // empty: all
  std::optional<int> forward_stages, backward_stages;  // totals over the ranks of a replica; unset: tried
};

struct Trial {
  std::string schedule;
  int forward_stages = 0, backward_stages = 0;     // totals
  std::string refused;                             // why it cannot be: a schedule's rule or a memory limit; empty: it fits
  std::uint64_t device_bytes = 0, host_bytes = 0;  // per rank; per host with the state split evenly
  double step_seconds = 0, bubble = 0, exposed_optimizer_seconds = 0;
  PipelineInput input;  // with its cuts: make_schedule(schedule, input) is the plan
};

// All trials, the fitting ones first by step time (ties: fewer stages), then the refused ones. Every plan that fits was
// verified. Stage counts tried per rank: 1, 2, 3, 4, 6, 8 for each pass, at most one stage per compute unit. Units are balanced
// by FLOPs (by bytes where a unit has none).
[[nodiscard]] std::vector<Trial> search_schedules(const SearchRequest& request);

}  // namespace spipe::plan
