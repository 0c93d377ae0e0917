// Plans of several ranks, replicas and hosts, broken on purpose: the verifier names the task.
#include <algorithm>
#include <catch2/catch.hpp>

#include "pipeline_support.h"
#include "spipe/base/error.h"

using namespace spipe;
using namespace spipe::plan;
using namespace spipe::plan::testing;

namespace {

struct Case {
  model::ModelShape shape;
  Plan plan;
};

// Eight layers over four ranks of two hosts, tied.
Case pipeline(
    const std::function<void(PipelineInput&)>& change = [](PipelineInput&) {}, const char* schedule = "spipe") {
  Case c{small_shape({.layers = 8, .tied = true}), {}};
  PipelineInput input{.shape = &c.shape, .ranks = 4, .host_of_rank = {0, 0, 1, 1}, .micro_batches = 4};
  input.backward_cuts = every(1, c.shape.unit_count());
  change(input);
  c.plan = make_schedule(schedule, input);
  const auto violation = verify(c.plan, c.shape);
  INFO((violation ? violation->message : ""));
  REQUIRE(!violation);
  return c;
}

void one_host(PipelineInput& input) { input.host_of_rank = {0, 0, 0, 0}; }

void replicated(PipelineInput& input) {
  input.replicas = 2;
  input.sum_groups = 4;
}

void expect(const Case& c, int invariant, std::uint32_t task, const std::string& words, const Limits& limits = {}) {
  const auto violation = verify(c.plan, c.shape, limits);
  REQUIRE(violation);
  INFO(violation->message);
  CHECK(violation->invariant == invariant);
  CHECK(violation->task == task);
  CHECK_THAT(violation->message, Catch::Contains(words));
}

std::uint32_t first(const Plan& plan, TaskKind kind) {
  return find_task(plan, [&](const Task& task) { return task.kind == kind; });
}

// The buffer of this kind that a task uses.
std::uint32_t buffer_of(Plan& plan, std::uint32_t id, BufferKind kind) { return use_of(plan, id, kind).buffer; }

std::uint32_t reader_of(const Plan& plan, std::uint32_t buffer) {
  return find_task(plan, [&](const Task& task) {
    for (std::uint32_t i = 0; i < task.use_count; ++i) {
      const Use& use = plan.uses[task.first_use + i];
      if (use.buffer == buffer && use.access == Access::read) return true;
    }
    return false;
  });
}

}  // namespace

TEST_CASE("invariant 5: what is received was sent") {
  Case c = pipeline(one_host);
  const std::uint32_t send = first(c.plan, TaskKind::send);
  const std::uint32_t recv = reader_of(c.plan, buffer_of(c.plan, send, BufferKind::mailbox));
  Case missing = c;
  remove_task(missing.plan, send);
  expect(missing, 2, recv - 1, "holds nothing");
  // A mailbox that is filled a second time.
  insert_copy(c.plan, send, recv);
  expect(c, 5, recv, "fills the same mailbox");
}

TEST_CASE("invariant 5: what is sent is received") {
  Case c = pipeline(one_host, "mobius");
  const std::uint32_t send = first(c.plan, TaskKind::send);
  remove_task(c.plan, reader_of(c.plan, buffer_of(c.plan, send, BufferKind::mailbox)));
  expect(c, 5, send, "nobody reads");
}

TEST_CASE("invariant 5: a push has one pull, next to it, of the same bytes, at the rank it names") {
  const Case good = pipeline();
  const std::uint32_t push = first(good.plan, TaskKind::push);
  REQUIRE(good.plan.tasks[push + 1].kind == TaskKind::pull);
  Case c = good;
  remove_task(c.plan, push + 1);
  expect(c, 5, push, "nobody takes");
  c = good;
  c.plan.tasks[push].peer_rank = c.plan.tasks[push].rank;
  expect(c, 5, push + 1, "do not name each other");
  c = good;
  c.plan.tasks[push + 1].peer = push + 1;
  expect(c, 5, push + 1, "do not name each other");
  c = good;
  c.plan.tasks[push + 1].bytes += 4;
  expect(c, 5, push + 1, "bytes of a message");
  c = good;
  c.plan.buffers[buffer_of(c.plan, push, BufferKind::wire)].bytes += 256;
  expect(c, 5, push + 1, "bytes into");
  c = good;
  insert_copy(c.plan, push + 1, push + 2);
  expect(c, 5, push + 2, "takes a message that");
  c = good;
  drop_wait(c.plan, push + 1, [&] {
    const Task& pull = good.plan.tasks[push + 1];
    for (std::uint32_t i = 0; i < pull.wait_count; ++i) {
      if (good.plan.waits[pull.first_wait + i].task == push) return i;
    }
    return pull.wait_count + 0U;
  }());
  expect(c, 5, push + 1, "without waiting");
}

