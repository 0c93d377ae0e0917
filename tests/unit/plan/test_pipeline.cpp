// What the schedules of several ranks do: ideal times, who runs what, what moves and where it waits.
#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <set>

#include "pipeline_support.h"
#include "spipe/base/error.h"
#include "spipe/plan/simulator.h"
#include "src/plan/assignment.h"

using namespace spipe;
using namespace spipe::plan;
using namespace spipe::plan::testing;

namespace {

// A model of equal units without embedding and head, cut into equal stages.
Assignment equal_stages(int units, int forward_stages, int backward_stages) {
  Assignment assignment;
  for (int f = 0; f < forward_stages; ++f) {
    assignment.forward.push_back({f * units / forward_stages, (f + 1) * units / forward_stages, 0});
  }
  for (int b = 0; b < backward_stages; ++b) {
    assignment.backward.push_back({b * units / backward_stages, (b + 1) * units / backward_stages, 0});
  }
  return assignment;
}

struct Times {
  double total = 0, bubble = 0;  // bubble: idle share of all ranks until the last visit ends
};

// A unit's backward (with its recompute) takes three times as long as its forward.
Times times_of(const Schedule& schedule, Assignment assignment, int ranks, int micro_batches) {
  schedule.assign(assignment, ranks);
  const StageSeconds seconds = [&](bool backward, int stage) {
    const Stage& own = (backward ? assignment.backward : assignment.forward)[static_cast<std::size_t>(stage)];
    return static_cast<double>(own.end - own.begin) * (backward ? 3 : 1);
  };
  std::vector<int> list;
  for (int m = 0; m < micro_batches; ++m) list.push_back(m);
  Times times;
  double work = 0;
  for (const auto& visits : schedule.order(assignment, list, ranks, seconds)) {
    for (const Visit& visit : visits) {
      times.total = std::max(times.total, visit.start + visit.seconds);
      work += visit.seconds;
    }
  }
  times.bubble = 1 - work / (times.total * ranks);
  return times;
}

struct Made {
  model::ModelShape shape;
  PipelineInput input;
  Plan plan;
};

Made make(const std::string& schedule, const SmallModel& small, const std::function<void(PipelineInput&)>& change) {
  Made made;
  made.shape = small_shape(small);
  made.input.ranks = 4;
  made.input.micro_batches = 8;
  made.input.backward_cuts = every(1, made.shape.unit_count());
  made.input.shape = &made.shape;
  change(made.input);
  made.plan = make_schedule(schedule, made.input);
  made.input.shape = nullptr;
  const auto violation = verify(made.plan, made.shape);
  INFO((violation ? violation->message : ""));
  REQUIRE(!violation);
  return made;
}

std::size_t count(const Plan& plan, TaskKind kind, int rank = -1) {
  return static_cast<std::size_t>(std::count_if(plan.tasks.begin(), plan.tasks.end(), [&](const Task& task) {
    return task.kind == kind && (rank < 0 || task.rank == rank);
  }));
}

std::set<int> ranks_of(const Plan& plan, TaskKind kind, int unit) {
  std::set<int> ranks;
  for (const Task& task : plan.tasks) {
    if (task.kind == kind && task.unit == unit && (task.flags & kRecompute) == 0) ranks.insert(task.rank);
  }
  return ranks;
}

}  // namespace

TEST_CASE("spipe has the published ideal times") {
  // N = 4, two forward and six backward stages a rank: only the ring's fill and drain are idle.
  const Assignment fine = equal_stages(24, 8, 24), coarse = equal_stages(24, 8, 8);
  CHECK(times_of(spipe_schedule(), fine, 4, 8).total == Approx(8 * (2 * 3 + 6 * 3) + 3 * 3));
  CHECK(times_of(spipe_schedule(), fine, 4, 8).bubble == Approx(0.045).margin(0.0005));
  CHECK(times_of(spipe_schedule(), fine, 4, 4).bubble == Approx(0.086).margin(0.0005));
  CHECK(times_of(spipe_schedule(), coarse, 4, 4).total == Approx(41 * 3));
  CHECK(times_of(spipe_schedule(), coarse, 4, 8).bubble == Approx(0.123).margin(0.0005));
  const Assignment wide = equal_stages(96, 32, 96);
  CHECK(times_of(spipe_schedule(), wide, 16, 32).bubble == Approx(0.055).margin(0.0005));
}

