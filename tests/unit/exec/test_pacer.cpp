// The paced device in virtual time: what the simulator predicts for the same tasks is what tasks take. No test depends on how
// fast this machine is.
#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <string>

#include "../plan/support.h"
#include "spipe/exec/pacer.h"
#include "spipe/plan/schedules.h"
#include "spipe/plan/simulator.h"
#include "virtual_time.h"

using namespace spipe;
using namespace spipe::plan;
using spipe::exec::Pacer;
using spipe::exec::testing::VirtualTime;

namespace {

constexpr double kSecond = 1e9;

std::int64_t ns(double seconds) { return static_cast<std::int64_t>(kSecond * seconds); }

// The ranks of a host, each with its pacer, as processes would have them.
class Host {
 public:
  Host(const Hardware& hardware, const Plan& plan, const model::ModelShape& shape, const SimulationOptions& options = {})
      : plan_(plan), memory_((Pacer::shared_bytes(plan.ranks) + 7) / 8) {
    for (int r = 0; r < plan.ranks; ++r) {
      const double speed = options.rank_speed.empty() ? 1 : options.rank_speed[static_cast<std::size_t>(r)];
      pacers_.push_back(std::make_unique<Pacer>(
          hardware, r, plan.ranks, std::as_writable_bytes(std::span(memory_)), options.jitter, options.seed, speed,
          Pacer::Clock{[this] { return time.now(); }, [this](std::int64_t until) { time.sleep_until(until + oversleep); }}));
      pacers_.back()->add_plan(0, plan, shape);
    }
  }
  // Real work of so many seconds, then the rest; in a body of `time`.
  void run(std::uint32_t id, double work = 0, std::uint64_t step = 1) {
    const std::int64_t begin = time.now();
    time.sleep_until(begin + ns(work));
    pacers_[plan_.tasks[id].rank]->pace(0, plan_.tasks[id], begin, step);
  }
  Pacer& pacer(int rank) { return *pacers_[static_cast<std::size_t>(rank)]; }

  VirtualTime time;
  std::int64_t oversleep = 0;

 private:
  const Plan& plan_;
  std::vector<std::uint64_t> memory_;
  std::vector<std::unique_ptr<Pacer>> pacers_;
};

// Tasks that begin at given times, one after the other or all at once, real work before them.
struct Timed {
  int rank = 0;
  TaskKind kind = TaskKind::fetch;
  double bytes = 0;
  double begin = 0, work = 0;
};

class Flows {
 public:
  Flows(Hardware hardware, int ranks, std::vector<Timed> list)
      : hardware_(std::move(hardware)), shape_(plan::testing::small_shape({})), list_(std::move(list)) {
    plan_.ranks = ranks;
    plan_.host_of_rank.assign(static_cast<std::size_t>(ranks), 0);
    plan_.options.barrier_between_steps = true;
    plan_.compute_units = shape_.unit_count();
    plan_.store_units = shape_.store_unit_count();
    for (const Timed& timed : list_) add(timed.rank, timed.kind, timed.bytes);
  }

  // Seconds from each task's begin to its end.
  std::vector<double> paced() {
    host_ = std::make_unique<Host>(hardware_, plan_, shape_);
    host_->oversleep = oversleep;
    std::vector<double> taken(list_.size());
    std::vector<std::function<void()>> bodies;
    for (std::uint32_t t = 0; t < list_.size(); ++t) {
      bodies.push_back([this, t, &taken] {
        host_->time.sleep_until(ns(list_[t].begin));
        host_->run(t, list_[t].work);
        taken[t] = static_cast<double>(host_->time.now() - ns(list_[t].begin)) / kSecond;
      });
    }
    host_->time.run(bodies);
    return taken;
  }
  // Each in a stream of its own; the begins are computations of ranks that do nothing else.
  std::vector<double> simulated() const {
    Plan plan = plan_;
    std::vector<TaskCost> costs = task_costs(plan, shape_, hardware_);
    for (std::size_t t = 0; t < list_.size(); ++t) {
      plan.tasks[t].stream = static_cast<StreamKind>(1 + stream_of(t));
      Task delay;
      delay.id = static_cast<std::uint32_t>(plan.tasks.size());
      delay.rank = static_cast<std::uint16_t>(plan.ranks++);
      plan.host_of_rank.push_back(1);
      plan.tasks[t].first_wait = static_cast<std::uint32_t>(plan.waits.size());
      plan.tasks[t].wait_count = 1;
      plan.waits.push_back({delay.id, false});
      plan.tasks.push_back(delay);
      costs.push_back({.seconds = list_[t].begin});
    }
    const Simulation s = simulate(plan, costs, hardware_);
    std::vector<double> taken;
    for (std::size_t t = 0; t < list_.size(); ++t) taken.push_back(s.tasks[t].end - s.tasks[t].begin);
    return taken;
  }
  void check() {
    const std::vector<double> real = paced(), predicted = simulated();
    for (std::size_t t = 0; t < real.size(); ++t) {
      INFO("task " << t);
      CHECK(real[t] == Approx(std::max(predicted[t], list_[t].work)).epsilon(1e-6).margin(1e-8));
    }
  }
  [[nodiscard]] Pacer& pacer(int rank) { return host_->pacer(rank); }
  std::int64_t oversleep = 0;

