// The fit of a job of several ranks: the schedule, its stages and its use of memory; by simulation, within the budgets.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "spipe/plan/hardware.h"
#include "spipe/plan/schedules.h"
#include "spipe/plan/search.h"
#include "spipe/plan/update_search.h"

namespace spipe::plan {

// What another rank has found, so that not every rank has to search.
struct RankChoice {
  std::string schedule;
  std::vector<int> forward_cuts, backward_cuts;
  int prefetch = 1;
  bool park = false;
  UpdateSplit updates;
};

struct RankFitRequest {
  PipelineInput input;                                 // cuts, prefetch, park and variants are filled by the fit
  Hardware hardware;                                   // rates for choosing; never decide bits
  std::string schedule = "auto";                       // or one of schedule_names()
  std::optional<int> forward_stages, backward_stages;  // totals over the ranks of a replica; unset: tried
  std::optional<bool> park;                            // unset: tried
  std::uint64_t device_bytes = 0;                      // budget of each rank; 0: none
  std::uint64_t host_bytes = UINT64_MAX;               // of each host
  std::vector<std::uint64_t> store_bytes_of_unit;      // state of a store unit, on the host of its home
  std::vector<std::uint64_t> shadow_bytes_of_unit;     // of its second slot, where it has one; empty: nothing
  std::vector<UpdateSplit> splits = {{}};              // how units are updated: the first with which a trial fits
  SplitSpace split_space;                              // what of that may be changed where it makes the fastest trials faster
  bool arena_on_host = true;                           // CPU devices: the arenas of a host's ranks count against host_bytes too
  bool evaluation = false;                             // an evaluation plan must fit as well
  // What running a plan takes of a host beside store, arenas, parking and mailboxes; empty: nothing.
  std::function<std::uint64_t(const Plan& plan, int host)> extra_host_bytes;
  std::optional<RankChoice> choice;  // instead of searching: made without asking whether it fits, not verified again
};

struct RankFit {
  Plan train, train_and_save;
  UpdateSplit split;
  std::optional<Plan> evaluate;
  std::string reason;  // one line: what was chosen among how many
  // Those that fit by predicted step time: the choice and the runners-up, whose bytes are of their training plan; then the
  // refused.
  std::vector<Trial> trials;
  std::uint64_t arena_bytes = 0, parking_bytes = 0;  // per rank, over the plans
};

// The same request gives the same plans everywhere; all of them are verified. Throws Error (exit code 2) when nothing fits: it
// names the smallest budget that works, exact to the byte, for the device within the host's budget, else for the host within
// the device's (when both are too small, for the host alone). A schedule asked for by name that cannot do it throws its own
// rule.
[[nodiscard]] RankFit fit_ranks(const RankFitRequest& request);
[[nodiscard]] RankChoice choice_of(const Trial& trial);

}  // namespace spipe::plan
