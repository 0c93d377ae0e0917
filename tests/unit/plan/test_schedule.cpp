// What the streaming schedule emits.
#include <catch2/catch.hpp>
#include <map>

#include "support.h"

using namespace spipe;
using namespace spipe::plan;
using namespace spipe::plan::testing;

namespace {

std::map<TaskKind, int> counts(const Plan& plan) {
  std::map<TaskKind, int> result;
  for (const Task& task : plan.tasks) ++result[task.kind];
  return result;
}

std::uint64_t peak(const Plan& plan, BufferKind kind) {
  for (const MemoryUse& use : memory_by_kind(plan)) {
    if (use.kind == kind) return use.own_peak;
  }
  return 0;
}

}  // namespace

TEST_CASE("the dump of a plan is the same every time, and tells plans apart") {
  const model::ModelShape shape = small_shape({.tied = true});
  const ScheduleInput input{.shape = &shape};
  ScheduleOptions options = streamed(shape, 1, 2, 3, true);
  const Plan first = schedule_streaming(input, options), second = schedule_streaming(input, options);
  CHECK(dump(first) == dump(second));
  CHECK(plan_hash(first) == plan_hash(second));
  options.prefetch = 0;
  const Plan other = schedule_streaming(input, options);
  CHECK(plan_hash(first) != plan_hash(other));
  CHECK(dump(first) != dump(other));
  CHECK(dump(first).find("compute backward unit 2 mb 1 stage 1 accumulate") != std::string::npos);
}

TEST_CASE("in place without recompute only one micro-batch's activations live") {
  const model::ModelShape shape = small_shape({});
  const ScheduleInput input{.shape = &shape};
  const Plan one = schedule_streaming(input, in_place(1, false)), many = schedule_streaming(input, in_place(8, false));
  CHECK(peak(one, BufferKind::saved) == peak(many, BufferKind::saved));
  CHECK(peak(one, BufferKind::boundary) == peak(many, BufferKind::boundary));
  CHECK(peak(many, BufferKind::gradient) == 0);  // they accumulate in the store
  CHECK(counts(many)[TaskKind::fetch] == 0);
  CHECK(counts(many)[TaskKind::forward] == 8 * 4);
}

TEST_CASE("the in-place sum counts each parameter and each gradient in the store once") {
  const model::ModelShape shape = small_shape({});
  std::uint64_t elements = 0;
  for (const auto& unit : shape.store_units) elements += unit.elements;
  const Plan plan = schedule_streaming({.shape = &shape}, in_place(2, false));
  CHECK(plan.in_place_bytes == elements * 8);
  ScheduleOptions options = in_place(2, false);
  options.evaluate = true;
  CHECK(schedule_streaming({.shape = &shape}, options).in_place_bytes == elements * 4);
}

TEST_CASE("16-bit gradients and sum groups accumulate on the device") {
  const model::ModelShape shape = small_shape({});
  ScheduleOptions options = in_place(4, false);
  const Plan half = schedule_streaming({.shape = &shape, .grad_dtype_size = 2}, options);
  CHECK(peak(half, BufferKind::gradient) > 0);
  options.sum_groups = 2;
  const Plan grouped = schedule_streaming({.shape = &shape}, options);
  CHECK(peak(grouped, BufferKind::gradient_partial) > 0);
  CHECK(counts(grouped)[TaskKind::reduce] == shape.unit_count());
  options.sum_groups = 9;  // more groups than micro-batches: some are empty
  CHECK(counts(schedule_streaming({.shape = &shape}, options))[TaskKind::reduce] == 3 * shape.unit_count());
}

TEST_CASE("the last backward stage has no forward of its own") {
  const model::ModelShape shape = small_shape({.layers = 4});
  const Plan plan = schedule_streaming({.shape = &shape}, streamed(shape, 2, 2, 3, true));
  std::map<int, int> forwards;
  for (const Task& task : plan.tasks) forwards[task.unit] += task.kind == TaskKind::forward;
  // Units 0..5, backward stages {0, 1} {2, 3} {4, 5}: layer 3 (unit 4) runs once, the others once more.
  CHECK(forwards[4] == 3);
  CHECK(forwards[0] == 6);
  CHECK(forwards[3] == 6);
  CHECK(counts(plan)[TaskKind::backward] == 5 * 3);
  CHECK(counts(plan)[TaskKind::loss] == 3);
}

