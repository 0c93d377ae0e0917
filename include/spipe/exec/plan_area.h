// What the ranks of a host share while one plan runs, beside the store: which tasks have ended, the losses, and the verdict on
// a step. Views of memory that somebody else owns; zero bytes are the initial state of all of it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "spipe/base/counter.h"
#include "spipe/comm/region.h"
#include "spipe/optim/loss_scaling.h"
#include "spipe/optim/optim.h"
#include "spipe/optim/spikes.h"
#include "spipe/plan/plan.h"

namespace spipe::exec {

// Made by the norm task of a host from the same numbers on every host; read by its updates and by every rank.
struct Verdict {
  double loss_sum = 0;       // over unmasked targets, in double, micro-batches and positions ascending
  optim::GradientNorm norm;  // unscaled
  double clip = 1;
  optim::ScalerState scaler, next_scaler;  // what this step was scaled with, and what the next one is
  std::uint64_t targets = 0;               // of the step
  optim::SpikeScore spike;
  bool updated = false;              // false: skipped, nothing changed
  bool halted = false;               // this or an earlier step was not finite, and the run is to stop then: no update any more
  std::uint32_t asked = 0;           // what signals asked of a rank (SignalRequest)
  std::uint64_t version_before = 0;  // committed updates that this step reads
  [[nodiscard]] bool finite() const;
  [[nodiscard]] double loss() const { return targets == 0 ? 0 : loss_sum / static_cast<double>(targets); }
  // Whether the step takes part in what later ones are measured against.
  [[nodiscard]] bool counts() const { return finite() && targets > 0 && !halted; }
  // The gradient overflowed and the loss did not: what a smaller loss scale may avoid.
  [[nodiscard]] bool overflow() const;
};

// Verdicts are kept for some steps: ranks read them late.
inline constexpr std::uint64_t kVerdicts = 4;

struct PlanArea {
  std::span<Counter> done;         // per task of the plan: the last run in which it ended
  std::span<Counter> seen;         // per rank of the host: the last run whose verdict it has read
  std::span<double> losses;        // per micro-batch: the sum of its token losses
  std::span<Verdict> verdicts;     // [kVerdicts], by run
  std::span<double> unit_norms;    // [kVerdicts][store units]: gradient norms, unscaled; of the same runs as the verdicts
  std::span<std::byte> mailboxes;  // of the plans of a run, which never overlap in time
  [[nodiscard]] std::span<double> unit_norms_of(std::uint64_t run) const;

  static void reserve(comm::RegionLayout& layout, const std::string& name, const plan::Plan& plan, int ranks_of_host);
  [[nodiscard]] static PlanArea of(const comm::HostRegion& region, const std::string& name);
  [[nodiscard]] static std::uint64_t bytes(const plan::Plan& plan, int ranks_of_host);
};

}  // namespace spipe::exec
