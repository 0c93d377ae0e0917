// The verifier accepts what the schedule makes and names the task that breaks an invariant in plans we break on purpose.
#include <catch2/catch.hpp>

#include "support.h"

using namespace spipe;
using namespace spipe::plan;
using namespace spipe::plan::testing;

namespace {

struct Case {
  model::ModelShape shape;
  Plan plan;
};

Case make(const SmallModel& small, const std::function<ScheduleOptions(const model::ModelShape&)>& options) {
  Case c{small_shape(small), {}};
  c.plan = schedule_streaming({.shape = &c.shape}, options(c.shape));
  const auto violation = verify(c.plan, c.shape);
  INFO((violation ? violation->message : ""));
  REQUIRE(!violation);
  return c;
}

// Three layers: units 0 embedding, 1..3 layers, 4 head.
Case streamed_case(bool recompute = true, bool tied = false) {
  return make({.tied = tied}, [&](const model::ModelShape& shape) { return streamed(shape, 2, 2, 3, recompute); });
}
Case in_place_case() {
  return make({}, [](const model::ModelShape&) { return in_place(3, false); });
}

void expect(const Case& c, int invariant, std::uint32_t task, const Limits& limits = {}) {
  const auto violation = verify(c.plan, c.shape, limits);
  REQUIRE(violation);
  INFO(violation->message);
  CHECK(violation->invariant == invariant);
  CHECK(violation->task == task);
  CHECK(violation->message.rfind("invariant " + std::to_string(invariant) + ": ", 0) == 0);
}

}  // namespace

TEST_CASE("invariant 1: a unit that is not fetched is not used") {
  Case c = streamed_case();
  remove_task(c.plan, find_task(c.plan, TaskKind::fetch, 1));
  expect(c, 1, find_task(c.plan, TaskKind::forward, 1));
}

TEST_CASE("invariant 1: a use waits for its fetch") {
  Case c = streamed_case();
  const std::uint32_t fetch = find_task(c.plan, TaskKind::fetch, 1), use = find_task(c.plan, TaskKind::forward, 1);
  drop_waits(c.plan, use, [&](const Wait& wait) { return wait.task == fetch; });
  expect(c, 1, use);
}

TEST_CASE("invariant 1: parameters of another unit do not count") {
  Case c = streamed_case();
  const std::uint32_t use = find_task(c.plan, TaskKind::forward, 1), other = find_task(c.plan, TaskKind::forward, 0);
  use_of(c.plan, use, BufferKind::parameters).buffer = use_of(c.plan, other, BufferKind::parameters).buffer;
  expect(c, 1, use);
}

TEST_CASE("invariant 1: parameters that were overwritten in between do not count") {
  Case c = streamed_case();
  const std::uint32_t use = find_task(c.plan, TaskKind::forward, 1, 2);
  const std::uint32_t thief = find_task(c.plan, TaskKind::forward, 1, 1);
  const std::uint32_t fetch = find_task(c.plan, TaskKind::fetch, 2);
  // A second fetch, of unit 2 into the buffer of unit 1, between two uses.
  insert_copy(c.plan, fetch, thief + 1);
  const std::uint32_t parameters = use_of(c.plan, thief, BufferKind::parameters).buffer;
  c.plan.uses.push_back({use_of(c.plan, fetch, BufferKind::store_compute).buffer, Access::read});
  c.plan.uses.push_back({parameters, Access::write});
  c.plan.tasks[thief + 1].first_use = static_cast<std::uint32_t>(c.plan.uses.size() - 2);
  c.plan.buffers[parameters].unit = 2;
  expect(c, 1, find_task(c.plan, TaskKind::fetch, 1));  // whose target is now said to be unit 2's
  c.plan.buffers[parameters].unit = 1;
  expect(c, 1, thief + 1);
  CHECK(use > thief);
}

TEST_CASE("invariant 1: nothing is fetched after its update in the same step") {
  Case c = streamed_case();
  const std::uint32_t fetch = find_task(c.plan, TaskKind::fetch, 1);
  const auto at = static_cast<std::uint32_t>(c.plan.tasks.size());
  insert_copy(c.plan, fetch, at);
  expect(c, 1, at);
}

TEST_CASE("invariant 1: nothing is used in place after its update in the same step") {
  Case c = in_place_case();
  const std::uint32_t commit = find_task(c.plan, TaskKind::commit, 1);
  insert_copy(c.plan, find_task(c.plan, TaskKind::forward, 1), commit + 1);
  expect(c, 1, commit + 1);
}

