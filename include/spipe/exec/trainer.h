// The step loop: a run from its config to its last checkpoint.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "spipe/base/error.h"
#include "spipe/comm/world.h"
#include "spipe/exec/executor.h"
#include "spipe/exec/pacer.h"
#include "spipe/exec/run_setup.h"

namespace spipe::exec {

// One finished step, and the window of steps since the last record.
struct StepRecord {
  std::uint64_t step = 0;    // 1-based
  std::uint64_t tokens = 0;  // targets trained on since the beginning of the run, resumed parts included
  double loss = 0, grad_norm = 0, lr = 0, clip = 1;
  std::optional<double> loss_scale;  // of this step, where there is one
  bool skipped = false;
  std::string skipped_for;  // overflow | non-finite | spike | no targets; empty where not skipped
  optim::SpikeScore spike;
  std::uint64_t skipped_steps = 0;  // of the run so far
  // Of every store unit, with its name; of a run, nothing but the values changes.
  std::vector<std::pair<std::string, double>> unit_norms;
  std::uint64_t taken_back = 0;  // speculative updates that were made in vain, or made again, on all ranks
  double seconds = 0;            // of this step, evaluation and saving excluded
  std::uint64_t step_tokens = 0;
  std::uint64_t h2d_bytes = 0, d2h_bytes = 0;                                     // over rank 0's link
  double h2d_seconds = 0, d2h_seconds = 0, compute_seconds = 0, cpu_seconds = 0;  // busy time of the streams
};

struct RunSummary {
  ExitCode code = ExitCode::kOk;
  bool already_finished = false;
  std::uint64_t first_step = 0, steps_done = 0, tokens = 0, skipped_steps = 0, bytes_fetched = 0;
  double last_loss = 0, seconds = 0;
  double loss_scale = 1;  // of the step after the last
  std::optional<double> eval_loss;
  std::filesystem::path checkpoint;  // the newest one
  std::uint64_t plan_hash = 0;
  std::uint64_t taken_back = 0;        // speculative updates of units that were made in vain or again, on all ranks
  std::optional<Pacer::Account> pace;  // of all ranks together, with device.pace
};

// What the model made of a prompt of log.samples. Texts are well-formed UTF-8.
struct Sample {
  std::string prompt, text;
  bool ended = false;  // by an end-of-document token, rather than by log.sample_tokens
};

// How a run reports; called on the thread of train(), on rank 0 only. All empty by default.
class RunListener {
 public:
  virtual ~RunListener() = default;
  // Before memory is taken: what will be done. `resume_step` is 0 for a new run.
  virtual void on_setup(const RunSetup&, const device::DeviceInfo&, const device::DeviceRates&, std::uint64_t resume_step) {
    (void)resume_step;
  }
  virtual void on_step(const StepRecord&) {}
  virtual void on_evaluation(std::uint64_t step, double loss, std::uint64_t targets) { (void)step, (void)loss, (void)targets; }
  virtual void on_samples(std::uint64_t step, const std::vector<Sample>& samples) { (void)step, (void)samples; }
  virtual void on_checkpoint(std::uint64_t step, const std::filesystem::path& path, double seconds) {
    (void)step, (void)path, (void)seconds;
  }
};

struct RunOptions {
  bool resume = false;                     // continue from the newest complete checkpoint; an Error when there is none
  bool resume_auto = false;                // continue when there is one, else start
  std::vector<std::string> allow_changes;  // numerics keys whose difference from the checkpoint is permitted
  bool handle_signals = true;              // do what signals ask (install_signal_handlers)
  std::vector<plan::TaskObserver*> observers;
  std::optional<device::DeviceRates> rates;  // instead of measuring (they choose between plans of equal bits)
  bool barrier_between_steps = false;        // measurements of published methods (Job)
  bool checks_every_other = false;           // measurements (Machine)
  // Tests.
  std::optional<std::uint64_t> stop_after;  // behave as if asked to save and stop after this many steps of the run
  std::function<void(store::Store&, std::uint64_t steps_done)> after_step;  // with the engine at rest
  std::vector<GradientFault> gradient_faults;                               // the same on every rank
  std::optional<std::uint64_t> keeps_speculation;                           // Machine
};

// Runs a config to its end (or to a signal); collective over the ranks of the world. Throws Error for the user's mistakes, on
// the rank that found it: the caller ends the job (World::fail). A non-finite step under `nonfinite: stop` throws an Error with
// ExitCode::kNonFinite that names unit and micro-batch; so
// do train.max_skips skipped steps in a row.
RunSummary train(const config::Config& config, const RunOptions& options, RunListener& listener, comm::World& world);
// The same on one rank.
RunSummary train(const config::Config& config, const RunOptions& options, RunListener& listener);

}  // namespace spipe::exec
