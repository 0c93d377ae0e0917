#include "spipe/exec/executor.h"

#include <fmt/core.h>

#include <chrono>
#include <cmath>
#include <cstring>

#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/exec/pacer.h"
#include "spipe/plan/timeline.h"
#include "task_runner.h"

namespace spipe::exec {

using plan::StreamKind;
using plan::Task;
using plan::TaskKind;

namespace {

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void StreamTimes::on_task(const Task& task, std::int64_t begin_ns, std::int64_t end_ns, std::uint64_t) {
  const auto stream = static_cast<std::size_t>(task.stream);
  nanoseconds_[stream].fetch_add(end_ns - begin_ns, std::memory_order_relaxed);
  bytes_[stream].fetch_add(task.bytes, std::memory_order_relaxed);
}

double StreamTimes::busy_seconds(StreamKind stream) const {
  return 1e-9 * static_cast<double>(nanoseconds_[static_cast<std::size_t>(stream)].load(std::memory_order_relaxed));
}

std::uint64_t StreamTimes::bytes(StreamKind stream) const {
  return bytes_[static_cast<std::size_t>(stream)].load(std::memory_order_relaxed);
}

void StreamTimes::reset() {
  for (auto& value : nanoseconds_) value.store(0, std::memory_order_relaxed);
  for (auto& value : bytes_) value.store(0, std::memory_order_relaxed);
}

namespace {

constexpr std::uint32_t kErrorPollMilliseconds = 20;

// A plan area of one rank's own.
struct OwnArea {
  OwnArea(const plan::Plan& plan)
      : done(plan.tasks.size()),
        seen(1),
        losses(static_cast<std::size_t>(plan.options.micro_batches)),
        verdicts(kVerdicts),
        unit_norms(kVerdicts * static_cast<std::size_t>(plan.store_units)) {}
  std::vector<Counter> done, seen;
  std::vector<double> losses;
  std::vector<Verdict> verdicts;
  std::vector<double> unit_norms;
  [[nodiscard]] PlanArea area() { return {done, seen, losses, verdicts, unit_norms, {}}; }
};

}  // namespace

struct Executor::Impl {
  const plan::Plan& plan;
  const Machine& machine;
  const std::uint64_t number;
  const int rank;
  std::unique_ptr<OwnArea> own;
  PlanArea area;
  TaskRunner runner;
  device::ErrorCollector errors;
  std::vector<std::uint8_t> waited_for;  // tasks somebody waits for
  std::vector<std::uint32_t> tasks;      // of this rank, in program order
  std::vector<std::uint32_t> messages;   // pushes and pulls among them
  std::uint32_t norm = plan::kNoPeer;    // the norm task of this host
  std::array<std::unique_ptr<device::Stream>, plan::kStreamCount> streams;
  std::unique_ptr<device::Stream> message_times;
  std::array<std::unique_ptr<device::Stream>, 2> paced_network;
  std::vector<Counter> arrived;                   // with a pacer: per task, the last run whose message has really come
  std::array<Counter, plan::kStreamCount> ended;  // the last run whose tasks of a stream have all ended
  std::array<Step, 2> steps;                      // by run
  std::uint64_t begun = 0, finished = 0;

  Impl(const plan::Plan& p, const Machine& m, const PlanArea& given, int n)
      : plan(p),
        machine(m),
        number(static_cast<std::uint64_t>(n)),
        rank(rank_of(m)),
        own(given.done.empty() ? std::make_unique<OwnArea>(p) : nullptr),
        area(own ? own->area() : given),
        runner(p, m, area),
        waited_for(p.tasks.size(), 0) {
    const int ranks = machine.world == nullptr ? 1 : machine.world->size();
    SPIPE_CHECK(plan.ranks == ranks, fmt::format("a plan of {} ranks on {}", plan.ranks, ranks));
    SPIPE_CHECK(area.done.size() == plan.tasks.size(), "the area belongs to another plan");
    for (const plan::Wait& wait : plan.waits) waited_for[wait.task] = 1;
    for (const Task& task : plan.tasks) {
      const bool same_host = host_of(task.rank) == host_of(rank);
      if (task.kind == TaskKind::norm && same_host) norm = task.id;
      if (task.rank != rank) continue;
      tasks.push_back(task.id);
      if (is_message(task)) messages.push_back(task.id);
      auto& stream = streams[static_cast<std::size_t>(task.stream)];
      if (!stream) stream = machine.device->make_stream(plan::stream_name(task.stream), errors);
    }
    if (norm != plan::kNoPeer) waited_for[norm] = 1;
  }