TEST_CASE("invariant 1: an update waits for the uses in place") {
  Case c = in_place_case();
  // Without the wait for the norm, nothing orders the update after the uses; the norm's own value is raced for as well.
  const std::uint32_t optimize = find_task(c.plan, TaskKind::optimize, 1);
  Use& norm = use_of(c.plan, optimize, BufferKind::norm_value);
  Use& parameters = use_of(c.plan, optimize, BufferKind::store_compute);
  std::swap(norm, parameters);  // the first operand is looked at first
  drop_waits(c.plan, optimize, [](const Wait& wait) { return !wait.previous_step; });
  expect(c, 1, optimize);
}

TEST_CASE("invariant 1: a unit is saved before its update") {
  Case c = make({}, [](const model::ModelShape& shape) {
    ScheduleOptions options = streamed(shape, 2, 2, 2, true);
    options.save = true;
    return options;
  });
  const std::uint32_t save = find_task(c.plan, TaskKind::save, 1);
  const std::uint32_t optimize = find_task(c.plan, TaskKind::optimize, 1);
  drop_waits(c.plan, optimize, [&](const Wait& wait) { return wait.task == save; });
  move_task(c.plan, save, optimize);  // the update is one place earlier now
  expect(c, 1, optimize);
}

TEST_CASE("invariant 1: an update waits for the save") {
  Case c = make({}, [](const model::ModelShape& shape) {
    ScheduleOptions options = streamed(shape, 2, 2, 2, true);
    options.save = true;
    return options;
  });
  const std::uint32_t save = find_task(c.plan, TaskKind::save, 1), optimize = find_task(c.plan, TaskKind::optimize, 1);
  drop_waits(c.plan, optimize, [&](const Wait& wait) { return wait.task == save; });
  expect(c, 1, optimize);
}

TEST_CASE("invariant 2: a backward happens once") {
  Case c = streamed_case();
  const std::uint32_t backward = find_task(c.plan, TaskKind::backward, 1, 1);
  insert_copy(c.plan, backward, backward + 1);
  expect(c, 2, backward + 1);
}

TEST_CASE("invariant 2: a missing backward is missed") {
  Case c = streamed_case();
  remove_task(c.plan, find_task(c.plan, TaskKind::backward, 1, 1));
  const auto violation = verify(c.plan, c.shape);
  REQUIRE(violation);
  CHECK(violation->invariant == 2);
  CHECK(violation->message == "invariant 2: no (backward " + c.shape.units[1].name + ", micro-batch 1) in the plan");
}

TEST_CASE("invariant 2: every micro-batch has its loss and its result") {
  for (const TaskKind kind : {TaskKind::loss, TaskKind::result}) {
    Case c = streamed_case();
    remove_task(c.plan, last_task(c.plan, kind));
    const auto violation = verify(c.plan, c.shape);
    REQUIRE(violation);
    CHECK(violation->invariant == 2);
  }
}

TEST_CASE("invariant 2: a backward needs a forward that saved") {
  Case c = streamed_case();
  const std::uint32_t again =
      find_task(c.plan, [](const Task& task) { return task.unit == 1 && (task.flags & kRecompute) != 0; });
  remove_task(c.plan, again);
  expect(c, 2, find_task(c.plan, TaskKind::backward, 1, 0));
}

TEST_CASE("invariant 2: a backward takes its own micro-batch's input") {
  Case c = streamed_case(false);
  const std::uint32_t first = find_task(c.plan, TaskKind::backward, 2, 0), second = find_task(c.plan, TaskKind::backward, 2, 1);
  use_of(c.plan, second, BufferKind::boundary).buffer = use_of(c.plan, first, BufferKind::boundary).buffer;
  expect(c, 2, second);
}

TEST_CASE("invariant 2: layers go backward from the last to the first") {
  Case c = in_place_case();
  const std::uint32_t upper = find_task(c.plan, TaskKind::backward, 2, 0), lower = find_task(c.plan, TaskKind::backward, 1, 0);
  swap_tasks(c.plan, upper, lower);
  expect(c, 2, upper);
}

TEST_CASE("invariant 2: a forward waits for its tokens") {
  Case c = in_place_case();
  const std::uint32_t input = find_task(c.plan, TaskKind::input, -1, 0), forward = find_task(c.plan, TaskKind::forward, 0, 0);
  // The tokens of micro-batch 1 were copied after; without them the first copy is waited for by nobody.
  drop_waits(c.plan, forward, [&](const Wait& wait) { return wait.task == input; });
  expect(c, 2, forward);
}

