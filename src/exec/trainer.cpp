#include "spipe/exec/trainer.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <span>

#include "run.h"
#include "spipe/base/checked.h"
#include "spipe/base/file.h"
#include "spipe/base/log.h"
#include "spipe/base/version.h"
#include "spipe/exec/signals.h"
#include "unit_updates.h"

namespace spipe::exec {

using Clock = std::chrono::steady_clock;

namespace {

constexpr int kMostReplays = 3;  // of steps that are skipped

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

}  // namespace

// Plans of a run share memory and know nothing of each other's tasks: between them every rank comes to rest.
void Run::switch_to(Executor& executor) {
  if (current_ == &executor) return;
  world_.barrier();
  current_ = &executor;
}

void Run::fill_inputs(Executor& executor, std::uint64_t step) {
  const std::int64_t micro = setup_.config.batch.micro;
  for (int m = 0; m < setup_.micro_batches; ++m) {
    if (!executor.needs_input(m)) continue;
    train_data_->batch(step, m * micro, micro, executor.tokens(m), executor.targets(m));
  }
}

StepRequest Run::request_of(std::uint64_t step) const {
  StepRequest request;
  request.step = step;
  request.targets = train_data_->targets_of_step(step);
  request.version = state_.updates;
  request.lr = [this](std::uint64_t updates) { return setup_.lr.at(static_cast<std::int64_t>(updates)); };
  request.scaler = state_.scaler;
  request.spikes = state_.spikes;
  // The first few skipped steps are looked into, which needs the state they began with.
  request.stop_on_nonfinite = setup_.config.train.nonfinite == "stop" || replays_ < kMostReplays;
  return request;
}

void Run::begin_step(Executor& executor, StepRequest request) {
  raise_signals();
  fill_inputs(executor, request.step);
  if (on_the_way_.empty()) step_begin_ = Clock::now();
  executor.begin(request);
  on_the_way_.push_back(std::move(request));
}

void Run::finish_step() {
  const StepResult result = current_->finish();
  if (setup_.job.barrier_between_steps) world_.barrier();
  const StepRequest request = on_the_way_.front();
  on_the_way_.erase(on_the_way_.begin());
  pending_ |= result.verdict.asked;
  if (!result.verdict.finite()) report_nonfinite(request, result);
  if (result.nonfinite_master) {
    throw nonfinite_error(fmt::format("a parameter became infinite in the update of step {}", request.step + 1));
  }
  if (leads() && result.verdict.spike.spike()) report_spike(request.step + 1, result.verdict);
  if (leads() && request.targets == 0) log_warning(fmt::format("step {} has no targets: no update", request.step + 1));
  summary_.taken_back += result.taken_back;
  record_step(request, result);
  const std::int64_t most = setup_.config.train.max_skips;
  if (most > 0 && state_.skips_in_a_row >= static_cast<std::uint64_t>(most)) {
    throw nonfinite_error(fmt::format("{} steps in a row were skipped (train.max_skips)", state_.skips_in_a_row));
  }
}

Error Run::nonfinite_error(const std::string& finding) const {
  std::string hint = "lower optimizer.lr";
  if (setup_.config.train.nonfinite == "stop") hint += ", or set train.nonfinite: skip";
  if (!summary_.checkpoint.empty()) hint = fmt::format("the last good state is {}; {}", summary_.checkpoint.string(), hint);
  return Error(finding, setup_.config.file.string(), hint, ExitCode::kNonFinite);
}

// Steps are deterministic: the replay, without an update and with every output checked, shows what the step did.
std::string Run::find_nonfinite(StepRequest request, const StepResult& result) {
  while (!on_the_way_.empty()) {  // it changes nothing, and is done again where the run goes on
    pending_ |= current_->finish().verdict.asked;
    on_the_way_.pop_back();
  }
  request.diagnose = true;
  request.version = result.verdict.version_before;
  request.scaler = result.verdict.scaler;
  request.save_unit = nullptr;
  fill_inputs(*current_, request.step);
  const StepResult replay = current_->run(request);
  pending_ |= replay.verdict.asked;
  return replay.first_nonfinite.empty() ? "the global norm" : replay.first_nonfinite;
}

void Run::report_nonfinite(const StepRequest& request, const StepResult& result) {
  const Verdict& verdict = result.verdict;
  const std::uint64_t step = request.step + 1;
  const int unit = verdict.norm.first_bad_unit;
  std::string first =
      unit < 0 ? "a token loss" : "the gradient of " + setup_.shape.store_units[static_cast<std::size_t>(unit)].name;
  if (verdict.overflow() && !optim::at_minimum(setup_.loss_scaling, verdict.scaler)) {
    if (leads()) {
      log_info(fmt::format("step {} skipped: overflow at loss scale {}, first in {}; the next scale is {}", step,
                           verdict.scaler.scale, first, verdict.next_scaler.scale));
    }
    return;
  }
  if (verdict.halted) {
    ++replays_;
    first = find_nonfinite(request, result);
  }
  const std::string scaled =
      setup_.loss_scaling.scales() ? fmt::format(" (loss scale {})", verdict.scaler.scale) : std::string();
  const std::string what = verdict.overflow() ? "gradient" : "loss";
  if (request.stop_on_nonfinite && setup_.config.train.nonfinite == "stop") {
    throw nonfinite_error(fmt::format("non-finite {} at step {}{}; first in {}", what, step, scaled, first));
  }
  if (leads()) log_warning(fmt::format("step {} skipped: non-finite {}{}, first in {}", step, what, scaled, first));
}

void Run::report_spike(std::uint64_t step, const Verdict& verdict) const {
  const auto text = [](const char* what, double value, double z) {
    return fmt::format("{} {:.4g} is {:.1f} standard deviations above the recent mean", what, value, z);
  };
  std::string found;
  if (verdict.spike.loss) found = text("loss", verdict.loss(), verdict.spike.loss_z);
  if (verdict.spike.norm) {
    found += (found.empty() ? "" : ", ") + text("gradient norm", verdict.norm.norm, verdict.spike.norm_z);
  }
  log_warning(fmt::format("step {} skipped: spike: {} (train.skip_spikes {:g})", step, found, setup_.spikes.threshold));
}

namespace {

// Updates of a step that do not wait for its norm; what takes one of them back takes all of them back.
std::uint64_t speculations(const plan::Plan& plan) {
  return static_cast<std::uint64_t>(std::ranges::count_if(plan.tasks, [](const plan::Task& task) {
    return task.kind == plan::TaskKind::commit && (task.flags & plan::kSpeculate) != 0;
  }));
}

const char* why_skipped(const Verdict& verdict, std::uint64_t targets) {
  if (verdict.updated) return "";
  if (targets == 0) return "no targets";
  if (verdict.spike.spike()) return "spike";
  return verdict.overflow() ? "overflow" : "non-finite";
}

}  // namespace

void Run::record_step(const StepRequest& request, const StepResult& result) {
  const Verdict& verdict = result.verdict;
  StepRecord record;
  record.skipped = !verdict.updated;
  record.skipped_for = why_skipped(verdict, request.targets);
  record.spike = verdict.spike;
  if (verdict.counts()) state_.spikes.add(setup_.spikes, verdict.loss(), verdict.norm.norm);
  state_.step = request.step + 1;
  state_.tokens += request.targets;
  state_.updates = verdict.version_before + (verdict.updated ? 1 : 0);
  state_.skipped += verdict.updated ? 0 : 1;
  if (request.targets > 0) state_.skips_in_a_row = verdict.updated ? 0 : state_.skips_in_a_row + 1;
  state_.scaler = verdict.next_scaler;
  if (setup_.loss_scaling.scales()) record.loss_scale = verdict.scaler.scale;
  record.step = state_.step;
  record.tokens = state_.tokens;
  record.loss = verdict.loss();
  record.grad_norm = verdict.norm.norm;
  record.lr = request.lr(verdict.version_before);
  record.clip = verdict.clip;
  record.skipped_steps = state_.skipped;
  for (std::size_t unit = 0; unit < result.unit_norms.size(); ++unit) {
    record.unit_norms.emplace_back(setup_.shape.store_units[unit].name, result.unit_norms[unit]);
  }
  if (!verdict.updated || verdict.clip != 1) record.taken_back = speculations(setup_.fit.train);
  record.step_tokens = request.targets;
  record.h2d_bytes =
      times_.bytes(plan::StreamKind::h2d) + times_.bytes(plan::StreamKind::recv) + times_.bytes(plan::StreamKind::update_in);
  record.d2h_bytes =
      times_.bytes(plan::StreamKind::d2h) + times_.bytes(plan::StreamKind::send) + times_.bytes(plan::StreamKind::update_out);
  record.h2d_seconds = times_.busy_seconds(plan::StreamKind::h2d);
  record.d2h_seconds = times_.busy_seconds(plan::StreamKind::d2h);
  record.compute_seconds = times_.busy_seconds(plan::StreamKind::compute);
  record.cpu_seconds = times_.busy_seconds(plan::StreamKind::cpu) + times_.busy_seconds(plan::StreamKind::decide);
  times_.reset();
  record.seconds = seconds_since(step_begin_);
  step_begin_ = Clock::now();
  summary_.last_loss = record.loss;
  summary_.bytes_fetched += record.h2d_bytes;
  if (leads()) listener_.on_step(record);
}

void Run::evaluate() {
  switch_to(*eval_executor_);
  const std::int64_t micro = setup_.config.batch.micro;
  const std::uint64_t per_run = static_cast<std::uint64_t>(setup_.micro_batches) * static_cast<std::uint64_t>(micro);
  std::uint64_t windows = eval_data_->windows();
  if (const std::int64_t limit = setup_.config.train.eval_batches; limit > 0) {
    const auto batches = static_cast<std::uint64_t>(limit), size = static_cast<std::uint64_t>(micro);
    if (batches < windows / size) windows = batches * size;
  }
  double sum = 0;
  std::uint64_t targets = 0;
  for (std::uint64_t first = 0; first < windows; first += per_run) {
    for (int m = 0; m < setup_.micro_batches; ++m) {
      const std::uint64_t begin = first + static_cast<std::uint64_t>(m * micro);
      std::int32_t* target = eval_executor_->targets(m);
      eval_data_->batch(begin, micro, eval_executor_->tokens(m), target);
      for (std::int64_t row = 0; row < micro; ++row) {
        for (std::int64_t t = 0; t < setup_.config.data.seq_len; ++t) {
          std::int32_t& value = target[row * setup_.config.data.seq_len + t];
          if (begin + static_cast<std::uint64_t>(row) >= windows) value = -1;
          targets += value >= 0 ? 1 : 0;
        }
      }
    }
    StepRequest request;
    request.step = state_.step;
    request.version = state_.updates;
    sum += eval_executor_->run(request).verdict.loss_sum;
  }
  summary_.eval_loss = sum / static_cast<double>(targets);
  if (leads()) listener_.on_evaluation(state_.step, *summary_.eval_loss, targets);
}

// With the engine at rest: the store is read in place.
void Run::sample() {
  settle_residents();
  world_.barrier();
  if (sampling_ != nullptr) listener_.on_samples(state_.step, sampling_->make(*store_));
  world_.barrier();
}

// State that stays on devices is brought to the store, for who looks at it there. With the engine at rest.
void Run::settle_residents() {
  if (residents_ == nullptr && setup_.fit.train.resident_bytes == 0) return;
  flush_residents(setup_.fit.train, machine_);
  world_.barrier();
}

void Run::save_whole() {
  report_save(true);
  settle_residents();
  if (saver_->step() != state_.step) saver_->whole(state_);
  report_save(true);
}

void Run::report_save(bool wait) {
  const auto saved = saver_->take(wait);
  if (!saved) return;
  summary_.checkpoint = saved->path;
  io::prune_checkpoints(setup_.config.checkpoint.dir, std::max<int>(1, narrow<int>(setup_.config.checkpoint.keep)));
  listener_.on_checkpoint(saved->step, saved->path, saved->seconds);
}

// A signal may come to any rank; what it asks is told with the norm, so that all ranks hear it at the same step.
void Run::raise_signals() {
  if (!options_.handle_signals) return;
  const SignalRequest signal = take_signal_request();
  if (signal == SignalRequest::none) return;
  machine_.asked->fetch_or(signal == SignalRequest::save_and_stop ? kSaveAndStop : kSaveAndGoOn);
}

// Whether the step after `steps_done` others may begin while the last of them still runs: nothing has to happen between.
bool Run::may_begin_early(std::uint64_t steps_done) const {
  return current_ == train_executor_.get() && steps_done < total_steps() && pending_ == 0 && !options_.after_step &&
         !setup_.job.barrier_between_steps && !save_due(steps_done) && !evaluation_due(steps_done) &&
         !samples_due(steps_done) && !stop_due(steps_done);
}

void Run::between_steps() {
  if (options_.after_step) {
    settle_residents();
    options_.after_step(*store_, state_.step);
  }
  if (stop_due(state_.step)) pending_ |= kSaveAndStop;
  if (pending_ != 0) save_whole();  // before an evaluation: who asks may not wait for long
  if (evaluation_due(state_.step)) evaluate();
  if (samples_due(state_.step)) sample();
  if ((pending_ & kSaveAndStop) != 0 && state_.step < total_steps()) {
    if (leads()) log_info(fmt::format("stopped after step {} as asked; continue with --resume", state_.step));
    summary_.code = ExitCode::kSaved;
  }
  pending_ = 0;
}

void Run::train_steps() {
  while (state_.step < total_steps() && summary_.code == ExitCode::kOk) {
    const bool saving = on_the_way_.empty() && save_due(state_.step);
    if (on_the_way_.empty()) {
      if (saving) {
        report_save(true);
        settle_residents();
        saver_->begin(state_);
      }
      switch_to(saving ? *saving_executor_ : *train_executor_);
      StepRequest request = request_of(state_.step);
      if (saving) request.save_unit = [this](int unit) { saver_->unit(unit); };
      begin_step(*current_, std::move(request));
    }
    if (may_begin_early(state_.step + 1)) begin_step(*current_, request_of(state_.step + 1));
    finish_step();
    if (saving) saver_->end();
    report_save(false);
    if (on_the_way_.empty()) between_steps();
  }
}

Pacer::Account Run::pace_of_all() const {
  const Pacer::Account own = pacer_->account();
  Pacer::Account all;
  for (const auto& bytes : world_.all_gather(std::as_bytes(std::span(&own, 1)))) {
    Pacer::Account account;
    std::memcpy(&account, bytes.data(), sizeof(account));
    all.tasks += account.tasks;
    all.overruns += account.overruns;
    all.real_seconds += account.real_seconds;
    all.paced_seconds += account.paced_seconds;
    all.late_seconds += account.late_seconds;
    all.worst_overrun_seconds = std::max(all.worst_overrun_seconds, account.worst_overrun_seconds);
  }
  return all;
}

std::uint64_t Run::sum_over_ranks(std::uint64_t own) const {
  std::uint64_t sum = 0;
  for (const auto& bytes : world_.all_gather(std::as_bytes(std::span(&own, 1)))) {
    std::uint64_t other = 0;
    std::memcpy(&other, bytes.data(), sizeof(other));
    sum += other;
  }
  return sum;
}

RunSummary Run::operator()() {
  open_data();
  open_run_folder();
  if (leads()) listener_.on_setup(setup_, device_->info(), rates_, state_.step);
  summary_.plan_hash = plan::plan_hash(setup_.fit.train);
  const auto begin = Clock::now();
  allocate();
  load_start();
  if (leads()) {
    write_text_atomic(setup_.config.checkpoint.dir / "config.yaml",
                      config::resolved_text(setup_.config) +
                          fmt::format("# spipe-train {} ({}), {}\n", version(), git_commit(), build_text()));
  }
  summary_.already_finished = state_.step >= total_steps();
  train_steps();
  if (summary_.code == ExitCode::kOk && !summary_.already_finished) {
    save_whole();
    if (eval_executor_) evaluate();
    if (!setup_.config.log.samples.empty()) sample();
  }
  report_save(true);
  if (pacer_) summary_.pace = pace_of_all();
  summary_.taken_back = sum_over_ranks(summary_.taken_back);
  summary_.steps_done = state_.step;
  summary_.tokens = state_.tokens;
  summary_.skipped_steps = state_.skipped;
  summary_.loss_scale = state_.scaler.scale;
  summary_.seconds = seconds_since(begin);
  return summary_;
}

RunSummary train(const config::Config& config, const RunOptions& options, RunListener& listener, comm::World& world) {
  auto run = std::make_unique<Run>(config, options, listener, world);
  try {
    return (*run)();
  } catch (...) {
    // Messages under way read and write the run's memory, and nobody can take them back: it stays until the process ends.
    if (world.size() > 1) (void)run.release();
    throw;
  }
}

RunSummary train(const config::Config& config, const RunOptions& options, RunListener& listener) {
  comm::World alone{comm::LaunchFacts{}};
  return train(config, options, listener, alone);
}

}  // namespace spipe::exec