  ~Impl() {
    message_times.reset();
    for (auto& stream : paced_network) stream.reset();
    for (auto& stream : streams) stream.reset();  // streams join before what they use goes
  }

  [[nodiscard]] int host_of(int of_rank) const { return plan.host_of_rank[static_cast<std::size_t>(of_rank)]; }
  static bool is_message(const Task& task) { return task.kind == TaskKind::push || task.kind == TaskKind::pull; }

  [[nodiscard]] std::vector<comm::After> after(const Task& task, std::uint64_t run) {
    std::vector<comm::After> list;
    for (std::uint32_t i = 0; i < task.wait_count; ++i) {
      const plan::Wait& wait = plan.waits[task.first_wait + i];
      // A pull's wait for its push is the message itself.
      if (host_of(plan.tasks[wait.task].rank) != host_of(rank)) continue;
      const std::uint64_t value = wait.previous_step ? run - 1 : run;
      if (value > 0) list.push_back({&area.done[wait.task], value});
    }
    // The loss is scaled by what this host's verdict on the step before says; parameters may come from a host that knew it
    // earlier.
    if (task.kind == TaskKind::loss && norm != plan::kNoPeer && run > 1) list.push_back({&area.done[norm], run - 1});
    return list;
  }

  void enqueue(const Task& task, Step& step) {
    device::Stream& stream = *streams[static_cast<std::size_t>(task.stream)];
    const bool packs = is_message(task) && !runner.bound().task(task.id).norm_items.empty();
    if (is_message(task) && !packs) {
      post(task, step, runner.bound().task(task.id).message, after(task, step.run));
      observe_message(task, step);
      return;
    }
    for (const comm::After& wait : after(task, step.run)) stream.wait(wait.counter, wait.value);
    if (packs) {
      stream.run([this, &task, &step](StreamHandle*) { post(task, step, runner.pack_norm(task, step), {}); });
      return;
    }
    stream.run([this, &task, &step](StreamHandle* handle) { execute(task, step, handle); });
    if (waited_for[task.id] != 0) stream.signal(&area.done[task.id], step.run);
  }

  // Messages of a plan meet by the push's id, those of one push by their order.
  void post(const Task& task, const Step& step, std::span<std::byte> bytes, std::vector<comm::After> after) {
    comm::Message message;
    message.peer = task.peer_rank;
    message.tag = number << 32U | task.peer;
    message.bytes = bytes;
    if (const int unit = runner.bound().task(task.id).message_unit; unit >= 0) {
      message.where = [this, unit] { return static_cast<std::byte*>(machine.store->slab(unit, store::Plane::compute).data); };
    }
    message.after = std::move(after);
    message.done = &area.done[task.id];
    message.done_value = step.run;
    if (task.kind == TaskKind::push) {
      machine.world->send(message);
      return;
    }
    if (machine.pacer != nullptr) message.done = pace_message(task, step);
    machine.world->receive(message);
  }

  // What arrives is held back until its time on the paced network is over: parameters and gradients one after the other, what
  // belongs to micro-batches beside them. Returns the counter of the real arrival.
  Counter* pace_message(const Task& task, const Step& step) {
    if (arrived.empty()) arrived = std::vector<Counter>(plan.tasks.size());
    auto& stream = paced_network[task.micro_batch >= 0 ? 1 : 0];
    if (!stream) stream = machine.device->make_stream("network", errors);
    stream->wait(&arrived[task.id], step.run);
    stream->run([this, &task, of_step = step.request.step](StreamHandle*) {
      machine.pacer->pace(static_cast<int>(number), plan.tasks[task.peer], now_ns(), of_step);
    });
    stream->signal(&area.done[task.id], step.run);
    return &arrived[task.id];
  }

