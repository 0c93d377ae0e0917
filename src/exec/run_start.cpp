#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <span>
#include <sstream>

#include "run.h"
#include "spipe/base/checked.h"
#include "spipe/base/file.h"
#include "spipe/base/host.h"
#include "spipe/base/log.h"
#include "spipe/base/thread_pool.h"
#include "spipe/base/units.h"
#include "spipe/model/families.h"
#include "unit_updates.h"

namespace spipe::exec {

namespace {

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

// The same text on every rank: that of rank 0.
std::string broadcast_text(comm::World& world, const std::string& text) {
  const auto own = bytes_of(text);
  std::vector<std::byte> bytes(own.begin(), own.end());
  world.broadcast(bytes, 0);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

template <typename T>
T broadcast_value(comm::World& world, const T& value) {
  const auto own = std::as_bytes(std::span(&value, 1));
  std::vector<std::byte> bytes(own.begin(), own.end());
  world.broadcast(bytes, 0);
  T result;
  std::memcpy(&result, bytes.data(), sizeof(T));
  return result;
}

std::unique_ptr<device::Device> make_device(const config::Config& config, const comm::World& world) {
  std::optional<int> asked;
  if (config.device.threads) asked = narrow<int>(*config.device.threads);
  const comm::ThreadShare share = world.threads(asked);
  if (world.rank() == 0) {
    for (const std::string& warning : share.warnings) log_warning(warning);
  }
  device::CpuDeviceOptions options;
  options.threads = share.threads;
  options.update_threads = share.threads;
  options.isa = config.device.isa;
  return device::make_cpu_device(options);
}

// A line of a resolved configuration without what it says about the value's origin.
std::string without_comment(const std::string& line) {
  const std::size_t begin = std::min(line.find_first_not_of(' '), line.size());
  const std::string text = line.substr(begin, line.find(" #", begin) - begin);
  return text.substr(0, text.find_last_not_of(' ') + 1);
}

nlohmann::json json_of(const plan::RankChoice& choice) {
  return {{"schedule", choice.schedule},
          {"forward", choice.forward_cuts},
          {"backward", choice.backward_cuts},
          {"prefetch", choice.prefetch},
          {"park", choice.park},
          {"updates", {choice.updates.speculate, choice.updates.device, choice.updates.resident}}};
}

plan::RankChoice choice_from(const nlohmann::json& json) {
  const nlohmann::json& updates = json.at("updates");
  return {json.at("schedule").get<std::string>(),
          json.at("forward").get<std::vector<int>>(),
          json.at("backward").get<std::vector<int>>(),
          json.at("prefetch").get<int>(),
          json.at("park").get<bool>(),
          {updates.at(0).get<double>(), updates.at(1).get<double>(), updates.at(2).get<double>()}};
}

constexpr const char* kHostsMark = ".hosts";  // there while a run starts

// Files that an atomic write of ours left when the process was killed in the middle of it. Called under the folder's lock.
void remove_leftovers(const Path& folder) {
  constexpr std::string_view kWritten[] = {"latest", "config.yaml", "run.json", "trace.json", "report.html", kHostsMark};
  std::vector<Path> leftovers;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    for (const std::string_view written : kWritten) {
      const bool ours = name.starts_with(std::string(written) + ".tmp-") || name == kHostsMark;
      if (entry.is_regular_file() && ours) leftovers.push_back(entry.path());
    }
  }
  for (const Path& leftover : leftovers) {
    std::error_code ignored;
    std::filesystem::remove(leftover, ignored);
  }
}

}  // namespace

Run::Run(const config::Config& config, const RunOptions& options, RunListener& listener, comm::World& world)
    : options_(options), listener_(listener), world_(world), device_(make_device(config, world)) {
  // One rank measures while the others wait: rates choose the plan, and all must choose the same.
  if (leads()) rates_ = options.rates ? *options.rates : device_->measure_rates();
  rates_ = broadcast_value(world_, rates_);
  set_up_together(config, agree_on_job());
  check_agreement();
}

// The first rank plans; the others make the plan it has chosen, or fail as it did.
void Run::set_up_together(const config::Config& config, Job job) {
  if (world_.size() == 1) {
    setup_ = prepare_run(config, device_->info(), rates_, job);
    return;
  }
  nlohmann::json told;
  if (leads()) {
    try {
      setup_ = prepare_run(config, device_->info(), rates_, job);
      told = json_of(plan::choice_of(setup_.trials.front()));
    } catch (const Error& error) {
      told = {{"finding", error.finding()},
              {"where", error.where()},
              {"hint", error.hint()},
              {"code", static_cast<int>(error.code())}};
    }
  }
  told = nlohmann::json::parse(broadcast_text(world_, told.dump()));
  if (told.contains("finding")) {
    throw Error(told.at("finding").get<std::string>(), told.at("where").get<std::string>(), told.at("hint").get<std::string>(),
                static_cast<ExitCode>(told.at("code").get<int>()));
  }
  if (leads()) return;
  job.choice = choice_from(told);
  setup_ = prepare_run(config, device_->info(), rates_, job);
}

Job Run::agree_on_job() const {
  Job job;
  job.rank = world_.rank();
  job.barrier_between_steps = options_.barrier_between_steps;
  job.host_of_rank.clear();
  for (int rank = 0; rank < world_.size(); ++rank) job.host_of_rank.push_back(world_.host_of(rank));
  const int threads = device_->info().threads;
  for (const auto& bytes : world_.all_gather(std::as_bytes(std::span(&threads, 1)))) {
    job.threads_of_rank.push_back(0);
    std::memcpy(&job.threads_of_rank.back(), bytes.data(), sizeof(int));
  }
  if (world_.size() == 1) return job;
  const HostMemory own = host_memory();
  job.host_memory = own.available;
  for (const auto& bytes : world_.all_gather(std::as_bytes(std::span(&own.available, 1)))) {
    std::uint64_t other = 0;
    std::memcpy(&other, bytes.data(), sizeof(other));
    job.host_memory = std::min(*job.host_memory, other);
  }
  job.host_memory_source = "available on every host";
  return job;
}

// All ranks have come to the same plan and the same arithmetic by themselves, or the job makes no sense.
void Run::check_agreement() {
  const std::string place = setup_.config.file.string();
  const std::string who = fmt::format("rank {} on {}", world_.rank(), world_.machine_name_of(world_.rank()));
  if (const auto other = first_difference(config::resolved_text(setup_.config))) {
    throw Error(fmt::format("{} has another configuration than rank 0: '{}' against '{}'", who, other->first, other->second),
                place, "give all ranks the same file and the same flags");
  }
  if (const auto other = first_difference(setup_.numerics.text())) {
    throw Error(fmt::format("{} computes otherwise than rank 0: '{}' against '{}'", who, other->first, other->second), place,
                "set device.isa to what all machines have, and install the same libraries");
  }
  std::uint64_t hash = plan::plan_hash(setup_.fit.train) * 3 + plan::plan_hash(setup_.train_and_save);
  if (setup_.fit.evaluate) hash = hash * 3 + plan::plan_hash(*setup_.fit.evaluate);
  SPIPE_CHECK(broadcast_value(world_, hash) == hash, "the ranks have made different plans");
}

// The first line in which a text of this rank differs from rank 0's.
std::optional<std::pair<std::string, std::string>> Run::first_difference(const std::string& own) {
  std::istringstream mine(own), first(broadcast_text(world_, own));
  for (std::string a, b;;) {
    const bool more_a = static_cast<bool>(std::getline(mine, a)), more_b = static_cast<bool>(std::getline(first, b));
    if (!more_a && !more_b) return std::nullopt;
    if (!more_a) a.clear();
    if (!more_b) b.clear();
    if (a != b) return std::pair(without_comment(a), without_comment(b));
  }
}

void Run::open_data() {
  const config::Config& c = setup_.config;
  const auto vocab = static_cast<std::uint64_t>(setup_.architecture.vocab_size);
  train_data_ = std::make_unique<data::TrainData>(data::expand_globs(c.data.train, "data.train"), c.data.seq_len,
                                                  c.batch.global, c.data.shuffle_seed, vocab);
  if (!c.log.samples.empty()) check_sampling_data(c);
  if (!c.data.eval.empty()) {
    eval_data_ = std::make_unique<data::EvalData>(data::expand_globs(c.data.eval, "data.eval"), c.data.seq_len, vocab);
  }
  const std::array<std::uint64_t, 2> own = {train_data_->fingerprint(), eval_data_ ? eval_data_->fingerprint() : 0};
  if (own != broadcast_value(world_, own)) {
    throw Error(
        fmt::format("rank {} on {} reads other token files than rank 0", world_.rank(), world_.machine_name_of(world_.rank())),
        "data", "all ranks need the same files");
  }
}

// Rank 0 alone looks after the run folder; the others learn what it found.
void Run::open_run_folder() {
  if (leads()) check_folder_and_resume();
  check_shared_folder();
  const bool resumes = broadcast_value(world_, resume_from_.has_value());
  if (!resumes) return;
  io::CheckpointInfo from = resume_from_.value_or(io::CheckpointInfo{});
  from.step = broadcast_value(world_, from.step);
  from.path = broadcast_text(world_, from.path.string());
  if (!leads()) {
    state_ = parse_trainer_json(read_text(from.path / "trainer.json"), from.path.string());
    resume_from_ = from;
  }
  summary_.checkpoint = from.path;
}

// Every host writes its part of a checkpoint into the one folder: that it is one is found out now, not at the first save.
void Run::check_shared_folder() {
  if (world_.hosts() == 1) return;
  const Path mark = setup_.config.checkpoint.dir / kHostsMark;
  std::string text = fmt::format("{} {}\n", world_.pid_of(0), std::chrono::system_clock::now().time_since_epoch().count());
  if (leads()) write_text_atomic(mark, text);
  text = broadcast_text(world_, text);
  if (world_.local_rank() == 0 && (!std::filesystem::exists(mark) || read_text(mark) != text)) {
    throw Error(fmt::format("rank {} on {} does not find here what rank 0 has just written", world_.rank(),
                            world_.machine_name_of(world_.rank())),
                mark.parent_path().string(), "checkpoint.dir must be on a file system that all hosts share");
  }
  world_.barrier();
  if (leads()) std::filesystem::remove(mark);
}

void Run::check_folder_and_resume() {
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
  }
  io::prune_checkpoints(folder, std::max<int>(1, narrow<int>(setup_.config.checkpoint.keep)));  // and parts of killed saves
  const std::uint64_t needed = io::CheckpointWriter::predicted_bytes(setup_.shape, setup_.format);
  if (const std::uint64_t free = free_disk_bytes(folder); free < needed) {
    throw Error(fmt::format("a checkpoint needs {}, the disk has {} free", format_bytes(needed), format_bytes(free)),
                folder.string(), "free some space or set checkpoint.dir");
  }
}

