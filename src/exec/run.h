// Inside of train(): one run from its config to its last checkpoint, on one rank. run_start.cpp: until the first step may
// begin; trainer.cpp: the steps.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "resume.h"
#include "samples.h"
#include "saver.h"
#include "spipe/comm/region.h"
#include "spipe/data/data.h"
#include "spipe/exec/trainer.h"

namespace spipe::exec {

// One run: owns everything that lives as long as it.
class Run {
 public:
  Run(const config::Config& config, const RunOptions& options, RunListener& listener, comm::World& world);
  RunSummary operator()();

 private:
  enum Asked : std::uint32_t { kSaveAndGoOn = 1, kSaveAndStop = 2 };
  [[nodiscard]] Job agree_on_job() const;
  void set_up_together(const config::Config& config, Job job);
  void check_agreement();
  [[nodiscard]] std::optional<std::pair<std::string, std::string>> first_difference(const std::string& own);
  void open_data();
  void open_run_folder();
  void check_shared_folder();
  void check_folder_and_resume();
  void allocate();
  void initialize();
  void load_start();
  void switch_to(Executor& executor);
  void fill_inputs(Executor& executor, std::uint64_t step);
  [[nodiscard]] StepRequest request_of(std::uint64_t step) const;
  void begin_step(Executor& executor, StepRequest request);
  void finish_step();
  void record_step(const StepRequest& request, const StepResult& result);
  [[nodiscard]] std::string find_nonfinite(StepRequest request, const StepResult& result);
  void report_spike(std::uint64_t step, const Verdict& verdict) const;
  void report_nonfinite(const StepRequest& request, const StepResult& result);
  [[nodiscard]] Error nonfinite_error(const std::string& finding) const;
  [[nodiscard]] bool may_begin_early(std::uint64_t steps_done) const;
  void train_steps();
  void between_steps();
  void raise_signals();
  void evaluate();
  void sample();
  [[nodiscard]] Pacer::Account pace_of_all() const;
  [[nodiscard]] std::uint64_t sum_over_ranks(std::uint64_t own) const;
  void settle_residents();
  void save_whole();
  void report_save(bool wait);
  [[nodiscard]] bool leads() const { return world_.rank() == 0; }
  [[nodiscard]] std::uint64_t total_steps() const { return static_cast<std::uint64_t>(setup_.config.train.steps); }
  [[nodiscard]] bool due(std::int64_t every, std::uint64_t steps_done) const {
    return every > 0 && steps_done % static_cast<std::uint64_t>(every) == 0;
  }
  [[nodiscard]] bool save_due(std::uint64_t steps_done) const {
    return due(setup_.config.checkpoint.every, steps_done) && steps_done > summary_.first_step && saver_->step() != steps_done;
  }
  [[nodiscard]] bool evaluation_due(std::uint64_t steps_done) const {
    return eval_executor_ && due(setup_.config.train.eval_every, steps_done) && steps_done < total_steps();
  }
  [[nodiscard]] bool samples_due(std::uint64_t steps_done) const {
    return !setup_.config.log.samples.empty() && due(setup_.config.train.eval_every, steps_done) && steps_done < total_steps();
  }
  [[nodiscard]] bool stop_due(std::uint64_t steps_done) const {
    return options_.stop_after && steps_done - summary_.first_step >= *options_.stop_after;
  }

  const RunOptions& options_;
  RunListener& listener_;
  comm::World& world_;
  std::unique_ptr<device::Device> device_;
  device::DeviceRates rates_;
  RunSetup setup_;
  std::unique_ptr<data::TrainData> train_data_;
  std::unique_ptr<data::EvalData> eval_data_;
  std::unique_ptr<io::RunLock> lock_;
  std::optional<io::CheckpointInfo> resume_from_;
  TrainerState state_;
  std::unique_ptr<comm::HostRegion> region_;
  std::unique_ptr<store::Store> store_;
  std::unique_ptr<device::Arena> arena_, residents_;
  std::vector<std::byte> parking_;
  std::unique_ptr<optim::NormTable> norms_;
  std::unique_ptr<Pacer> pacer_;
  StreamTimes times_;
  Machine machine_;
  std::unique_ptr<Executor> train_executor_, saving_executor_, eval_executor_;
  Executor* current_ = nullptr;
  std::unique_ptr<Saver> saver_;
  std::unique_ptr<Sampling> sampling_;   // on rank 0, with log.samples
  std::vector<StepRequest> on_the_way_;  // begun and not finished, oldest first
  std::uint32_t pending_ = 0;            // Asked
  int replays_ = 0;                      // of steps that were not finite
  std::chrono::steady_clock::time_point step_begin_;
  RunSummary summary_;
};

}  // namespace spipe::exec