TEST_CASE("invariant 5: a pull far from its push may block the streams of both") {
  Case c = pipeline();
  // The second of two messages between the same ranks, taken first.
  std::vector<std::uint32_t> pushes;
  for (const Task& task : c.plan.tasks) {
    if (task.kind == TaskKind::push && task.rank == 1 && task.peer_rank == 2) pushes.push_back(task.id);
  }
  REQUIRE(pushes.size() > 1);
  swap_tasks(c.plan, pushes[0] + 1, pushes[1] + 1);
  const auto violation = verify(c.plan, c.shape);
  REQUIRE(violation);
  CHECK(violation->invariant == 5);
}

TEST_CASE("invariant 5: nothing waits for a rank of another host but a pull for its push") {
  const Case good = pipeline();
  const std::uint32_t task = find_task(good.plan, [](const Task& t) { return t.rank == 2 && t.kind == TaskKind::backward; });
  const std::uint32_t other = find_task(good.plan, [](const Task& t) { return t.rank == 1; });
  REQUIRE(other < task);
  Case c = good;
  add_wait(c.plan, task, {other, false});
  expect(c, 5, task, "of another host");
  c = good;
  add_wait(c.plan, task, {other, true});
  expect(c, 5, task, "of another host");
  // The same wait inside a host is only superfluous.
  Case near = pipeline(one_host);
  add_wait(near.plan, task, {find_task(near.plan, [](const Task& t) { return t.rank == 1; }), false});
  CHECK(!verify(near.plan, near.shape));
}

TEST_CASE("invariant 5: a rank reaches only its own device and its own host") {
  const Case good = pipeline();
  const std::uint32_t recv = first(good.plan, TaskKind::recv);
  Case c = good;
  c.plan.tasks[recv].rank = static_cast<std::uint16_t>((c.plan.tasks[recv].rank + 1) % 4);
  expect(c, 5, recv, "memory of another");
  c = good;
  Buffer& mailbox = c.plan.buffers[buffer_of(c.plan, recv, BufferKind::mailbox)];
  mailbox.host = static_cast<std::uint16_t>(1 - mailbox.host);
  const auto violation = verify(c.plan, c.shape);
  REQUIRE(violation);
  CHECK(violation->invariant == 5);
  CHECK_THAT(violation->message, Catch::Contains("memory of another host"));
}

TEST_CASE("invariant 5: a receiver waits for the sender") {
  Case c = pipeline(one_host);
  const std::uint32_t recv = find_task(c.plan, [&](const Task& task) {
    if (task.kind != TaskKind::recv) return false;
    for (std::uint32_t i = 0; i < task.wait_count; ++i) {
      if (c.plan.tasks[c.plan.waits[task.first_wait + i].task].kind == TaskKind::send) return true;
    }
    return false;
  });
  const Task& task = c.plan.tasks[recv];
  for (std::uint32_t i = 0; i < task.wait_count; ++i) {
    const Wait& wait = c.plan.waits[task.first_wait + i];
    if (c.plan.tasks[wait.task].kind != TaskKind::send || wait.previous_step) continue;
    drop_wait(c.plan, recv, i);
    break;
  }
  expect(c, 5, recv, "without waiting for");
}

TEST_CASE("invariant 1: parameters come from the version the step began with, on every rank") {
  Case c = pipeline();
  // A fetch on another host than the unit's: without the push of this unit, and with another unit's parameters.
  const std::uint32_t push =
      find_task(c.plan, [](const Task& task) { return task.kind == TaskKind::push && task.micro_batch < 0 && task.unit > 0; });
  const std::uint32_t other = find_task(c.plan, [&](const Task& task) {
    return task.kind == TaskKind::push && task.micro_batch < 0 && task.unit > 0 && task.unit != c.plan.tasks[push].unit &&
           task.rank == c.plan.tasks[push].rank && task.id > push;
  });
  Case wrong = c;
  use_of(wrong.plan, push, BufferKind::store_compute).buffer = buffer_of(c.plan, other, BufferKind::store_compute);
  expect(wrong, 1, push, "another unit");
  // Sent after the update.
  const std::uint32_t commit = find_task(c.plan, TaskKind::commit, c.plan.tasks[push].unit);
  move_task(c.plan, push, commit);
  move_task(c.plan, push, commit);
  const auto violation = verify(c.plan, c.shape);
  REQUIRE(violation);
  CHECK((violation->invariant == 1 || violation->invariant == 5));
}

