#include "spipe/exec/trainer.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <future>
#include <memory>

#include "resume.h"
#include "signals.h"
#include "spipe/base/checked.h"
#include "spipe/base/file.h"
#include "spipe/base/host.h"
#include "spipe/base/log.h"
#include "spipe/base/thread_pool.h"
#include "spipe/base/units.h"
#include "spipe/base/version.h"
#include "spipe/data/data.h"
#include "spipe/io/checkpoint.h"
#include "spipe/model/families.h"

namespace spipe::exec {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

int resolved_threads(const config::Config& config) {
  return config.device.threads ? narrow<int>(*config.device.threads) : usable_cpus();
}

// One run: owns everything that lives as long as it.
class Run {
 public:
  Run(const config::Config& config, const RunOptions& options, RunListener& listener);
  RunSummary operator()();

 private:
  void open_data();
  void open_run_folder();
  void allocate();
  void load_start();
  void one_step(Executor& executor, bool saving);
  void fill_inputs(Executor& executor, std::uint64_t step);
  [[noreturn]] void stop_nonfinite(Executor& executor, StepRequest request, const StepResult& result);
  void evaluate();
  void begin_save();
  void save_unit(int store_unit);
  void save_empty_units(int end);
  void save_now();
  void finish_in_background();
  void take_finished_save(bool wait);
  [[nodiscard]] std::unique_ptr<io::CheckpointWriter> make_writer() const;
  [[nodiscard]] std::uint64_t total_steps() const { return static_cast<std::uint64_t>(setup_.config.train.steps); }
  [[nodiscard]] bool due(std::int64_t every) const { return every > 0 && state_.step % static_cast<std::uint64_t>(every) == 0; }

  const RunOptions& options_;
  RunListener& listener_;
  std::unique_ptr<device::Device> device_;
  device::DeviceRates rates_;
  RunSetup setup_;
  std::unique_ptr<data::TrainData> train_data_;
  std::unique_ptr<data::EvalData> eval_data_;
  std::unique_ptr<io::RunLock> lock_;
  std::optional<io::CheckpointInfo> resume_from_;
  TrainerState state_;
  std::unique_ptr<store::Store> store_;
  std::unique_ptr<device::Arena> arena_;
  std::vector<std::byte> parking_;
  std::unique_ptr<optim::NormTable> norms_;
  StreamTimes times_;
  Machine machine_;
  std::unique_ptr<Executor> train_executor_, saving_executor_, eval_executor_;
  // The save in flight: its units are written by a training step, the rest (hashes, fsync, rename) by a thread of its own.
  std::unique_ptr<io::CheckpointWriter> writer_;
  std::future<io::CheckpointInfo> finishing_;
  std::uint64_t saving_step_ = 0;
  int next_unit_to_save_ = 0;
  Clock::time_point save_begin_;
  std::uint64_t saved_step_ = ~std::uint64_t{0};
  RunSummary summary_;
};

std::unique_ptr<device::Device> make_device(const config::Config& config) {
  device::CpuDeviceOptions options;
  options.threads = resolved_threads(config);
  options.update_threads = options.threads;
  options.isa = config.device.isa;
  return device::make_cpu_device(options);
}

Run::Run(const config::Config& config, const RunOptions& options, RunListener& listener)
    : options_(options), listener_(listener), device_(make_device(config)) {
  rates_ = options.rates ? *options.rates : device_->measure_rates();
  setup_ = prepare_run(config, device_->info(), rates_);
}

void Run::open_data() {
  const config::Config& c = setup_.config;
  const auto vocab = static_cast<std::uint64_t>(setup_.architecture.vocab_size);
  train_data_ = std::make_unique<data::TrainData>(data::expand_globs(c.data.train, "data.train"), c.data.seq_len,
                                                  c.batch.global, c.data.shuffle_seed, vocab);
  if (!c.data.eval.empty()) {
    eval_data_ = std::make_unique<data::EvalData>(data::expand_globs(c.data.eval, "data.eval"), c.data.seq_len, vocab);
  }
}

// Files that an atomic write of ours left when the process was killed in the middle of it. Called under the folder's lock.
void remove_leftovers(const Path& folder) {
  constexpr std::string_view kWritten[] = {"latest", "config.yaml", "trace.json"};
  std::vector<Path> leftovers;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    for (const std::string_view written : kWritten) {
      if (entry.is_regular_file() && name.starts_with(std::string(written) + ".tmp-")) leftovers.push_back(entry.path());
    }
  }
  for (const Path& leftover : leftovers) {
    std::error_code ignored;
    std::filesystem::remove(leftover, ignored);
  }
}

