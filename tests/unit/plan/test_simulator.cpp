// The simulator on plans made by hand whose times are known, and on plans of the schedule.
#include <catch2/catch.hpp>
#include <numeric>

#include "spipe/plan/simulator.h"
#include "support.h"

using namespace spipe;
using namespace spipe::plan;

namespace {

// Tasks and waits one by one; costs beside them.
class HandMade {
 public:
  explicit HandMade(int ranks, int hosts = 1) {
    plan_.ranks = ranks;
    plan_.host_of_rank.clear();
    for (int r = 0; r < ranks; ++r) plan_.host_of_rank.push_back(r * hosts / ranks);
  }
  std::uint32_t task(int rank, TaskKind kind, StreamKind stream, TaskCost cost, const std::vector<Wait>& waits = {}) {
    Task t;
    t.id = static_cast<std::uint32_t>(plan_.tasks.size());
    t.kind = kind;
    t.stream = stream;
    t.rank = static_cast<std::uint16_t>(rank);
    t.first_wait = static_cast<std::uint32_t>(plan_.waits.size());
    t.wait_count = static_cast<std::uint16_t>(waits.size());
    plan_.waits.insert(plan_.waits.end(), waits.begin(), waits.end());
    plan_.tasks.push_back(t);
    costs_.push_back(cost);
    return t.id;
  }
  std::uint32_t forward(int rank, double seconds, const std::vector<Wait>& waits = {}) {
    return task(rank, TaskKind::forward, StreamKind::compute, {.seconds = seconds}, waits);
  }
  std::uint32_t fetch(int rank, double bytes, const std::vector<Wait>& waits = {}) {
    return task(rank, TaskKind::fetch, StreamKind::h2d, {.amount = bytes, .shared = SharedBy::link_in}, waits);
  }
  std::uint32_t update(int rank, double parameters, const std::vector<Wait>& waits = {}) {
    return task(rank, TaskKind::optimize, StreamKind::cpu, {.amount = parameters, .shared = SharedBy::update}, waits);
  }
  std::uint32_t push(int rank, int to, double bytes, const std::vector<Wait>& waits = {}) {
    const std::uint32_t id =
        task(rank, TaskKind::push, StreamKind::comm, {.amount = bytes, .shared = SharedBy::network}, waits);
    plan_.tasks[id].peer_rank = static_cast<std::uint16_t>(to);
    return id;
  }
  Plan& plan() { return plan_; }
  std::vector<TaskCost>& costs() { return costs_; }
  [[nodiscard]] Simulation run(const Hardware& hardware, const SimulationOptions& options = {}) const {
    return simulate(plan_, costs_, hardware, options);
  }

 private:
  Plan plan_;
  std::vector<TaskCost> costs_;
};

double seconds_of(const Simulation& s, TaskKind kind) {
  for (const PathShare& share : s.shares) {
    if (share.kind == kind) return share.seconds;
  }
  return 0;
}

}  // namespace

TEST_CASE("a chain: streams run in order, waits hold, the path adds up to the step") {
  HandMade made(1);
  const std::uint32_t f0 = made.fetch(0, 2);
  const std::uint32_t f1 = made.fetch(0, 4);
  const std::uint32_t c0 = made.forward(0, 1, {{f0}});
  const std::uint32_t c1 = made.forward(0, 3, {{f1}});
  made.plan().options.barrier_between_steps = true;
  const Simulation s = made.run({.h2d_bytes_per_s = 2});
  CHECK(s.tasks[f1].begin == Approx(1));
  CHECK(s.tasks[f1].end == Approx(3));
  CHECK(s.tasks[c0].begin == Approx(1));
  CHECK(s.tasks[c1].begin == Approx(3));
  CHECK(s.step_seconds == Approx(6));
  CHECK(seconds_of(s, TaskKind::fetch) == Approx(3));
  CHECK(seconds_of(s, TaskKind::forward) == Approx(3));
  CHECK(s.bubble == Approx(1.0 / 5));  // second 2 to 3 of 1 to 6
  CHECK(s.ranks[0].busy[static_cast<std::size_t>(StreamKind::h2d)] == Approx(3));
}