TEST_CASE("mobius and 1f1b have the published ideal times") {
  const Assignment stages = equal_stages(24, 8, 8);
  CHECK(times_of(mobius_schedule(), stages, 4, 4).total == Approx(44 * 3));
  CHECK(times_of(mobius_schedule(), stages, 4, 8).bubble == Approx(0.158).margin(0.0005));
  CHECK(times_of(one_forward_one_backward_schedule(), stages, 4, 8).total == Approx(76 * 3));
}

TEST_CASE("with links that are fast enough, a plan keeps the ideal time of its schedule") {
  // Six equal layers a rank, M = 2 N; transfers take a small part of a visit, embedding and head no time.
  const auto bubble = [](const char* schedule) {
    const model::ModelShape shape = small_shape({.layers = 24});
    PipelineInput input{.shape = &shape, .ranks = 4, .micro_batches = 8};
    const bool decoupled = std::string(schedule) == "spipe";
    input.backward_cuts = every(decoupled ? 1 : 3, 24);
    for (std::size_t i = 1; i < input.backward_cuts.size(); ++i) ++input.backward_cuts[i];  // the embedding joins the first
    if (decoupled) input.forward_cuts = {0, 4, 7, 10, 13, 16, 19, 22};
    const Plan plan = make_schedule(schedule, input);
    REQUIRE(!verify(plan, shape));
    Hardware hardware{.ranks_per_host = 4};
    hardware.unit_times.assign(static_cast<std::size_t>(shape.unit_count()), {1, 2});
    hardware.unit_times.front() = hardware.unit_times.back() = {1e-6, 1e-6};
    hardware.h2d_bytes_per_s = hardware.d2h_bytes_per_s = static_cast<double>(shape.store_units[1].elements) * 4 / 0.2;
    return simulate(plan, shape, hardware).bubble;
  };
  CHECK(bubble("spipe") < 0.06);  // ideal: 0.045
  CHECK(bubble("mobius") > 0.11);
}

TEST_CASE("both passes of spipe go around the ring, equal to the published mapping") {
  // Eight units: embedding, six layers, head; the head has no forward of its own.
  const Made made = make("spipe", {.layers = 6}, [](PipelineInput& input) { input.forward_cuts = {0, 1, 3, 5}; });
  CHECK(ranks_of(made.plan, TaskKind::forward, 0) == std::set{0});
  CHECK(ranks_of(made.plan, TaskKind::forward, 2) == std::set{1});
  CHECK(ranks_of(made.plan, TaskKind::forward, 6) == std::set{3});
  CHECK(ranks_of(made.plan, TaskKind::loss, 7) == std::set{0});
  CHECK(ranks_of(made.plan, TaskKind::backward, 6) == std::set{1});
  CHECK(ranks_of(made.plan, TaskKind::backward, 4) == std::set{3});
  CHECK(ranks_of(made.plan, TaskKind::backward, 0) == std::set{3});
  CHECK(made.plan.home_of_unit == std::vector<int>{3, 2, 1, 0, 3, 2, 1, 0});
}

TEST_CASE("mobius keeps the last forward stage for its backward, and sends no checkpoints") {
  const Made made = make("mobius", {.layers = 14}, [](PipelineInput& input) { input.backward_cuts = every(2, 16); });
  // Two stages a rank: units of a rank's second one are fetched once, the others for each pass.
  std::map<int, int> fetches, expected;
  for (const Task& task : made.plan.tasks) {
    if (task.kind == TaskKind::fetch) ++fetches[task.unit];
  }
  for (int u = 0; u < 16; ++u) expected[u] = u < 8 ? 2 : 1;
  CHECK((fetches == expected));
  CHECK(count(made.plan, TaskKind::send) == std::size_t{2 * 7 * 8});
}