 private:
  void add(int rank, TaskKind kind, double bytes) {
    Task task;
    task.id = static_cast<std::uint32_t>(plan_.tasks.size());
    task.kind = kind;
    task.stream = kind == TaskKind::forward ? StreamKind::compute : StreamKind::h2d;
    task.rank = static_cast<std::uint16_t>(rank);
    task.unit = 1;
    task.bytes = static_cast<std::uint64_t>(bytes);
    plan_.tasks.push_back(task);
  }
  [[nodiscard]] int stream_of(std::size_t t) const {
    return static_cast<int>(std::count_if(list_.begin(), list_.begin() + static_cast<std::ptrdiff_t>(t),
                                          [&](const Timed& other) { return other.rank == list_[t].rank; }));
  }

  Hardware hardware_;
  model::ModelShape shape_;
  std::vector<Timed> list_;
  Plan plan_;
  std::unique_ptr<Host> host_;
};

constexpr TaskKind kIn = TaskKind::fetch, kOut = TaskKind::offload;

}  // namespace

TEST_CASE("tasks that share a link take as long as the simulator says") {
  const Hardware link{.h2d_bytes_per_s = 1e9};
  SECTION("alone") {
    Flows flows(link, 1, {{0, kIn, 1e8}});
    flows.check();
    CHECK(flows.paced()[0] == Approx(0.1));
  }
  SECTION("two equal ones take twice as long") {
    Flows flows(link, 1, {{0, kIn, 1e8}, {0, kIn, 1e8}});
    flows.check();
    CHECK(flows.paced()[0] == Approx(0.2));
    CHECK(flows.paced()[1] == Approx(0.2));
  }
  SECTION("staggered") {
    Flows flows(link, 1, {{0, kIn, 1e8}, {0, kIn, 1e8, 0.05}});
    flows.check();
    CHECK(flows.paced()[0] == Approx(0.15));
    CHECK(flows.paced()[1] == Approx(0.15));
  }
  SECTION("unequal") { Flows(link, 1, {{0, kIn, 1e8}, {0, kIn, 3e7}, {0, kIn, 1e6, 0.02}}).check(); }
  SECTION("a short message does not queue behind a long copy") {
    Flows flows(link, 1, {{0, kIn, 1e8}, {0, kIn, 1e5, 0.0205}});
    flows.check();
    CHECK(flows.paced()[1] == Approx(0.0002));
  }
  SECTION("directions, and the links of other ranks, are apart") {
    Flows flows({.h2d_bytes_per_s = 1e9, .d2h_bytes_per_s = 1e9, .ranks_per_link = 2}, 4,
                {{0, kIn, 1e8}, {0, kOut, 1e8}, {1, kIn, 1e8}, {2, kIn, 1e8}});
    flows.check();
    CHECK(flows.paced() == std::vector<double>{0.2, 0.1, 0.2, 0.1});
  }
  SECTION("latency comes first") {
    Flows({.h2d_bytes_per_s = 1e9, .link_latency_s = 1e-3}, 1, {{0, kIn, 1e6}, {0, kIn, 3e6}}).check();
  }
}

