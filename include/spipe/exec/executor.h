// The executor: walks a plan once a step, enqueues every task on its stream behind the waits the plan lists, and collects what
// the tasks report. It knows no math (model/, kernels/) and no schedule (plan/).
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spipe/device/device.h"
#include "spipe/model/layers.h"
#include "spipe/optim/optim.h"
#include "spipe/plan/observer.h"
#include "spipe/plan/plan.h"
#include "spipe/store/store.h"

namespace spipe::exec {

// Busy seconds and bytes by stream since the last reset; the link rates and the attribution of a step come from here.
class StreamTimes : public plan::TaskObserver {
 public:
  void on_task(const plan::Task& task, std::int64_t begin_ns, std::int64_t end_ns) override;
  [[nodiscard]] double busy_seconds(plan::StreamKind stream) const;
  [[nodiscard]] std::uint64_t bytes(plan::StreamKind stream) const;
  void reset();

 private:
  std::array<std::atomic<std::int64_t>, plan::kStreamCount> nanoseconds_{};
  std::array<std::atomic<std::uint64_t>, plan::kStreamCount> bytes_{};
};

// What all plans of a run share. Everything is owned by the caller and outlives the executors.
struct Machine {
  device::Device* device = nullptr;
  device::Arena* arena = nullptr;
  const model::ModelShape* shape = nullptr;
  store::Store* store = nullptr;
  std::span<std::byte> parking;  // shared by the plans of a run, which never overlap in time
  model::Constants constants;
  optim::NormTable* norms = nullptr;
  optim::AdamW hyper;
  double grad_clip = 0;
  std::uint64_t seed = 0;
  std::vector<plan::TaskObserver*> observers;
};

struct StepRequest {
  std::uint64_t step = 0;     // 0-based global step: dropout keys
  std::uint64_t targets = 0;  // unmasked targets of the step: loss is divided by it
  std::uint64_t version = 0;  // committed updates every unit must have seen
  double lr = 0;
  std::function<void(int)> save_unit;  // for plans with save tasks: called on the io stream for every store unit
  bool diagnose = false;               // find the first non-finite value; no update is made
};

struct StepResult {
  double loss_sum = 0;  // over unmasked targets, in double, micro-batches and positions ascending
  optim::GradientNorm norm;
  double clip = 1;
  bool updated = false;  // false: skipped (non-finite gradient, or no targets), nothing changed
  bool nonfinite_master = false;
  std::string first_nonfinite;  // diagnose: "backward of layer 2, micro-batch 1"; empty when all is finite
};

// One plan bound to memory. Runs steps one after another; a step ends when every task has ended.
class Executor {
 public:
  Executor(const plan::Plan& plan, const Machine& machine);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;
  // Host staging of micro-batch m: tokens and targets, [micro * seq_len] each; filled by the caller before run().
  [[nodiscard]] std::int32_t* tokens(int micro_batch);
  [[nodiscard]] std::int32_t* targets(int micro_batch);
  // Token losses of micro-batch m of the last run, [micro * seq_len].
  [[nodiscard]] const float* token_losses(int micro_batch) const;
  // Throws the first error of any task. After a throw the executor must not be used again.
  StepResult run(const StepRequest& request);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Host bytes an executor of this plan holds beside the store, the arena and the parking area: staging, counters, bound tasks.
[[nodiscard]] std::uint64_t executor_host_bytes(const plan::Plan& plan, const model::ModelShape& shape);

}  // namespace spipe::exec