TEST_CASE("invariant 2: one backward a micro-batch over all ranks") {
  Case c = pipeline();
  const std::uint32_t backward = find_task(c.plan, TaskKind::backward, 3, 1);
  Case twice = c;
  insert_copy(twice.plan, backward, backward + 1);
  expect(twice, 2, backward + 1, "second time");
  remove_task(c.plan, backward);
  CHECK(verify(c.plan, c.shape)->invariant == 2);
}

TEST_CASE("invariant 2: a boundary gradient of another micro-batch is not taken") {
  Case c = pipeline(one_host);
  const std::uint32_t backward = find_task(c.plan, TaskKind::backward, 3, 1),
                      other = find_task(c.plan, TaskKind::backward, 3, 2);
  use_of(c.plan, backward, BufferKind::boundary_gradient).buffer = buffer_of(c.plan, other, BufferKind::boundary_gradient);
  expect(c, 2, backward, "gradient of its output");
}

TEST_CASE("invariant 3: a unit is updated, committed and offloaded once, on its home") {
  const Case good = pipeline(one_host);
  for (const TaskKind kind : {TaskKind::offload, TaskKind::optimize, TaskKind::commit}) {
    const std::uint32_t id = find_task(good.plan, kind, 3);
    Case c = good;
    insert_copy(c.plan, id, id + 1);
    expect(c, 3, id + 1, "second time");
    if (kind == TaskKind::offload) continue;
    c = good;
    c.plan.tasks[id].rank = static_cast<std::uint16_t>((c.plan.tasks[id].rank + 1) % 4);
    expect(c, 3, id, "home of its unit");
  }
}

TEST_CASE("invariant 3: groups of all replicas are added whole and in order") {
  for (const bool apart : {false, true}) {
    const Case good = pipeline([&](PipelineInput& input) {
      replicated(input);
      if (!apart) one_host(input);
    });
    std::vector<std::uint32_t> reduces;
    for (const Task& task : good.plan.tasks) {
      if (task.kind == TaskKind::reduce && task.unit == 3) reduces.push_back(task.id);
    }
    REQUIRE(reduces.size() == 3);
    Case c = good;
    swap_tasks(c.plan, reduces[1], reduces[2]);
    expect(c, 3, reduces[1], "whole and in order");
    c = good;
    remove_task(c.plan, reduces[2]);
    const auto violation = verify(c.plan, c.shape);
    REQUIRE(violation);
    CHECK(violation->invariant == 3);
  }
}

TEST_CASE("invariant 3: the tied matrix's parts keep their order when one comes from another rank") {
  Case c = pipeline();
  const std::uint32_t offload = find_task(c.plan, TaskKind::offload, c.shape.tied_unit);
  std::swap(c.plan.uses[c.plan.tasks[offload].first_use], c.plan.uses[c.plan.tasks[offload].first_use + 1]);
  expect(c, 3, offload, "takes as part 1");
}

TEST_CASE("invariant 3: every host's norm has every host's share") {
  const Case good = pipeline();
  const std::uint32_t push =
      find_task(good.plan, [](const Task& task) { return task.kind == TaskKind::push && task.unit < 0; });
  Case c = good;
  --c.plan.tasks[push].use_count;  // the wire goes: it was last
  expect(c, 5, push, "on no wire");
  c = good;
  ++c.plan.tasks[push].first_use;  // one gradient less
  --c.plan.tasks[push].use_count;
  expect(c, 3, push, "leaves out the gradient");
  const std::uint32_t norm = last_task(good.plan, TaskKind::norm);
  c = good;
  c.plan.tasks[norm].rank = static_cast<std::uint16_t>(c.plan.tasks[first(good.plan, TaskKind::norm)].rank);
  CHECK(verify(c.plan, c.shape));
  c = good;
  remove_task(c.plan, norm);
  CHECK(verify(c.plan, c.shape)->invariant == 3);
}