TEST_CASE("updates, checkpoints and memory are shared as in the simulator") {
  const Hardware hardware{.h2d_bytes_per_s = 1e9,
                          .d2h_bytes_per_s = 8e8,
                          .update_params_per_s = 1e6,
                          .update_params_per_s_rank = 4e5,
                          .dram_bytes_per_s = 3e9,
                          .storage_bytes_per_s = 5e8};
  Flows flows(hardware, 4,
              {{0, TaskKind::optimize, 4e7},
               {1, TaskKind::optimize, 4e7},
               {2, TaskKind::optimize, 4e7, 0.002},
               {3, TaskKind::save, 2e7, 0.001},
               {3, kIn, 3e7},
               {2, kOut, 3e7, 0.01}});
  flows.check();
}

TEST_CASE("any flows on any hardware") {
  for (std::uint32_t seed = 1; seed <= 300; ++seed) {
    INFO("seed " << seed);
    plan::testing::Dice dice(seed);
    Hardware hardware;
    const auto maybe = [&](double rate) { return dice.from(0, 2) == 0 ? 0 : rate * dice.from(1, 8); };
    hardware.h2d_bytes_per_s = maybe(2e8);
    hardware.d2h_bytes_per_s = maybe(2e8);
    hardware.ranks_per_link = dice.from(1, 4);
    hardware.link_latency_s = maybe(1e-4);
    hardware.update_params_per_s = maybe(1e5);
    hardware.update_params_per_s_rank = maybe(5e4);
    hardware.dram_bytes_per_s = maybe(4e8);
    hardware.storage_bytes_per_s = maybe(1e8);
    const int ranks = dice.from(1, 5);
    std::vector<Timed> list;
    std::vector<int> streams(static_cast<std::size_t>(ranks));
    for (int t = dice.from(1, 9); t > 0; --t) {
      constexpr TaskKind kKinds[] = {kIn, kOut, TaskKind::optimize, TaskKind::save, TaskKind::recv, TaskKind::send};
      const int rank = dice.from(0, ranks - 1);
      if (++streams[static_cast<std::size_t>(rank)] >= kStreamCount) continue;
      list.push_back({rank, kKinds[dice.from(0, 5)], 1e5 * dice.from(1, 200), 1e-3 * dice.from(0, 40)});
    }
    Flows(hardware, ranks, list).check();
  }
}

TEST_CASE("real work is part of a task's time") {
  const Hardware hardware{.h2d_bytes_per_s = 1e9, .d2h_bytes_per_s = 1e9};
  SECTION("alone") { Flows(hardware, 1, {{0, kIn, 1e8, 0.01, 0.06}}).check(); }
  SECTION("a late one gets its share back from who is still there") {
    // The end of the short copy out moves the state past the begin of the second copy in.
    Flows(hardware, 1, {{0, kIn, 1e8}, {0, kOut, 1e7, 0.005}, {0, kIn, 1e8, 0.01, 0.02}}).check();
    Flows(hardware, 1, {{0, kIn, 1e8}, {0, kOut, 1e7, 0.005}, {0, kIn, 2e6, 0.01, 0.02}}).check();
  }
  SECTION("what others took until they ended is gone") {
    Flows flows(hardware, 1, {{0, kIn, 1e8}, {0, kIn, 6e7, 0.05, 0.07}});
    CHECK(flows.paced() == std::vector<double>{0.1, 0.11});
  }
}

TEST_CASE("threads that wake late do not slow each other down") {
  const Hardware hardware{.h2d_bytes_per_s = 1e9};
  Flows flows(hardware, 1, {{0, kIn, 1e8}, {0, kIn, 2e7}, {0, kIn, 3e7, 0.01}});
  flows.oversleep = 60'000;
  const std::vector<double> real = flows.paced(), predicted = flows.simulated();
  for (std::size_t t = 0; t < real.size(); ++t) {
    INFO("task " << t);
    CHECK(real[t] >= predicted[t] - 1e-9);
    CHECK(real[t] <= predicted[t] + 2 * 60e-6 + 1e-9);  // it begins late and ends late
  }
}

TEST_CASE("more tasks at once than there are places") {
  Flows flows({.h2d_bytes_per_s = 1e9}, 1, std::vector<Timed>(40, {0, kIn, 1e7}));
  const std::vector<double> taken = flows.paced();
  CHECK(*std::max_element(taken.begin(), taken.end()) == Approx(0.4).epsilon(0.02));
  CHECK(flows.pacer(0).account().tasks == 40);
}