  // Observers see a message from when it may travel to when it is over; of several at once, in program order.
  void observe_message(const Task& task, const Step& step) {
    if (!message_times) message_times = machine.device->make_stream("messages", errors);
    for (const comm::After& wait : after(task, step.run)) message_times->wait(wait.counter, wait.value);
    const auto begin = std::make_shared<std::int64_t>(0);
    message_times->run([begin](StreamHandle*) { *begin = now_ns(); });
    message_times->wait(&area.done[task.id], step.run);
    message_times->run([this, &task, begin, number = shown_step(step)](StreamHandle*) {
      for (plan::TaskObserver* observer : machine.observers) observer->on_task(task, *begin, now_ns(), number);
    });
  }

  [[nodiscard]] std::uint64_t shown_step(const Step& step) const {
    return plan.options.evaluate ? static_cast<std::uint64_t>(plan::kNoStep) : step.request.step;
  }

  void execute(const Task& task, Step& step, StreamHandle* handle) {
    const std::int64_t begin = now_ns();
    runner.run(task, step, handle);
    if (machine.pacer != nullptr) machine.pacer->pace(static_cast<int>(number), task, begin, step.request.step);
    const std::int64_t end = now_ns();
    for (plan::TaskObserver* observer : machine.observers) observer->on_task(task, begin, end, shown_step(step));
  }

  void begin(const StepRequest& request) {
    SPIPE_CHECK(begun - finished < 2, "two steps at most are on their way");
    Step& step = steps[++begun % 2];
    step.request = request;
    step.run = begun;
    step.chained = begun - finished == 2;
    step.nonfinite_master = 0;
    step.taken_back = 0;
    step.diagnosis = {};
    for (const std::uint32_t id : tasks) enqueue(plan.tasks[id], step);
    for (std::size_t s = 0; s < streams.size(); ++s) {
      if (streams[s]) streams[s]->signal(&ended[s], step.run);
    }
  }

  // Until the counter says that `run` is over, or a task of this rank has failed.
  void wait(const Counter& counter, std::uint64_t run) {
    while (!counter.reached(run) && !errors.failed()) counter.wait_for(run, kErrorPollMilliseconds);
    if (!errors.failed()) return;
    for (auto& stream : streams) {
      if (stream) stream->drain();
    }
    errors.rethrow();
  }

  StepResult finish() {
    SPIPE_CHECK(finished < begun, "a step is begun before it is finished");
    const std::uint64_t run = ++finished;
    Step& step = steps[run % 2];
    for (std::size_t s = 0; s < streams.size(); ++s) {
      if (streams[s]) wait(ended[s], run);
    }
    for (const std::uint32_t id : messages) wait(area.done[id], run);
    if (message_times && begun == run) message_times->drain();
    StepResult result;
    if (norm != plan::kNoPeer) {
      wait(area.done[norm], run);
      result.verdict = runner.verdict(run);
      const std::span<double> norms = area.unit_norms_of(run);
      result.unit_norms.assign(norms.begin(), norms.end());
    } else {
      result.verdict.loss_sum = gather_losses();
    }
    const auto self = static_cast<std::size_t>(machine.world == nullptr ? 0 : machine.world->local_rank());
    area.seen[self].signal(run);
    result.nonfinite_master = step.nonfinite_master != 0;
    result.taken_back = step.taken_back;
    if (step.request.diagnose) result.first_nonfinite = gather_diagnosis(step.diagnosis);
    return result;
  }