void Run::allocate() {
  const int ranks = world_.local_size();
  comm::RegionLayout layout;
  layout.add("store", setup_.layout.bytes);
  layout.add("versions", store::StorePlace::version_bytes(setup_.layout));
  layout.add("norms", optim::NormTable::bytes(setup_.shape));
  layout.add("mailboxes", setup_.host.mailboxes);
  layout.add("asked", sizeof(std::uint32_t));
  layout.add("pacer", Pacer::shared_bytes(ranks));
  PlanArea::reserve(layout, "train", setup_.fit.train, ranks);
  PlanArea::reserve(layout, "save", setup_.train_and_save, ranks);
  if (setup_.fit.evaluate) PlanArea::reserve(layout, "evaluate", *setup_.fit.evaluate, ranks);
  region_ = std::make_unique<comm::HostRegion>(world_, layout);

  const store::StorePlace place{region_->bytes("store").data(),
                                reinterpret_cast<std::uint64_t*>(region_->bytes("versions").data())};
  store_ = std::make_unique<store::Store>(setup_.shape, setup_.layout, place);
  norms_ = std::make_unique<optim::NormTable>(setup_.shape, region_->bytes("norms"));
  arena_ = device_->make_arena(setup_.arena_bytes());
  if (setup_.fit.train.resident_bytes > 0) residents_ = device_->make_arena(setup_.fit.train.resident_bytes);
  parking_.resize(setup_.parking_bytes);
  machine_.device = device_.get();
  machine_.arena = arena_.get();
  machine_.residents = residents_.get();
  machine_.keeps_speculation = options_.keeps_speculation;
  machine_.checks_every_other = options_.checks_every_other;
  machine_.shape = &setup_.shape;
  machine_.store = store_.get();
  machine_.parking = parking_;
  machine_.constants = model::fill_constants(setup_.shape, arena_->at(0, setup_.shape.constant_bytes));  // lowest in every plan
  machine_.norms = norms_.get();
  machine_.hyper = setup_.hyper;
  machine_.grad_clip = setup_.config.train.grad_clip;
  machine_.loss_scaling = setup_.loss_scaling;
  machine_.spikes = setup_.spikes;
  machine_.seed = setup_.config.train.seed;
  machine_.gradient_faults = options_.gradient_faults;
  machine_.observers = options_.observers;
  machine_.observers.push_back(&times_);
  machine_.world = world_.size() > 1 ? &world_ : nullptr;
  machine_.asked = reinterpret_cast<std::atomic<std::uint32_t>*>(region_->bytes("asked").data());
  if (const config::DeviceConfig& device = setup_.config.device; !device.pace.empty()) {
    const bool slow = device.pace_slow_rank && *device.pace_slow_rank == world_.rank();
    pacer_ = std::make_unique<Pacer>(setup_.hardware, world_.local_rank(), ranks, region_->bytes("pacer"), device.pace_jitter,
                                     device.pace_seed, slow ? 1 / device.pace_slow_factor : 1.0);
    machine_.pacer = pacer_.get();
  }
  const auto bind = [this](const plan::Plan& plan, const char* name, int number) {
    PlanArea area = PlanArea::of(*region_, name);
    area.mailboxes = region_->bytes("mailboxes");
    if (pacer_) pacer_->add_plan(number, plan, setup_.shape);
    return std::make_unique<Executor>(plan, machine_, area, number);
  };
  train_executor_ = bind(setup_.fit.train, "train", 0);
  saving_executor_ = bind(setup_.train_and_save, "save", 1);
  if (setup_.fit.evaluate) eval_executor_ = bind(*setup_.fit.evaluate, "evaluate", 2);
  saver_ = std::make_unique<Saver>(setup_, *store_, world_);
  if (leads() && !setup_.config.log.samples.empty())
    sampling_ = std::make_unique<Sampling>(setup_, device_->host_ops(), *store_);
  if (resume_from_) saver_->loaded(state_.step);
}