TEST_CASE("invariant 2: a result waits for its loss") {
  Case c = in_place_case();
  const std::uint32_t result = find_task(c.plan, TaskKind::result, -1, 1);
  drop_waits(c.plan, result, [](const Wait& wait) { return !wait.previous_step; });
  expect(c, 2, result);
}

TEST_CASE("invariant 2: what is unparked was parked") {
  Case c = make({.layers = 6}, [](const model::ModelShape& shape) {
    ScheduleOptions options = streamed(shape, 2, 2, 4, true);
    options.park = true;
    return options;
  });
  const std::uint32_t unpark = find_task(c.plan, [](const Task& task) { return task.kind == TaskKind::unpark; });
  Case raced = c;
  drop_waits(raced.plan, unpark, [](const Wait& wait) { return !wait.previous_step; });
  expect(raced, 2, unpark);
  const std::uint32_t parked = use_of(c.plan, unpark, BufferKind::parked).buffer;
  remove_task(c.plan, find_task(c.plan, [&](const Task& task) {
                return task.kind == TaskKind::park && use_of(c.plan, task.id, BufferKind::parked).buffer == parked;
              }));
  expect(c, 2, unpark - 1);
}

TEST_CASE("invariant 3: micro-batches add in ascending order") {
  Case c = streamed_case(false);
  const std::uint32_t first = find_task(c.plan, TaskKind::backward, 1, 0), second = find_task(c.plan, TaskKind::backward, 1, 1);
  swap_tasks(c.plan, first, second);
  expect(c, 3, first);
  // The same with flags and accesses that look right.
  std::swap(c.plan.tasks[first].flags, c.plan.tasks[second].flags);
  std::swap(use_of(c.plan, first, BufferKind::gradient).access, use_of(c.plan, second, BufferKind::gradient).access);
  expect(c, 3, first);
}

TEST_CASE("invariant 3: the first contribution does not add, the others do") {
  Case c = in_place_case();
  const std::uint32_t first = find_task(c.plan, TaskKind::backward, 1, 0), second = find_task(c.plan, TaskKind::backward, 1, 1);
  Case wrong = c;
  wrong.plan.tasks[first].flags |= kAccumulate;
  expect(wrong, 3, first);
  wrong = c;
  wrong.plan.tasks[second].flags &= static_cast<std::uint16_t>(~kAccumulate);
  expect(wrong, 3, second);
  use_of(wrong.plan, second, BufferKind::gradient).access = Access::write;
  expect(wrong, 3, second);
}

TEST_CASE("invariant 3: gradients are offloaded, updated and committed once") {
  for (const TaskKind kind : {TaskKind::offload, TaskKind::optimize, TaskKind::commit, TaskKind::norm}) {
    Case c = streamed_case();
    const std::uint32_t id = last_task(c.plan, kind);
    Case missing = c;
    remove_task(missing.plan, id);
    const auto violation = verify(missing.plan, missing.shape);
    REQUIRE(violation);
    CHECK(violation->invariant == 3);
    CHECK(violation->message.find(task_kind_name(kind)) != std::string::npos);
    insert_copy(c.plan, id, id + 1);
    expect(c, 3, id + 1);
  }
}

TEST_CASE("invariant 3: the commit comes after the update") {
  Case c = streamed_case();
  const std::uint32_t optimize = find_task(c.plan, TaskKind::optimize, 2);
  swap_tasks(c.plan, optimize, find_task(c.plan, TaskKind::commit, 2));
  expect(c, 3, optimize);
}

TEST_CASE("invariant 3: the commit waits for the update") {
  Case c = streamed_case();
  const std::uint32_t commit = find_task(c.plan, TaskKind::commit, 2);
  drop_waits(c.plan, commit, [](const Wait&) { return true; });
  expect(c, 3, commit);
}

TEST_CASE("invariant 3: the norm sees every gradient") {
  Case c = streamed_case();
  const std::uint32_t norm = last_task(c.plan, TaskKind::norm), offload = last_task(c.plan, TaskKind::offload);
  Case early = c;
  move_task(early.plan, norm, offload);
  expect(early, 3, offload);
  drop_waits(c.plan, norm, [](const Wait& wait) { return !wait.previous_step; });
  expect(c, 3, norm);
}

TEST_CASE("invariant 3: the norm's verdict sees every loss") {
  Case c = streamed_case();
  const std::uint32_t norm = last_task(c.plan, TaskKind::norm);
  use_of(c.plan, norm, BufferKind::host_result).buffer = use_of(c.plan, norm, BufferKind::norm_value).buffer;
  c.plan.tasks[norm].use_count -= 1;  // the value itself comes last
  expect(c, 3, norm);
}