TEST_CASE("what stays on a rank is not sent") {
  // One rank runs everything: nothing to send, whatever the schedule.
  for (const std::string& name : schedule_names()) {
    const Made made = make(name, {.layers = 5, .tied = true}, [&](PipelineInput& input) {
      input.ranks = 1;
      if (name == "gpipe") input.backward_cuts = {0};
    });
    for (const TaskKind kind : {TaskKind::send, TaskKind::recv, TaskKind::push, TaskKind::pull}) {
      CHECK(count(made.plan, kind) == 0);
    }
  }
  // Two ranks, both neighbours the same: backward stage j of 4 goes on where forward stages ended. The boundary into the last
  // layer is made and needed by rank 1.
  const Made made = make("spipe", {.layers = 2}, [](PipelineInput& input) {
    input.ranks = 2;
    input.forward_cuts = {0, 1, 2};
    input.backward_cuts = {0, 1, 2, 3};
  });
  for (const Task& task : made.plan.tasks) {
    if (task.kind != TaskKind::recv) continue;
    for (std::uint32_t i = 0; i < task.use_count; ++i) {
      const Buffer& buffer = made.plan.buffers[made.plan.uses[task.first_use + i].buffer];
      const bool own = buffer.kind == BufferKind::boundary &&
                       ranks_of(made.plan, TaskKind::forward, buffer.unit - 1) == std::set<int>{task.rank};
      CHECK(!own);
    }
  }
}

TEST_CASE("ranks of one host exchange through mailboxes, hosts through messages only") {
  const auto two_hosts = [](PipelineInput& input) { input.host_of_rank = {0, 0, 1, 1}; };
  const Made one = make("spipe", {.layers = 6}, [](PipelineInput&) {}), two = make("spipe", {.layers = 6}, two_hosts);
  CHECK(count(one.plan, TaskKind::push) == 0);
  CHECK(one.plan.mailbox_bytes.size() == 1);
  CHECK(one.plan.mailbox_bytes[0] > 0);
  CHECK(count(two.plan, TaskKind::push) > 0);
  CHECK(count(two.plan, TaskKind::push) == count(two.plan, TaskKind::pull));
  CHECK(two.plan.mailbox_bytes.size() == 2);
  CHECK(count(two.plan, TaskKind::norm) == 2);
  CHECK(count(two.plan, TaskKind::optimize) == count(one.plan, TaskKind::optimize));
  CHECK(plan_hash(one.plan) != plan_hash(two.plan));
}

TEST_CASE("a tied matrix adds the head's part at the embedding's home") {
  const Made made = make("spipe", {.layers = 5, .tied = true}, [](PipelineInput& input) { input.host_of_rank = {0, 1, 0, 1}; });
  const auto tied = static_cast<std::size_t>(made.shape.tied_unit);
  const int home = made.plan.home_of_unit[tied];
  CHECK(ranks_of(made.plan, TaskKind::backward, 0) == std::set{home});
  CHECK(ranks_of(made.plan, TaskKind::loss, made.shape.unit_count() - 1) != std::set{home});
  const std::uint32_t offload = find_task(made.plan, TaskKind::offload, made.shape.tied_unit);
  const Task& task = made.plan.tasks[offload];
  CHECK(task.rank == home);
  CHECK(made.plan.buffers[made.plan.uses[task.first_use].buffer].source == made.shape.unit_count() - 1);
  CHECK(made.plan.buffers[made.plan.uses[task.first_use + 1].buffer].source == 0);
}