void Run::open_run_folder() {
  const Path folder = setup_.config.checkpoint.dir;
  std::error_code code;
  std::filesystem::create_directories(folder, code);
  if (code)
    throw Error(fmt::format("cannot create the run folder ({})", code.message()), folder.string(), "set checkpoint.dir");
  lock_ = std::make_unique<io::RunLock>(folder);
  remove_leftovers(folder);
  std::vector<std::string> skipped;
  resume_from_ = io::newest_checkpoint(folder, &skipped);
  for (const std::string& line : skipped) log_warning("not a complete checkpoint, skipped: " + line);
  const bool resume = options_.resume || options_.resume_auto;
  if (resume_from_ && !resume) {
    throw Error(fmt::format("the run folder already holds checkpoints (newest: step {})", resume_from_->step), folder.string(),
                "continue with --resume, or choose another checkpoint.dir");
  }
  if (!resume_from_ && (options_.resume || (options_.resume_auto && !skipped.empty()))) {
    throw Error("no complete checkpoint to resume from", folder.string(),
                "run without --resume in a new folder to start from the beginning");
  }
  if (resume_from_) {
    const std::string where = resume_from_->path.string();
    state_ = parse_trainer_json(read_text(resume_from_->path / "trainer.json"), where);
    check_same_run(state_, setup_, train_data_->fingerprint(), options_.allow_changes, where);
    saved_step_ = state_.step;
    summary_.checkpoint = resume_from_->path;
  }
  const std::uint64_t needed = io::CheckpointWriter::predicted_bytes(setup_.shape, setup_.format);
  if (const std::uint64_t free = free_disk_bytes(folder); free < needed) {
    throw Error(fmt::format("a checkpoint needs {}, the disk has {} free", format_bytes(needed), format_bytes(free)),
                folder.string(), "free some space or set checkpoint.dir");
  }
  io::prune_checkpoints(folder, std::max<int>(1, narrow<int>(setup_.config.checkpoint.keep)));
}

void Run::allocate() {
  store_ = std::make_unique<store::Store>(setup_.shape, setup_.layout);
  arena_ = device_->make_arena(setup_.arena_bytes());
  parking_.resize(setup_.host.parking);
  norms_ = std::make_unique<optim::NormTable>(setup_.shape);
  machine_.device = device_.get();
  machine_.arena = arena_.get();
  machine_.shape = &setup_.shape;
  machine_.store = store_.get();
  machine_.parking = parking_;
  machine_.constants = model::fill_constants(setup_.shape, arena_->at(0, setup_.shape.constant_bytes));  // lowest in every plan
  machine_.norms = norms_.get();
  machine_.hyper = setup_.hyper;
  machine_.grad_clip = setup_.config.train.grad_clip;
  machine_.seed = setup_.config.train.seed;
  machine_.observers = options_.observers;
  machine_.observers.push_back(&times_);
  train_executor_ = std::make_unique<Executor>(setup_.fit.train, machine_);
  saving_executor_ = std::make_unique<Executor>(setup_.train_and_save, machine_);
  if (setup_.fit.evaluate) eval_executor_ = std::make_unique<Executor>(*setup_.fit.evaluate, machine_);
}

// Initial values are a function of (seed, name, element), so parameters can be filled in any order by any thread.
void initialize(const RunSetup& setup, store::Store& store, int threads) {
  std::vector<std::pair<int, const model::Parameter*>> all;
  for (int s = 0; s < setup.shape.store_unit_count(); ++s) {
    for (const model::Parameter& p : setup.shape.store_units[static_cast<std::size_t>(s)].parameters) all.emplace_back(s, &p);
  }
  ThreadPool pool(threads);
  pool.parallel_for(static_cast<std::int64_t>(all.size()), [&](std::int64_t item, int) {
    const auto& [s, p] = all[static_cast<std::size_t>(item)];
    float* master = store.master(s) + p->offset;
    model::initialize_parameter(setup.architecture, *p, setup.config.train.seed, master);
    if (!setup.format.separate_master) return;
    auto* copy = static_cast<std::uint16_t*>(store.slab(s, store::Plane::compute).data) + p->offset;
    for (std::uint64_t i = 0; i < p->elements(); ++i) copy[i] = bf16_from_f32_half_up(master[i]);
  });
}