TEST_CASE("steady state: steps overlap as far as waits for the step before allow") {
  HandMade made(1);
  const std::uint32_t fetch = 0, forward = 1, update = 2;
  made.fetch(0, 1, {{update, true}});
  made.forward(0, 3, {{fetch}});
  made.update(0, 2, {{forward}});
  Hardware hardware{.h2d_bytes_per_s = 1, .update_params_per_s = 1};
  CHECK(made.run(hardware).step_seconds == Approx(6));
  // Without the wait for the update only the longest stream counts.
  HandMade loose(1);
  loose.fetch(0, 1);
  loose.forward(0, 3, {{fetch}});
  loose.update(0, 2, {{forward}});
  CHECK(loose.run(hardware).step_seconds == Approx(3));
  loose.plan().options.barrier_between_steps = true;
  const Simulation s = loose.run(hardware);
  CHECK(s.step_seconds == Approx(6));
  CHECK(s.exposed_optimizer_seconds == Approx(2));
}

TEST_CASE("ranks that share a link get fair shares of it while both use it") {
  HandMade made(2);
  const std::uint32_t a = made.fetch(0, 10);
  const std::uint32_t b = made.fetch(1, 4);
  made.plan().options.barrier_between_steps = true;
  const Simulation alone = made.run({.h2d_bytes_per_s = 1});
  CHECK(alone.tasks[a].end == Approx(10));
  CHECK(alone.tasks[b].end == Approx(4));
  const Simulation shared = made.run({.h2d_bytes_per_s = 1, .ranks_per_link = 2});
  CHECK(shared.tasks[b].end == Approx(8));   // half the rate
  CHECK(shared.tasks[a].end == Approx(14));  // 4 by then, the other 6 at the full rate
  CHECK(shared.shared_seconds == Approx(4));
}

TEST_CASE("messages share their rank's link with fetches, without queueing behind them") {
  HandMade made(1);
  const std::uint32_t fetch = made.fetch(0, 10);
  const std::uint32_t message = made.task(0, TaskKind::recv, StreamKind::recv, {.amount = 1, .shared = SharedBy::link_in});
  made.plan().options.barrier_between_steps = true;
  const Simulation s = made.run({.h2d_bytes_per_s = 1});
  CHECK(s.tasks[message].end == Approx(2));
  CHECK(s.tasks[fetch].end == Approx(11));
}

TEST_CASE("messages between hosts are posted: a late one does not hold up the next") {
  HandMade made(2, 2);
  const std::uint32_t late = made.forward(0, 5);
  const std::uint32_t first = made.push(0, 1, 1, {{late}});
  const std::uint32_t second = made.push(0, 1, 2);
  const Simulation s = made.run({.network_bytes_per_s = 1});
  CHECK(s.tasks[second].end - s.tasks[second].begin == Approx(2));
  CHECK(s.tasks[first].end > s.tasks[second].end);
  CHECK(s.step_seconds == Approx(5));
}

TEST_CASE("what a capped flow leaves goes to the others") {
  HandMade made(3);
  for (int r = 0; r < 3; ++r) made.update(r, 6);
  made.plan().options.barrier_between_steps = true;
  // Three at 1.5 of 6 (their own limit); of 3 they get 1 each.
  CHECK(made.run({.update_params_per_s = 6, .update_params_per_s_rank = 1.5}).step_seconds == Approx(4));
  CHECK(made.run({.update_params_per_s = 3, .update_params_per_s_rank = 1.5}).step_seconds == Approx(6));
  // Memory bandwidth of the host: rank 0 needs 4 bytes a parameter, the others 1; all rise together to 1 until it ends.
  HandMade bytes(3);
  const std::uint32_t heavy = bytes.update(0, 6);
  bytes.update(1, 6);
  const std::uint32_t long_one = bytes.update(2, 12);
  bytes.costs()[0].dram_bytes = 24;
  bytes.costs()[1].dram_bytes = 6;
  bytes.costs()[2].dram_bytes = 12;
  bytes.plan().options.barrier_between_steps = true;
  const Simulation s = bytes.run({.update_params_per_s_rank = 3, .dram_bytes_per_s = 6});
  CHECK(s.tasks[heavy].end == Approx(6));
  CHECK(s.tasks[long_one].end == Approx(8));
}

TEST_CASE("a host's network carries all its ranks, in each direction by itself") {
  HandMade made(4, 2);
  const std::uint32_t a = made.push(0, 2, 6), b = made.push(1, 3, 3), back = made.push(2, 0, 6);
  made.plan().options.barrier_between_steps = true;
  const Simulation s = made.run({.network_bytes_per_s = 1});
  CHECK(s.tasks[b].end == Approx(6));
  CHECK(s.tasks[a].end == Approx(9));
  CHECK(s.tasks[back].end == Approx(6));
}