TEST_CASE("replicas add their groups in order at every unit's home, and take turns as homes") {
  const Made made = make("mobius", {.layers = 6}, [](PipelineInput& input) {
    input.replicas = 2;
    input.sum_groups = 4;
    input.backward_cuts = {0, 4};
  });
  const std::uint32_t offload = find_task(made.plan, TaskKind::offload, 2);
  std::vector<int> order;
  for (const Task& task : made.plan.tasks) {
    if (task.kind == TaskKind::reduce && task.unit == 2 && task.id < offload) order.push_back(task.micro_batch);
  }
  CHECK(order == std::vector<int>{3, 5, 7});
  CHECK(made.plan.home_of_unit == std::vector<int>{0, 2, 0, 2, 1, 3, 1, 3});
}

TEST_CASE("an evaluation has the homes of training and every micro-batch's losses") {
  for (const std::string& name : schedule_names()) {
    const auto change = [&](PipelineInput& input) {
      input.host_of_rank = {0, 0, 1, 1};
      input.sum_groups = 4;
      if (name == "gpipe") input.backward_cuts = {0, 2, 4, 6};
    };
    const Made training = make(name, {.layers = 6, .tied = true}, change);
    const Made evaluation = make(name, {.layers = 6, .tied = true}, [&](PipelineInput& input) {
      change(input);
      input.evaluate = true;
      input.micro_batches = 3;
    });
    CHECK(evaluation.plan.home_of_unit == training.plan.home_of_unit);
    CHECK(count(evaluation.plan, TaskKind::result) == 3);
    CHECK(count(evaluation.plan, TaskKind::backward) == 0);
  }
}

TEST_CASE("what a schedule cannot do is refused with a reason") {
  const model::ModelShape shape = small_shape({.layers = 6});
  const auto refusal = [&](const std::string& name, const std::function<void(PipelineInput&)>& change) {
    PipelineInput input{.shape = &shape, .ranks = 4, .micro_batches = 4, .backward_cuts = every(2, shape.unit_count())};
    change(input);
    try {
      static_cast<void>(make_schedule(name, input));
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("nothing");
  };
  using Catch::Contains;
  CHECK_THAT(refusal("pipedream", [](PipelineInput&) {}), Contains("unknown schedule") && Contains("streaming-dp"));
  CHECK_THAT(refusal("mobius", [](PipelineInput& input) { input.forward_cuts = {0, 1}; }), Contains("same stages"));
  CHECK_THAT(refusal("gpipe", [](PipelineInput& input) { input.ranks = 2; }), Contains("4 stages for 2 ranks"));
  CHECK_THAT(refusal("spipe", [](PipelineInput& input) { input.replicas = 3; }), Contains("cannot be divided"));
  CHECK_THAT(refusal("spipe", [](PipelineInput& input) { input.replicas = 2; }), Contains("cannot share 1 sum groups"));
  CHECK_THAT(refusal("streaming-dp", [](PipelineInput& input) { input.replicas = 2; }), Contains("one replica on every rank"));
  CHECK_THAT(refusal("spipe", [](PipelineInput& input) { input.backward_cuts = {0, 3, 3}; }), Contains("cut 2"));
}

TEST_CASE("updates that speculate come before the backward pass ends, and the plan is proved") {
  const model::ModelShape shape = small_shape({.layers = 6});
  PipelineInput input{.shape = &shape, .ranks = 4, .micro_batches = 4, .backward_cuts = every(2, shape.unit_count())};
  input.updates = update_ways(shape, {.speculate = 1});
  const Plan plan = make_schedule("spipe", input);
  CHECK_FALSE(verify(plan, shape));
  CHECK(find_task(plan, TaskKind::optimize, 6) < last_task(plan, TaskKind::backward));
  // Without its waits for the norm a commit decides too early.
  Plan broken = plan;
  const std::uint32_t commit = find_task(broken, TaskKind::commit, 6);
  drop_waits(broken, commit, [](const Wait&) { return true; });
  const auto violation = verify(broken, shape);
  REQUIRE(violation);
  CHECK(violation->invariant == 3);
}