// Initial values are a function of (seed, name, element), so parameters can be filled in any order by any thread of any rank.
void Run::initialize() {
  constexpr std::uint64_t kAtATime = 1 << 16;
  std::vector<std::pair<int, const model::Parameter*>> own;
  for (int s = 0, next = 0; s < setup_.shape.store_unit_count(); ++s) {
    if (!store_->has(s)) continue;
    for (const model::Parameter& p : setup_.shape.store_units[static_cast<std::size_t>(s)].parameters) {
      if (next++ % world_.local_size() == world_.local_rank()) own.emplace_back(s, &p);
    }
  }
  ThreadPool pool(device_->info().threads);
  pool.parallel_for(static_cast<std::int64_t>(own.size()), [&](std::int64_t item, int) {
    const auto& [s, p] = own[static_cast<std::size_t>(item)];
    std::vector<float> values(std::min(p->elements(), kAtATime));
    for (std::uint64_t first = 0; first < p->elements(); first += kAtATime) {
      const std::span<float> part = std::span(values).first(std::min(kAtATime, p->elements() - first));
      model::initialize_parameter(setup_.architecture, *p, setup_.config.train.seed, first, part);
      (void)store_->write_master(s, p->offset + first, part);
    }
  });
}

void Run::load_start() {
  const config::Config& c = setup_.config;
  const bool from_files = resume_from_.has_value() || c.model.init == config::Init::pretrained;
  if (!from_files) {
    initialize();
  } else if (world_.local_rank() == 0) {
    if (resume_from_) {
      (void)io::load_checkpoint(*resume_from_, setup_.shape, *store_);
    } else {
      io::load_model(c.model.hf, setup_.shape, *store_);
    }
  }
  state_.data_fingerprint = train_data_->fingerprint();
  state_.spikes.trim(setup_.spikes);
  if (!state_.has_scaler || !setup_.loss_scaling.dynamic) state_.scaler = optim::first_state(setup_.loss_scaling);
  if (world_.local_rank() == 0) {
    for (int s = 0; s < setup_.shape.store_unit_count(); ++s) store_->set_version(s, state_.updates);
  }
  summary_.first_step = state_.step;
  world_.barrier();
  if (!setup_.hyper.groups.empty()) {  // once every value is there, and before anything is updated
    if (world_.local_rank() == 0) optim::copy_frozen(*store_, setup_.shape, setup_.hyper.groups);
    world_.barrier();
  }
  fill_residents(setup_.fit.train, machine_);
}

}  // namespace spipe::exec
