// Inside of the executor: what a task does when its turn has come.
#pragma once

#include <atomic>
#include <mutex>

#include "bound_plan.h"
#include "diagnose.h"
#include "unit_updates.h"

namespace spipe::exec {

// A step on its way.
struct Step {
  StepRequest request;
  std::uint64_t run = 0;  // of this executor, from 1
  bool chained = false;   // begun while the one before was running: what that one decides is the start of this one
  std::uint32_t nonfinite_master = 0;
  std::uint64_t taken_back = 0;
  Diagnosis diagnosis;
};

class TaskRunner {
 public:
  TaskRunner(const plan::Plan& plan, const Machine& machine, const PlanArea& area);
  [[nodiscard]] BoundPlan& bound() { return bound_; }
  void run(const plan::Task& task, Step& step, StreamHandle* handle);
  // The share of this host in the norm, as bytes to send.
  [[nodiscard]] std::span<std::byte> pack_norm(const plan::Task& push, const Step& step);
  [[nodiscard]] Verdict& verdict(std::uint64_t run) const { return area_.verdicts[run % kVerdicts]; }
  // What the step's loss and gradients are multiplied by; known once the verdict on the step before is.
  [[nodiscard]] double loss_scale(const Step& step) const { return scaler(step).scale; }

 private:
  [[nodiscard]] const model::StoreUnit& store_unit(int unit) const {
    return machine_.shape->store_units[static_cast<std::size_t>(unit)];
  }
  [[nodiscard]] std::uint64_t version(const Step& step) const;
  [[nodiscard]] optim::ScalerState scaler(const Step& step) const;
  [[nodiscard]] optim::SpikeScore judge(const Verdict& made, const Step& step) const;
  void check_version(const plan::Task& task, int unit, const Step& step) const;
  void fetch(const plan::Task& task, BoundTask& bound, const Step& step);
  void compute(const plan::Task& task, BoundTask& bound, Step& step, StreamHandle* handle);
  void add_partial(const plan::Task& task, const BoundTask& bound, StreamHandle* handle);
  void offload(const plan::Task& task, const BoundTask& bound, Step& step, StreamHandle* handle);
  void inject_faults(const plan::Task& task, const BoundTask& bound, const Step& step) const;
  void bring_losses(const plan::Task& task, const BoundTask& bound, Step& step);
  void decide(const BoundTask& bound, Step& step);
  void take_parts(const NormParts& parts, std::uint32_t& asked);
  [[nodiscard]] bool prepares(const plan::Task& task, const Step& step) const;
  [[nodiscard]] optim::UpdateScalars scalars(const Step& step, double clip) const;
  void optimize(const plan::Task& task, Step& step);
  void commit(const plan::Task& task, Step& step);
  std::uint32_t asked(std::uint64_t run);
  void wait_for_readers(std::uint64_t run) const;

  const plan::Plan& plan_;
  const Machine& machine_;
  const PlanArea& area_;
  BoundPlan bound_;
  UnitUpdates updates_;
  bool sends_norm_ = false;  // this host's share goes to others
  std::mutex asked_mutex_;
  std::uint64_t asked_run_ = 0;
  std::uint32_t asked_bits_ = 0;
};

}  // namespace spipe::exec