  // An evaluation has no norm task: every rank tells what its heads found.
  double gather_losses() {
    std::vector<double> losses(area.losses.begin(), area.losses.end());
    if (machine.world != nullptr) {
      struct Found {
        std::int64_t micro_batch = 0;
        double loss = 0;
      };
      std::vector<Found> found;
      for (const std::uint32_t id : tasks) {
        const Task& task = plan.tasks[id];
        if (task.kind != TaskKind::result) continue;
        found.push_back({task.micro_batch, area.losses[static_cast<std::size_t>(task.micro_batch)]});
      }
      for (const auto& bytes : machine.world->all_gather(std::as_bytes(std::span(found)))) {
        for (std::size_t at = 0; at < bytes.size(); at += sizeof(Found)) {
          Found other;
          std::memcpy(&other, bytes.data() + at, sizeof(Found));
          losses[static_cast<std::size_t>(other.micro_batch)] = other.loss;
        }
      }
    }
    double sum = 0;
    for (const double loss : losses) sum += loss;
    return sum;
  }

  // The earliest finding of all ranks.
  std::string gather_diagnosis(const Diagnosis& diagnosis) {
    std::uint32_t first = diagnosis.first_task();
    std::string text = diagnosis.text();
    if (machine.world == nullptr) return text;
    std::string told(sizeof(first), '\0');
    std::memcpy(told.data(), &first, sizeof(first));
    told += text;
    for (const auto& bytes : machine.world->all_gather(std::as_bytes(std::span(told)))) {
      std::uint32_t task = 0;
      std::memcpy(&task, bytes.data(), sizeof(task));
      if (bytes.size() == sizeof(task) || (task >= first && !text.empty())) continue;
      first = task;
      text.assign(reinterpret_cast<const char*>(bytes.data()) + sizeof(task), bytes.size() - sizeof(task));
    }
    return text;
  }
};

Executor::Executor(const plan::Plan& plan, const Machine& machine, PlanArea area, int number)
    : impl_(std::make_unique<Impl>(plan, machine, area, number)) {}
Executor::~Executor() = default;

bool Executor::needs_input(int micro_batch) const { return impl_->runner.bound().reads_input(micro_batch); }

std::int32_t* Executor::tokens(int micro_batch) {
  return const_cast<std::int32_t*>(impl_->runner.bound().input(micro_batch, impl_->begun + 1));
}

std::int32_t* Executor::targets(int micro_batch) { return tokens(micro_batch) + impl_->machine.shape->tokens_per_micro(); }

const float* Executor::token_losses(int micro_batch) const {
  const auto tokens = static_cast<std::size_t>(impl_->machine.shape->tokens_per_micro());
  return impl_->runner.bound().staging().losses.data() + static_cast<std::size_t>(micro_batch) * tokens;
}

void Executor::begin(const StepRequest& request) { impl_->begin(request); }
StepResult Executor::finish() { return impl_->finish(); }

std::uint64_t executor_host_bytes(const plan::Plan& plan, const model::ModelShape& shape, int host) {
  const auto tokens = static_cast<std::uint64_t>(shape.tokens_per_micro());
  const auto micro_batches = static_cast<std::uint64_t>(plan.options.micro_batches);
  std::uint64_t ranks = 0, tasks = 0, parts = 0;
  for (const int of_rank : plan.host_of_rank) ranks += of_rank == host ? 1 : 0;
  for (const Task& task : plan.tasks) {
    if (plan.host_of_rank[task.rank] != host) continue;
    ++tasks;
    if (task.kind == TaskKind::push && task.unit < 0 && task.micro_batch < 0) parts += 2 * task.bytes;
  }
  const std::uint64_t staging = micro_batches * tokens * (2 * 2 * sizeof(std::int32_t) + sizeof(float));
  const std::uint64_t per_rank = staging + plan.tasks.size() * (sizeof(std::uint32_t) + 1);
  return ranks * per_rank + tasks * sizeof(BoundTask) + parts + PlanArea::bytes(plan, static_cast<int>(ranks));
}

}  // namespace spipe::exec
