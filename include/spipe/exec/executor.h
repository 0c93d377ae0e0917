// The executor: walks a plan once a step, enqueues every task of its rank on the task's stream behind the waits the plan lists,
// and collects what the tasks report. It knows no math (model/, kernels/) and no schedule (plan/).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spipe/comm/world.h"
#include "spipe/device/device.h"
#include "spipe/exec/plan_area.h"
#include "spipe/model/layers.h"
#include "spipe/optim/optim.h"
#include "spipe/plan/observer.h"
#include "spipe/plan/plan.h"
#include "spipe/store/store.h"

namespace spipe::exec {

// Busy seconds and bytes by stream since the last reset; the link rates and the attribution of a step come from here.
class StreamTimes : public plan::TaskObserver {
 public:
  void on_task(const plan::Task& task, std::int64_t begin_ns, std::int64_t end_ns, std::uint64_t step) override;
  [[nodiscard]] double busy_seconds(plan::StreamKind stream) const;
  [[nodiscard]] std::uint64_t bytes(plan::StreamKind stream) const;
  void reset();

 private:
  std::array<std::atomic<std::int64_t>, plan::kStreamCount> nanoseconds_{};
  std::array<std::atomic<std::uint64_t>, plan::kStreamCount> bytes_{};
};

class Pacer;

// Tests: what is summed of a store unit's gradient in a step is multiplied by a factor before it is offloaded. Finite factors
// are powers of two, so that it does not matter how the sum is cut.
struct GradientFault {
  std::uint64_t step = 0;  // 0-based
  int unit = 0;            // store unit
  float factor = 1;
};

// What all plans of a run share. Everything is owned by the caller and outlives the executors.
struct Machine {
  device::Device* device = nullptr;
  device::Arena* arena = nullptr;
  device::Arena* residents = nullptr;  // for state that stays on the device; null where none does
  const model::ModelShape* shape = nullptr;
  store::Store* store = nullptr;
  std::span<std::byte> parking;  // of this rank; shared by the plans of a run, which never overlap in time
  model::Constants constants;
  optim::NormTable* norms = nullptr;  // one for the ranks of a host
  optim::Hyper hyper;
  double grad_clip = 0;
  optim::LossScaling loss_scaling;
  optim::SpikeGuard spikes;
  std::uint64_t seed = 0;
  std::vector<plan::TaskObserver*> observers;
  std::span<const GradientFault> gradient_faults;
  bool checks_every_other = false;                 // measurements: odd steps take no norm and look for no overflow
  std::optional<std::uint64_t> keeps_speculation;  // tests: a step whose clipped speculation is kept, which is wrong
  comm::World* world = nullptr;                    // several ranks; null: one rank, all of whose tasks run here
  std::atomic<std::uint32_t>* asked = nullptr;     // bits that signals raise on any rank of the host; may be null
  Pacer* pacer = nullptr;                          // stretches tasks to another machine's times; may be null
};

struct StepRequest {
  std::uint64_t step = 0;     // 0-based global step: dropout keys
  std::uint64_t targets = 0;  // unmasked targets of the step: loss is divided by it
  std::uint64_t version =
      0;  // committed updates every unit must have seen; of a step begun on a running one: that one's result
  optim::ScalerState scaler;                        // likewise
  optim::SpikeHistory spikes;                       // of all steps that have ended; of one still running it is added
  std::function<double(std::uint64_t updates)> lr;  // rate of the update after so many
  // After a step that is not finite the steps already begun change nothing (unless a smaller loss scale may help: that step is
  // skipped and they go on).
  bool stop_on_nonfinite = false;
  std::function<void(int)> save_unit;  // for plans with save tasks: called on the io stream for every store unit
  bool diagnose = false;               // find the first non-finite value; no update is made
};

struct StepResult {
  Verdict verdict;                 // of an evaluation only the loss
  bool nonfinite_master = false;   // on this rank
  std::uint64_t taken_back = 0;    // updates of units on this rank that were made in vain, or made again
  std::vector<double> unit_norms;  // gradient norm of every store unit, unscaled; empty for an evaluation
  std::string first_nonfinite;     // diagnose: "backward of layer 2, micro-batch 1"; empty when all is finite
};

// One plan bound to memory: this rank's tasks of it. A step is begun, then finished; the next may be begun before the one
// before is finished (two at most), so that the rank has work while others, or its own updates, end the step.
class Executor {
 public:
  // `area` without memory: one rank, private memory. `number` tells the plans of a run apart in messages.
  Executor(const plan::Plan& plan, const Machine& machine, PlanArea area = {}, int number = 0);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;
  // Whether this rank reads the tokens of a micro-batch.
  [[nodiscard]] bool needs_input(int micro_batch) const;
  // Host staging of micro-batch m for the next begin(): tokens and targets, [micro * seq_len] each; filled by the caller.
  [[nodiscard]] std::int32_t* tokens(int micro_batch);
  [[nodiscard]] std::int32_t* targets(int micro_batch);
  // Token losses of micro-batch m of the last finished run, [micro * seq_len], if its head ran here.
  [[nodiscard]] const float* token_losses(int micro_batch) const;
  // Both throw the first error of any task of this rank; after that the executor must not be used again. Collective for
  // evaluations and diagnoses.
  void begin(const StepRequest& request);
  StepResult finish();  // of the oldest step begun
  StepResult run(const StepRequest& request) {
    begin(request);
    return finish();
  }

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Host bytes that the ranks of a host hold for this plan beside the store, the arenas, the parking areas and the mailboxes:
// staging, counters, bound tasks.
[[nodiscard]] std::uint64_t executor_host_bytes(const plan::Plan& plan, const model::ModelShape& shape, int host = 0);

}  // namespace spipe::exec
