// Chooses the single-rank options that fit the budgets: the fastest by a simple cost model, or the exact refusal.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "spipe/plan/builder.h"
#include "spipe/plan/hardware.h"
#include "spipe/plan/update_search.h"

namespace spipe::plan {

struct FitRequest {
  ScheduleInput input;
  int micro_batches = 1, sum_groups = 1;
  std::uint64_t device_bytes = 0;         // 0: no budget (resident)
  std::uint64_t host_bytes = UINT64_MAX;  // for store + parking + the CPU device's arena + extra_host_bytes of all plans
  std::uint64_t store_bytes = 0;
  // How units are updated: the first of these splits for which something fits. Second slots take shadow_bytes_of_unit of the
  // host beside store_bytes (empty: nothing).
  std::vector<UpdateSplit> splits = {{}};
  std::vector<std::uint64_t> shadow_bytes_of_unit;
  SplitSpace split_space;  // what of the split may be changed where that makes steps faster on `hardware`
  Hardware hardware;
  bool barrier_between_steps = false;
  std::uint64_t piece_elements = ScheduleOptions{}.piece_elements;
  bool arena_on_host = true;                           // CPU device: the arena counts against host_bytes too
  std::optional<bool> recompute, park;                 // unset: auto
  std::optional<int> forward_stages, backward_stages;  // unset: auto
  bool evaluation = false;                             // an evaluation plan must fit as well
  // What running a plan takes of the host beside store, arena and parking; empty: nothing.
  std::function<std::uint64_t(const Plan& plan)> extra_host_bytes;
  double matmul_flops = 1e11, link_bytes = 1e10;  // rates for choosing; never decide bits
};

struct FitResult {
  Plan train;
  std::optional<Plan> evaluate;
  UpdateSplit split;              // of the plans; see options.updates
  std::string reason;             // "recompute on: activations would need 31.2 MiB of 24.0 MiB", printed at start
  std::uint64_t arena_bytes = 0;  // max over the plans
};

// Throws Error (exit code 2) before anything is allocated: "device.memory 1 MiB is too small; the smallest that works is 3.4
// MiB", exact to the byte, or the same for the host.
[[nodiscard]] FitResult fit(const FitRequest& request);
// Host bytes of second slots for these ways.
[[nodiscard]] std::uint64_t shadow_bytes(const std::vector<UpdateWay>& ways, const std::vector<std::uint64_t>& of_unit);
// The smallest device budget (bytes) for which fit() succeeds.
[[nodiscard]] std::uint64_t smallest_budget(const FitRequest& request);

}  // namespace spipe::plan