void Run::load_start() {
  const config::Config& c = setup_.config;
  if (resume_from_) {
    (void)io::load_checkpoint(*resume_from_, setup_.shape, *store_);
  } else if (c.model.init == config::Init::pretrained) {
    io::load_model(c.model.hf, setup_.shape, *store_);
  } else {
    initialize(setup_, *store_, device_->info().threads);
  }
  state_.data_fingerprint = train_data_->fingerprint();
  for (int s = 0; s < setup_.shape.store_unit_count(); ++s) store_->set_version(s, state_.updates);
  summary_.first_step = state_.step;
}

void Run::fill_inputs(Executor& executor, std::uint64_t step) {
  const std::int64_t micro = setup_.config.batch.micro;
  for (int m = 0; m < setup_.micro_batches; ++m) {
    train_data_->batch(step, m * micro, micro, executor.tokens(m), executor.targets(m));
  }
}

void Run::stop_nonfinite(Executor& executor, StepRequest request, const StepResult& result) {
  request.diagnose = true;
  request.save_unit = nullptr;
  std::string first = executor.run(request).first_nonfinite;
  if (first.empty()) first = "the global norm";
  throw Error(
      fmt::format("non-finite {} at step {}; first in {}", result.norm.finite ? "loss" : "gradient", request.step + 1, first),
      setup_.config.file.string(),
      summary_.checkpoint.empty() ? "lower optimizer.lr, or set train.nonfinite: skip"
                                  : fmt::format("the last good state is {}; lower optimizer.lr, or set train.nonfinite: skip",
                                                summary_.checkpoint.string()),
      ExitCode::kNonFinite);
}

void Run::one_step(Executor& executor, bool saving) {
  const auto begin = Clock::now();
  StepRequest request;
  request.step = state_.step;
  request.targets = train_data_->targets_of_step(state_.step);
  request.version = state_.updates;
  request.lr = setup_.lr.at(static_cast<std::int64_t>(state_.updates));
  if (saving) request.save_unit = [this](int unit) { save_unit(unit); };
  fill_inputs(executor, state_.step);
  times_.reset();
  const StepResult result = executor.run(request);
  const bool finite = result.norm.finite && std::isfinite(result.loss_sum);
  if (!finite && setup_.config.train.nonfinite == "stop") stop_nonfinite(executor, request, result);
  if (result.nonfinite_master) {
    throw Error(fmt::format("a parameter became infinite in the update of step {}", state_.step + 1),
                setup_.config.file.string(), "lower optimizer.lr; the last checkpoint is intact", ExitCode::kNonFinite);
  }
  if (!finite) log_warning(fmt::format("step {} skipped: non-finite loss or gradient", state_.step + 1));
  if (request.targets == 0) log_warning(fmt::format("step {} has no targets: no update", state_.step + 1));

  StepRecord record;
  record.skipped = !result.updated;
  state_.step += 1;
  state_.tokens += request.targets;
  state_.updates += result.updated ? 1 : 0;
  state_.skipped += result.updated ? 0 : 1;
  record.step = state_.step;
  record.tokens = state_.tokens;
  record.loss = request.targets == 0 ? 0 : result.loss_sum / static_cast<double>(request.targets);
  record.grad_norm = result.norm.norm;
  record.lr = request.lr;
  record.clip = result.clip;
  record.skipped_steps = state_.skipped;
  record.step_tokens = request.targets;
  record.h2d_bytes = times_.bytes(plan::StreamKind::h2d);
  record.d2h_bytes = times_.bytes(plan::StreamKind::d2h);
  record.h2d_seconds = times_.busy_seconds(plan::StreamKind::h2d);
  record.d2h_seconds = times_.busy_seconds(plan::StreamKind::d2h);
  record.compute_seconds = times_.busy_seconds(plan::StreamKind::compute);
  record.cpu_seconds = times_.busy_seconds(plan::StreamKind::cpu);
  record.seconds = seconds_since(begin);
  summary_.last_loss = record.loss;
  summary_.bytes_fetched += record.h2d_bytes;
  listener_.on_step(record);
}

void Run::evaluate() {
  const std::int64_t micro = setup_.config.batch.micro;
  const std::uint64_t per_run = static_cast<std::uint64_t>(setup_.micro_batches) * static_cast<std::uint64_t>(micro);
  std::uint64_t windows = eval_data_->windows();
  if (const std::int64_t limit = setup_.config.train.eval_batches; limit > 0) {
    windows = std::min(windows, static_cast<std::uint64_t>(limit * micro));
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
    sum += eval_executor_->run(request).loss_sum;
  }
  summary_.eval_loss = sum / static_cast<double>(targets);
  listener_.on_evaluation(state_.step, *summary_.eval_loss, targets);
}