TEST_CASE("messages copied by kernels slow the next computation of their rank") {
  HandMade made(1);
  const std::uint32_t c0 = made.forward(0, 1);
  made.task(0, TaskKind::send, StreamKind::d2h, {.device_tax = 0.5}, {{c0}});
  made.forward(0, 1);
  made.forward(0, 1);
  made.plan().options.barrier_between_steps = true;
  CHECK(made.run({}).step_seconds == Approx(3.5));
}

TEST_CASE("slow ranks and jitter change compute times only, the same way for the same seed") {
  HandMade made(2);
  made.forward(0, 1);
  made.forward(1, 1);
  made.fetch(0, 1);
  made.plan().options.barrier_between_steps = true;
  const Hardware hardware{.h2d_bytes_per_s = 1};
  CHECK(made.run(hardware, {.rank_speed = {1, 0.5}}).step_seconds == Approx(2));
  const SimulationOptions jitter{.jitter = 0.2, .seed = 7};
  const Simulation s = made.run(hardware, jitter);
  CHECK(s.tasks[0].end != s.tasks[1].end);
  CHECK(s.tasks[0].end == Approx(1).margin(0.2));
  CHECK(s.tasks[2].end == 1);
  CHECK(made.run(hardware, jitter).tasks[0].end == s.tasks[0].end);
  CHECK(made.run(hardware, {.jitter = 0.2, .seed = 8}).tasks[0].end != s.tasks[0].end);
}

TEST_CASE("a plan that waits for itself is an error, not a hang") {
  HandMade made(1);
  made.fetch(0, 1, {{1}});
  made.forward(0, 1, {{0}});
  CHECK_THROWS_WITH(made.run({}), Catch::Contains("task 0 (fetch) waits for ever"));
}

TEST_CASE("a streamed step: twice the same result, memory within the arena, the path as long as the step") {
  const model::ModelShape shape = plan::testing::small_shape({.layers = 8});
  ScheduleInput input;
  input.shape = &shape;
  const Plan plan = schedule_streaming(input, plan::testing::streamed(shape, 3, 2, 5, true));
  const Hardware hardware{.matmul_flops = 1e9,
                          .h2d_bytes_per_s = 1e7,
                          .d2h_bytes_per_s = 1e7,
                          .update_params_per_s = 1e6,
                          .dram_bytes_per_s = 2.5e7};
  const Simulation s = simulate(plan, shape, hardware), again = simulate(plan, shape, hardware);
  REQUIRE(s.tasks.size() == plan.tasks.size());
  CHECK(s.step_seconds == again.step_seconds);
  for (std::size_t t = 0; t < s.tasks.size(); ++t) {
    CHECK(s.tasks[t].begin == again.tasks[t].begin);
    CHECK(s.tasks[t].end == again.tasks[t].end);
  }
  CHECK(s.ranks[0].peak_bytes <= plan.arena_bytes);
  CHECK(s.ranks[0].peak_bytes > plan.arena_bytes / 2);
  CHECK(s.memory[0].back().bytes == 0);
  double path = 0, shares = 0;
  for (const PathPart& part : s.path) path += part.end - part.begin;
  for (const PathShare& share : s.shares) shares += share.seconds;
  CHECK(path == Approx(s.step_seconds).epsilon(1e-6));
  CHECK(shares == Approx(s.step_seconds).epsilon(1e-6));
  // Tasks of a stream follow each other, and nothing begins before what it waits for.
  std::vector<double> stream_end(kStreamCount);
  for (const Task& task : plan.tasks) {
    double& end = stream_end[static_cast<std::size_t>(task.stream)];
    CHECK(s.tasks[task.id].begin >= end);
    end = s.tasks[task.id].end;
    for (std::uint32_t w = 0; w < task.wait_count; ++w) {
      const Wait& wait = plan.waits[task.first_wait + w];
      if (!wait.previous_step) CHECK(s.tasks[task.id].begin >= s.tasks[wait.task].end);
    }
  }
  // All the work of the step, at full rate: a bound from below.
  double compute = 0;
  for (const model::ComputeUnit& unit : shape.units) compute += unit.forward_flops + unit.backward_flops;
  CHECK(s.step_seconds > 5 * compute / hardware.matmul_flops);
}