TEST_CASE("an embedding that is a backward stage alone is neither fetched nor repeated there") {
  const model::ModelShape shape = small_shape({});
  const Plan plan = schedule_streaming({.shape = &shape}, streamed(shape, 1, 1, 2, true));
  int fetches = 0, forwards = 0;
  for (const Task& task : plan.tasks) {
    fetches += task.kind == TaskKind::fetch && task.unit == 0;
    forwards += task.kind == TaskKind::forward && task.unit == 0;
  }
  CHECK(fetches == 1);
  CHECK(forwards == 2);
}

TEST_CASE("streaming needs less memory than in place, parking less than keeping, no prefetch less than prefetch") {
  const model::ModelShape shape = small_shape({.layers = 8});
  const ScheduleInput input{.shape = &shape};
  ScheduleOptions options = streamed(shape, 1, 1, 16, true);
  const std::uint64_t prefetched = schedule_streaming(input, options).device_bytes();
  options.prefetch = 0;
  const std::uint64_t plain = schedule_streaming(input, options).device_bytes();
  options.park = true;
  const Plan parked = schedule_streaming(input, options);
  CHECK(plain < prefetched);
  CHECK(parked.device_bytes() < plain);
  CHECK(parked.parking_bytes > 0);
  CHECK(counts(parked)[TaskKind::park] > 0);
  CHECK(prefetched < schedule_streaming(input, in_place(16, false)).device_bytes());
}

TEST_CASE("a tied matrix is fetched for both its users, and its two gradients leave together") {
  const model::ModelShape shape = small_shape({.layers = 4, .tied = true});
  REQUIRE(shape.tied_unit >= 0);
  const Plan plan = schedule_streaming({.shape = &shape}, streamed(shape, 1, 1, 3, true));
  const std::uint32_t offload = find_task(plan, TaskKind::offload, shape.tied_unit);
  std::vector<int> sources;
  for (std::uint32_t i = 0; i < plan.tasks[offload].use_count; ++i) {
    const Buffer& buffer = plan.buffers[plan.uses[plan.tasks[offload].first_use + i].buffer];
    if (buffer.kind == BufferKind::gradient) sources.push_back(buffer.source);
  }
  CHECK(sources == std::vector{shape.unit_count() - 1, 0});
}

TEST_CASE("an evaluation has forwards, losses and results, nothing else on the device") {
  const model::ModelShape shape = small_shape({});
  for (ScheduleOptions options : {in_place(3, false), streamed(shape, 2, 1, 3, false)}) {
    options.evaluate = true;
    const Plan plan = schedule_streaming({.shape = &shape}, options);
    auto by_kind = counts(plan);
    CHECK(by_kind[TaskKind::forward] == 3 * (shape.unit_count() - 1));
    CHECK(by_kind[TaskKind::loss] == 3);
    CHECK(by_kind[TaskKind::result] == 3);
    by_kind.erase(TaskKind::fetch);
    CHECK(by_kind[TaskKind::input] == 3);
    int listed = 0;
    for (const auto kind : {TaskKind::forward, TaskKind::loss, TaskKind::result, TaskKind::input}) listed += by_kind[kind];
    CHECK(listed + counts(plan)[TaskKind::fetch] == static_cast<int>(plan.tasks.size()));
  }
}

TEST_CASE("updates are submitted in the order in which the next step needs the units") {
  const model::ModelShape shape = small_shape({.tied = true, .learned_positions = true});
  const Plan plan = schedule_streaming({.shape = &shape}, in_place(1, false));
  std::vector<int> order;
  for (const Task& task : plan.tasks) {
    if (task.kind == TaskKind::optimize) order.push_back(task.unit);
  }
  CHECK(order == std::vector{0, shape.tied_unit, 1, 2, 3, 4});
}

TEST_CASE("the memory table adds up to the bytes alive at the peak") {
  const model::ModelShape shape = small_shape({});
  const Plan plan = schedule_streaming({.shape = &shape}, streamed(shape, 1, 1, 4, true));
  std::uint64_t at_peak = 0;
  for (const MemoryUse& use : memory_by_kind(plan)) {
    at_peak += use.at_peak;
    CHECK(use.at_peak <= use.own_peak);
  }
  CHECK(at_peak <= plan.arena_bytes);
  CHECK(plan.arena_bytes <= at_peak + at_peak / 4);
}