TEST_CASE("an overrun is real work that ends too late") {
  Hardware hardware;
  hardware.h2d_bytes_per_s = 1e9;
  const auto account = [&](double seconds, double work) {
    Flows flows(hardware, 1, {{0, kIn, 1e9 * seconds, 0, work}});
    const double taken = flows.paced()[0];
    CHECK(taken == Approx(std::max(seconds, work)));
    return flows.pacer(0).account();
  };
  CHECK(account(1e-3, 0.9e-3).late_seconds == 0);
  CHECK(account(1e-3, 1.1e-3).overruns == 0);  // waking up takes as long
  CHECK(account(1e-3, 1.1e-3).late_seconds == Approx(1e-4));
  CHECK(account(1e-3, 1.3e-3).overruns == 1);
  CHECK(account(1e-3, 1.3e-3).worst_overrun_seconds == Approx(3e-4));
  CHECK(account(0.1, 0.1015).overruns == 0);  // 1.5 %
  CHECK(account(0.1, 0.103).overruns == 1);
  CHECK(account(0.1, 0.103).tasks == 1);
}

TEST_CASE("tasks that take no time on the hardware are not counted") {
  Flows flows({}, 1, {{0, TaskKind::norm, 0, 0, 0.01}, {0, kIn, 1e8, 0, 0.01}});
  CHECK(flows.paced() == std::vector<double>{0.01, 0.01});
  CHECK(flows.pacer(0).account().tasks == 0);
}

TEST_CASE("computations have the simulator's jitter and their rank's speed") {
  Hardware hardware;
  const model::ModelShape shape = plan::testing::small_shape({});
  hardware.unit_times.assign(shape.units.size(), {.forward_s = 0.01, .backward_s = 0.02});
  Plan plan;
  plan.ranks = 2;
  plan.host_of_rank = {0, 0};
  plan.compute_units = shape.unit_count();
  plan.store_units = shape.store_unit_count();
  for (std::uint32_t t = 0; t < 2; ++t) {
    Task task;
    task.id = t;
    task.rank = static_cast<std::uint16_t>(t);
    task.unit = 1;
    plan.tasks.push_back(task);
  }
  Host host(hardware, plan, shape, {.rank_speed = {1, 0.25}, .jitter = 0.3, .seed = 5});
  std::map<std::pair<std::uint64_t, std::uint32_t>, double> taken;
  host.time.run({[&] {
    for (std::uint64_t step = 0; step < 3; ++step) {
      for (const Task& task : plan.tasks) {
        const std::int64_t begin = host.time.now();
        host.run(task.id, 0.001, step);
        taken[{step, task.id}] = static_cast<double>(host.time.now() - begin) / kSecond;
      }
    }
  }});
  for (const auto& [key, seconds] : taken) {
    const double factor = jitter_factor(0.3, 5, key.first, key.second);
    CHECK(factor == Approx(1).margin(0.3));
    CHECK(seconds == Approx(0.01 * factor * (key.second == 0 ? 1 : 4)).margin(2e-9));
  }
  CHECK(taken[{0, 0}] != taken[{1, 0}]);
  CHECK(jitter_factor(0.3, 5, 1, 0) != jitter_factor(0.3, 6, 1, 0));
  CHECK(host.pacer(0).account().real_seconds == Approx(0.003));
  CHECK(host.pacer(1).account().paced_seconds == Approx(taken[{0, 1}] + taken[{1, 1}] + taken[{2, 1}]));
}

namespace {

// A step of all ranks, as executors run it: streams in program order, waits held.
std::vector<SimulatedTask> run_step(Host& host, const Plan& plan) {
  std::vector<SimulatedTask> times(plan.tasks.size());
  std::vector<bool> done(plan.tasks.size());
  std::map<std::pair<int, StreamKind>, std::vector<std::uint32_t>> streams;
  for (const Task& task : plan.tasks) streams[{task.rank, task.stream}].push_back(task.id);
  std::vector<std::function<void()>> bodies;
  for (const auto& [key, ids] : streams) {
    bodies.push_back([&plan, &times, &done, &host, &ids = ids] {
      for (const std::uint32_t id : ids) {
        const Task& task = plan.tasks[id];
        host.time.wait([&] {
          for (std::uint32_t w = 0; w < task.wait_count; ++w) {
            const Wait& wait = plan.waits[task.first_wait + w];
            if (!wait.previous_step && !done[wait.task]) return false;
          }
          return true;
        });
        times[id].begin = static_cast<double>(host.time.now()) / kSecond;
        host.run(id);
        times[id].end = static_cast<double>(host.time.now()) / kSecond;
        done[id] = true;
      }
    });
  }
  host.time.run(bodies);
  return times;
}

}  // namespace