TEST_CASE("invariant 3: sum groups are added whole and in order") {
  Case c = make({}, [](const model::ModelShape& shape) {
    ScheduleOptions options = streamed(shape, 2, 2, 6, true);
    options.sum_groups = 3;
    return options;
  });
  const std::uint32_t second = find_task(c.plan, TaskKind::reduce, 1, 3), third = find_task(c.plan, TaskKind::reduce, 1, 5);
  Case missing = c;
  remove_task(missing.plan, third);
  expect(missing, 3, find_task(missing.plan, TaskKind::offload, 1));
  missing = c;
  remove_task(missing.plan, second);
  expect(missing, 3, third - 1);
  Case early = c;
  move_task(early.plan, second, find_task(c.plan, TaskKind::backward, 1, 3));
  expect(early, 3, find_task(early.plan, TaskKind::reduce, 1, 3));
}

TEST_CASE("invariant 3: a tied matrix adds the head's gradient before the embedding's") {
  Case c = streamed_case(true, true);
  const std::uint32_t offload = find_task(c.plan, TaskKind::offload, c.shape.tied_unit);
  std::swap(c.plan.uses[c.plan.tasks[offload].first_use], c.plan.uses[c.plan.tasks[offload].first_use + 1]);
  expect(c, 3, offload);
}

TEST_CASE("invariant 3: an offload waits for the last backward") {
  Case c = streamed_case();
  const std::uint32_t offload = last_task(c.plan, TaskKind::offload);
  drop_waits(c.plan, offload, [](const Wait& wait) { return !wait.previous_step; });
  expect(c, 3, offload);
}

TEST_CASE("invariant 3: an evaluation updates nothing") {
  ScheduleOptions options;
  Case training = in_place_case();
  training.plan.options.evaluate = true;
  const auto violation = verify(training.plan, training.shape);
  REQUIRE(violation);
  CHECK(violation->invariant == 2);  // its first backward
  Case c = make({}, [](const model::ModelShape&) {
    ScheduleOptions evaluation = in_place(2, false);
    evaluation.evaluate = true;
    return evaluation;
  });
  Task optimize{.id = static_cast<std::uint32_t>(c.plan.tasks.size()), .kind = TaskKind::optimize, .stream = StreamKind::cpu};
  optimize.unit = 1;
  c.plan.tasks.push_back(optimize);
  expect(c, 3, optimize.id);
}

TEST_CASE("invariant 4: a fetch waits for the commit of the step before") {
  Case c = streamed_case();
  for (const int unit : {0, 1, 2}) {
    Case broken = c;
    const std::uint32_t fetch = find_task(c.plan, TaskKind::fetch, unit), commit = find_task(c.plan, TaskKind::commit, unit);
    drop_waits(broken.plan, fetch, [&](const Wait& wait) { return wait.task == commit && wait.previous_step; });
    expect(broken, 4, fetch);
  }
}

TEST_CASE("invariant 4: a use in place waits for the commit of the step before") {
  Case c = in_place_case();
  const std::uint32_t forward = find_task(c.plan, TaskKind::forward, 2), commit = find_task(c.plan, TaskKind::commit, 2);
  drop_waits(c.plan, forward, [&](const Wait& wait) { return wait.task == commit && wait.previous_step; });
  expect(c, 4, forward);
}

TEST_CASE("invariant 4: waiting for the update instead of the commit is not enough") {
  Case c = streamed_case();
  const std::uint32_t fetch = find_task(c.plan, TaskKind::fetch, 1), commit = find_task(c.plan, TaskKind::commit, 1);
  for (std::uint32_t i = 0; i < c.plan.tasks[fetch].wait_count; ++i) {
    Wait& wait = c.plan.waits[c.plan.tasks[fetch].first_wait + i];
    if (wait.task == commit) wait.task = find_task(c.plan, TaskKind::optimize, 1);
  }
  expect(c, 4, fetch);
}

TEST_CASE("invariant 5: tasks do not wait for each other, or for none") {
  Case c = streamed_case();
  const std::uint32_t fetch = find_task(c.plan, TaskKind::fetch, 1), forward = find_task(c.plan, TaskKind::forward, 1);
  Case circle = c;
  add_wait(circle.plan, fetch, {forward, false});
  expect(circle, 5, fetch);
  Case itself = c;
  add_wait(itself.plan, fetch, {fetch, false});
  expect(itself, 5, fetch);
  add_wait(c.plan, fetch, {static_cast<std::uint32_t>(c.plan.tasks.size()), true});
  expect(c, 5, fetch);
}