std::unique_ptr<io::CheckpointWriter> Run::make_writer() const {
  const char* dtype = setup_.shape.compute == DType::bf16 ? "bfloat16" : "float32";
  return std::make_unique<io::CheckpointWriter>(setup_.config.checkpoint.dir, state_.step, setup_.shape, *store_,
                                                trainer_json(state_, setup_),
                                                model::hf_config_text(setup_.architecture, dtype));
}

void Run::finish_in_background() {
  save_empty_units(setup_.shape.store_unit_count());
  finishing_ = std::async(std::launch::async, [this] { return writer_->finish(); });
}

// Reports a save that has finished; with `wait`, the one in flight whatever it takes. Its error (a full disk) ends the run
// here.
void Run::take_finished_save(bool wait) {
  if (!finishing_.valid()) return;
  if (!wait && finishing_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return;
  summary_.checkpoint = finishing_.get().path;
  writer_.reset();
  saved_step_ = saving_step_;
  io::prune_checkpoints(setup_.config.checkpoint.dir, std::max<int>(1, narrow<int>(setup_.config.checkpoint.keep)));
  listener_.on_checkpoint(saving_step_, summary_.checkpoint, seconds_since(save_begin_));
}

void Run::begin_save() {
  take_finished_save(true);
  save_begin_ = Clock::now();
  saving_step_ = state_.step;
  writer_ = make_writer();
  next_unit_to_save_ = 0;
}

// The writer wants every unit in order; plans have no save task for units without tensors (the embedding of a tied rope model).
void Run::save_empty_units(int end) {
  for (; next_unit_to_save_ < end; ++next_unit_to_save_) {
    SPIPE_CHECK(setup_.shape.store_units[static_cast<std::size_t>(next_unit_to_save_)].elements == 0,
                "a unit with tensors was left out of a save");
    writer_->unit(next_unit_to_save_);
  }
}

void Run::save_unit(int store_unit) {
  save_empty_units(store_unit);
  writer_->unit(store_unit);
  next_unit_to_save_ = store_unit + 1;
}

void Run::save_now() {
  take_finished_save(true);
  if (saved_step_ == state_.step) return;
  begin_save();
  for (int s = 0; s < setup_.shape.store_unit_count(); ++s) save_unit(s);
  finish_in_background();
  take_finished_save(true);
}

RunSummary Run::operator()() {
  if (options_.handle_signals) install_signal_handlers();
  open_data();
  open_run_folder();
  listener_.on_setup(setup_, device_->info(), rates_, state_.step);
  summary_.plan_hash = plan::plan_hash(setup_.fit.train);
  const auto begin = Clock::now();
  allocate();
  load_start();
  write_text_atomic(
      setup_.config.checkpoint.dir / "config.yaml",
      config::resolved_text(setup_.config) + fmt::format("# spipe-train {} ({}), {}\n", version(), git_commit(), build_text()));

  if (state_.step >= total_steps()) {
    summary_.already_finished = true;
  }
  while (state_.step < total_steps()) {
    const bool saving = due(setup_.config.checkpoint.every) && state_.step > summary_.first_step && saved_step_ != state_.step;
    if (saving) begin_save();
    one_step(saving ? *saving_executor_ : *train_executor_, saving);
    if (saving) finish_in_background();
    take_finished_save(false);
    if (options_.after_step) options_.after_step(*store_, state_.step);
    if (eval_executor_ && due(setup_.config.train.eval_every) && state_.step < total_steps()) evaluate();

    SignalRequest signal = options_.handle_signals ? take_signal_request() : SignalRequest::none;
    if (options_.stop_after && state_.step - summary_.first_step >= *options_.stop_after) signal = SignalRequest::save_and_stop;
    if (signal != SignalRequest::none) save_now();
    if (signal == SignalRequest::save_and_stop && state_.step < total_steps()) {
      log_info(fmt::format("stopped after step {} as asked; continue with --resume", state_.step));
      summary_.code = ExitCode::kSaved;
      break;
    }
  }
  if (summary_.code == ExitCode::kOk && !summary_.already_finished) {
    save_now();
    if (eval_executor_) evaluate();
  }
  take_finished_save(true);
  summary_.steps_done = state_.step;
  summary_.tokens = state_.tokens;
  summary_.skipped_steps = state_.skipped;
  summary_.seconds = seconds_since(begin);
  return summary_;
}

}  // namespace

RunSummary train(const config::Config& config, const RunOptions& options, RunListener& listener) {
  return Run(config, options, listener)();
}

}  // namespace spipe::exec