TEST_CASE("whole plans of several ranks take as long as simulated, task by task") {
  const model::ModelShape shape = plan::testing::small_shape({.layers = 6});
  Hardware hardware{.name = "slow",
                    .ranks_per_host = 4,
                    .matmul_flops = 2e9,
                    .memory_bytes_per_s = 1e9,
                    .h2d_bytes_per_s = 2e7,
                    .d2h_bytes_per_s = 3e7,
                    .ranks_per_link = 2,
                    .link_latency_s = 2e-5,
                    .update_params_per_s = 4e6,
                    .update_params_per_s_rank = 1.5e6,
                    .dram_bytes_per_s = 6e7};
  const SimulationOptions options{.rank_speed = {1, 1, 0.5, 1}, .jitter = 0.1, .seed = 3};
  for (const std::string schedule : {"spipe", "1f1b", "roundpipe"}) {
    INFO(schedule);
    PipelineInput input;
    input.shape = &shape;
    input.ranks = 4;
    input.micro_batches = 6;
    input.backward_cuts = {0, 2, 4, 6};
    input.barrier_between_steps = true;
    if (schedule != "1f1b") input.forward_cuts = {0, 3, 6};
    const Plan plan = make_schedule(schedule, input);
    const auto step = [&](const Hardware& on) {
      const Simulation predicted = simulate(plan, shape, on, options);
      Host host(on, plan, shape, options);
      const std::vector<SimulatedTask> real = run_step(host, plan);
      double end = 0, worst = 0;
      for (const Task& task : plan.tasks) {
        end = std::max(end, real[task.id].end);
        worst = std::max({worst, std::abs(real[task.id].begin - predicted.tasks[task.id].begin),
                          std::abs(real[task.id].end - predicted.tasks[task.id].end)});
      }
      // The comparison sees sharing and slow ranks.
      CHECK(predicted.shared_seconds > 0);
      CHECK(simulate(plan, shape, on).step_seconds < 0.99 * predicted.step_seconds);
      CHECK(host.pacer(0).account().overruns == 0);
      return std::array{end, predicted.step_seconds, worst};
    };
    hardware.message_kernel_bytes_per_s = 0;
    const auto [end, predicted, worst] = step(hardware);
    CHECK(end == Approx(predicted).epsilon(1e-5));
    CHECK(worst < 1e-5 * predicted);
    // Messages that slow computations: which of two that begin at the same moment pays is left open.
    hardware.message_kernel_bytes_per_s = 2e7;
    const auto [taxed_end, taxed_predicted, ignored] = step(hardware);
    CHECK(taxed_end == Approx(taxed_predicted).epsilon(0.01));
    CHECK(taxed_end > 1.02 * end);
  }
}

TEST_CASE("in real time no task ends before its modelled time") {
  Hardware hardware{.h2d_bytes_per_s = 1e9};
  const model::ModelShape shape = plan::testing::small_shape({});
  Plan plan;
  plan.compute_units = shape.unit_count();
  plan.store_units = shape.store_unit_count();
  Task task;
  task.kind = kIn;
  task.stream = StreamKind::h2d;
  task.bytes = 3'000'000;
  plan.tasks.push_back(task);
  std::vector<std::uint64_t> memory((Pacer::shared_bytes(1) + 7) / 8);
  Pacer pacer(hardware, 0, 1, std::as_writable_bytes(std::span(memory)), 0, 0, 1);
  pacer.add_plan(0, plan, shape);
  const auto begin = std::chrono::steady_clock::now();
  pacer.pace(0, plan.tasks[0], std::chrono::duration_cast<std::chrono::nanoseconds>(begin.time_since_epoch()).count(), 1);
  CHECK(std::chrono::steady_clock::now() - begin >= std::chrono::microseconds(3000));
  CHECK(pacer.account().tasks == 1);
}