TEST_CASE("invariant 4: no rank fetches or sends parameters before the commit of the step before") {
  for (const bool apart : {false, true}) {
    const Case good = pipeline([&](PipelineInput& input) {
      if (!apart) one_host(input);
    });
    int fetches = 0, pushes = 0;
    for (const Task& task : good.plan.tasks) {
      if (task.kind != TaskKind::fetch && task.kind != TaskKind::push) continue;
      for (std::uint32_t i = 0; i < task.wait_count; ++i) {
        const Wait& wait = good.plan.waits[task.first_wait + i];
        if (good.plan.tasks[wait.task].kind != TaskKind::commit) continue;
        Case c = good;
        drop_wait(c.plan, task.id, i);
        expect(c, 4, task.id, "of the step before");
        ++(task.kind == TaskKind::fetch ? fetches : pushes);
      }
    }
    CHECK(fetches + pushes >= good.shape.unit_count());
    CHECK((pushes > 0) == apart);
  }
}

TEST_CASE("invariant 6: two mailboxes in use never share bytes") {
  for (const bool apart : {false, true}) {
    Case c = pipeline([&](PipelineInput& input) {
      if (!apart) one_host(input);
    });
    std::vector<std::uint32_t> sends;
    for (const Task& task : c.plan.tasks) {
      if (task.kind == TaskKind::send && c.plan.host_of_rank[task.rank] == 0) sends.push_back(task.id);
    }
    Buffer& second = c.plan.buffers[buffer_of(c.plan, sends[1], BufferKind::mailbox)];
    second.offset = c.plan.buffers[buffer_of(c.plan, sends[0], BufferKind::mailbox)].offset;
    const auto violation = verify(c.plan, c.shape);
    REQUIRE(violation);
    CHECK(violation->invariant == 6);
    CHECK_THAT(violation->message, Catch::Contains("mailbox"));
    second.offset = c.plan.mailbox_bytes[0];
    expect(c, 6, sends[1], "outside the planned");
  }
}

TEST_CASE("invariant 6: the store, mailboxes and all parking of a host fit it") {
  Case c = pipeline([](PipelineInput& input) {
    one_host(input);
    input.park = true;
    input.micro_batches = 8;
    input.forward_cuts = {0, 4};
  });
  REQUIRE(c.plan.parking_bytes > 0);
  const std::uint64_t all = 1000 + c.plan.mailbox_bytes[0] + 4 * c.plan.parking_bytes;
  CHECK(!verify(c.plan, c.shape, {.host_bytes = all, .store_bytes = {1000}}));
  expect(c, 6, 0, "on host 0", {.host_bytes = all - 1, .store_bytes = {1000}});
}

TEST_CASE("invariant 5: the topology is whole") {
  const Case good = pipeline();
  Case c = good;
  c.plan.host_of_rank.pop_back();
  expect(c, 5, 0, "has no host");
  c = good;
  c.plan.home_of_unit[3] = -1;
  expect(c, 5, 0, "has no home");
  c = good;
  c.plan.home_of_unit[3] = (c.plan.home_of_unit[3] + 2) % 4;
  expect(c, 5, 0, "not its home");
}

TEST_CASE("a pipeline with a task or a wait taken away is refused") {
  const std::uint32_t seed = std::random_device{}();
  int refused = 0;
  for (std::uint32_t round = 0; round < 60; ++round) {
    Dice dice(seed + round);
    RandomPipeline random;
    roll(dice, random);
    Plan plan;
    try {
      plan = make_schedule(random.schedule, random.input);
    } catch (const Error&) {
      continue;
    }
    INFO("seed " << seed + round << ": " << random.text());
    for (int trial = 0; trial < 8; ++trial) {
      const auto id = static_cast<std::uint32_t>(dice.from(0, static_cast<int>(plan.tasks.size()) - 1));
      const Task& task = plan.tasks[id];
      INFO("task " << id << " (" << task_kind_name(task.kind) << ")");
      // Schedules that do not fuse the last stage have forwards whose results nobody reads.
      if (task.kind != TaskKind::forward || (task.flags & kRecompute) != 0) {
        Plan broken = plan;
        remove_task(broken, id);
        REQUIRE(verify(broken, random.shape));
      }
      if (task.wait_count == 0) continue;
      Plan broken = plan;
      drop_wait(broken, id, static_cast<std::uint32_t>(dice.from(0, task.wait_count - 1)));
      REQUIRE(verify(broken, random.shape));
      ++refused;
    }
  }
  CHECK(refused > 100);
}