TEST_CASE("invariant 5: ids, uses and units exist") {
  const Case good = streamed_case();
  Case c = good;
  c.plan.tasks[3].id = 4;
  expect(c, 5, 3);
  c = good;
  c.plan.uses[c.plan.tasks[3].first_use].buffer = static_cast<std::uint32_t>(c.plan.buffers.size());
  expect(c, 5, 3);
  c = good;
  c.plan.tasks[3].unit = 99;
  expect(c, 5, 3);
  c = good;
  const std::uint32_t forward = find_task(c.plan, TaskKind::forward, 1);
  c.plan.tasks[forward].micro_batch = 3;
  expect(c, 5, forward);
}

TEST_CASE("invariant 6: two buffers in use never share bytes") {
  Case c = streamed_case();
  const std::uint32_t forward = find_task(c.plan, TaskKind::forward, 1, 0);
  const std::uint32_t boundary = use_of(c.plan, forward, BufferKind::boundary).buffer;
  c.plan.buffers[boundary].offset = c.plan.buffers[use_of(c.plan, forward, BufferKind::parameters).buffer].offset;
  expect(c, 6, find_task(c.plan, TaskKind::forward, 0, 0));
}

TEST_CASE("invariant 6: constants share their bytes with nothing") {
  Case c = streamed_case();
  const std::uint32_t last = last_task(c.plan, TaskKind::backward);
  c.plan.buffers[use_of(c.plan, last, BufferKind::workspace).buffer].offset = 0;
  expect(c, 6, last);
}

TEST_CASE("invariant 6: buffers lie inside the arena, the arena inside the budget") {
  Case c = streamed_case();
  Limits limits{.device_bytes = c.plan.device_bytes()};
  CHECK(!verify(c.plan, c.shape, limits));
  --limits.device_bytes;
  expect(c, 6, 0, limits);
  const std::uint32_t fetch = find_task(c.plan, TaskKind::fetch, 1);
  Buffer& buffer = c.plan.buffers[use_of(c.plan, fetch, BufferKind::parameters).buffer];
  buffer.offset = c.plan.arena_bytes - buffer.bytes + 256;
  expect(c, 6, fetch);
  buffer.offset = 128;
  expect(c, 6, fetch);
}

TEST_CASE("invariant 6: what is used in place counts") {
  Case c = in_place_case();
  Limits limits{.device_bytes = c.plan.arena_bytes};
  expect(c, 6, 0, limits);
  c.plan.in_place_bytes -= 256;
  expect(c, 6, 0);
}

TEST_CASE("invariant 6: store and parking fit the host") {
  Case c = make({.layers = 6}, [](const model::ModelShape& shape) {
    ScheduleOptions options = streamed(shape, 2, 2, 4, true);
    options.park = true;
    return options;
  });
  REQUIRE(c.plan.parking_bytes > 0);
  Limits limits{.host_bytes = c.plan.parking_bytes + 1000, .store_bytes = {1000}};
  CHECK(!verify(c.plan, c.shape, limits));
  ++limits.store_bytes[0];
  expect(c, 6, 0, limits);
}

TEST_CASE("invariant 6: buffers are as large as what they hold") {
  Case c = in_place_case();
  const std::uint32_t backward = find_task(c.plan, TaskKind::backward, 1, 0);
  c.plan.buffers[use_of(c.plan, backward, BufferKind::workspace).buffer].bytes -= 256;
  expect(c, 6, backward);
}

TEST_CASE("every single wait is needed, and every missing one is found") {
  const std::vector<Case> cases = {streamed_case(), streamed_case(false, true), in_place_case(),
                                   make({.layers = 5, .tied = true}, [](const model::ModelShape& shape) {
                                     ScheduleOptions options = streamed(shape, 1, 2, 4, true);
                                     options.park = options.save = true;
                                     options.sum_groups = 2;
                                     return options;
                                   })};
  for (const Case& good : cases) {
    for (const Task& task : good.plan.tasks) {
      for (std::uint32_t i = 0; i < task.wait_count; ++i) {
        Case broken = good;
        drop_wait(broken.plan, task.id, i);
        INFO("wait " << i << " of task " << task.id << "\n" << dump(good.plan));
        REQUIRE(verify(broken.plan, broken.shape));
      }
    }
  }
}
