// Waits and offsets of plans made by hand.
#include <catch2/catch.hpp>

#include "spipe/base/error.h"
#include "support.h"

using namespace spipe;
using namespace spipe::plan;

namespace {

// A plan under construction with one-line tasks.
struct Sketch {
  Builder builder{ScheduleOptions{}, 1, 1, 2};
  std::uint32_t device(std::uint64_t bytes) { return builder.buffer({.kind = BufferKind::boundary, .bytes = bytes}); }
  std::uint32_t host() { return builder.buffer({.kind = BufferKind::norm_value, .place = Place::host, .bytes = 256}); }
  std::uint32_t task(StreamKind stream, const std::vector<Use>& uses, TaskKind kind = TaskKind::forward) {
    return builder.task({.kind = kind, .stream = stream}, uses);
  }
};

std::vector<std::string> waits_of(const Plan& plan, std::uint32_t id) {
  std::vector<std::string> list;
  for (std::uint32_t i = 0; i < plan.tasks[id].wait_count; ++i) {
    const Wait& wait = plan.waits[plan.tasks[id].first_wait + i];
    list.push_back(std::to_string(wait.task) + (wait.previous_step ? "'" : ""));
  }
  return list;
}

using Waits = std::vector<std::string>;
constexpr StreamKind kCompute = StreamKind::compute, kH2d = StreamKind::h2d, kD2h = StreamKind::d2h, kCpu = StreamKind::cpu;
constexpr Access kRead = Access::read, kWrite = Access::write, kUpdate = Access::update;

}  // namespace

TEST_CASE("a reader waits for the writer, and the next step's writer for the reader") {
  Sketch s;
  const auto b = s.device(256);
  s.task(kH2d, {{b, kWrite}});
  s.task(kCompute, {{b, kRead}});
  Plan plan = s.builder.take();
  derive_waits(plan);
  CHECK(waits_of(plan, 0) == Waits{"1'"});
  CHECK(waits_of(plan, 1) == Waits{"0"});
}

TEST_CASE("order inside a stream needs no wait") {
  Sketch s;
  const auto b = s.device(256);
  s.task(kCompute, {{b, kWrite}});
  s.task(kCompute, {{b, kUpdate}});
  s.task(kCompute, {{b, kRead}});
  Plan plan = s.builder.take();
  derive_waits(plan);
  CHECK(plan.waits.empty());
}

TEST_CASE("a wait that others imply is left out") {
  Sketch s;
  const auto a = s.device(256), b = s.device(256);
  s.task(kH2d, {{a, kWrite}});
  s.task(kCompute, {{a, kRead}, {b, kWrite}});
  s.task(kD2h, {{a, kRead}, {b, kRead}});  // the compute task has waited for the copy already
  Plan plan = s.builder.take();
  derive_waits(plan);
  CHECK(waits_of(plan, 2) == Waits{"1"});
}

TEST_CASE("tasks that end in any order are waited for one by one, and order nothing by position") {
  Sketch s;
  const auto a = s.host(), b = s.host(), c = s.host();
  s.task(kCpu, {{a, kUpdate}}, TaskKind::optimize);
  s.task(kCpu, {{b, kUpdate}}, TaskKind::optimize);
  s.task(kCpu, {{a, kRead}, {b, kRead}, {c, kWrite}}, TaskKind::norm);
  s.task(kCpu, {{a, kRead}}, TaskKind::norm);
  s.task(kCpu, {{c, kUpdate}}, TaskKind::optimize);
  Plan plan = s.builder.take();
  derive_waits(plan);
  CHECK(waits_of(plan, 2) == Waits{"1", "0", "4'"});
  CHECK(waits_of(plan, 3).empty());
  CHECK(waits_of(plan, 4) == Waits{"2"});
  CHECK(waits_of(plan, 0) == Waits{"3'"});
}

TEST_CASE("a chain of updates over the step's border is followed through tasks that end in any order") {
  Sketch s;
  const auto parameters = s.host();
  s.task(kCompute, {{parameters, kRead}});
  s.task(kCompute, {{parameters, kRead}});
  s.task(kCpu, {{parameters, kUpdate}}, TaskKind::optimize);
  s.task(kCpu, {{parameters, kUpdate}}, TaskKind::optimize);
  Plan plan = s.builder.take();
  derive_waits(plan);
  CHECK(waits_of(plan, 0) == Waits{"3'"});
  CHECK(waits_of(plan, 1).empty());
  CHECK(waits_of(plan, 2) == Waits{"1"});
  CHECK(waits_of(plan, 3) == Waits{"2"});
}

TEST_CASE("a device buffer that is read before it is written is our mistake") {
  Sketch s;
  const auto b = s.device(256);
  s.task(kCompute, {{b, kRead}});
  Plan plan = s.builder.take();
  CHECK_THROWS_AS(derive_waits(plan), InternalError);
}

TEST_CASE("buffers that live at different times share bytes, and the later one waits") {
  Sketch s;
  const auto a = s.device(1000), b = s.device(1000);
  s.task(kCompute, {{a, kWrite}});
  s.task(kD2h, {{a, kRead}});
  s.task(kCompute, {{b, kWrite}});
  Plan plan = s.builder.take();
  derive_waits(plan);
  place_buffers(plan);
  CHECK(plan.arena_bytes == 1024);
  CHECK(plan.buffers[a].offset == plan.buffers[b].offset);
  CHECK(waits_of(plan, 2) == Waits{"1"});
  CHECK(waits_of(plan, 0).empty());  // the step before ended with the same stream
}

TEST_CASE("buffers that live at the same time never share bytes") {
  Sketch s;
  const auto a = s.device(512), b = s.device(256), c = s.device(768);
  s.task(kCompute, {{a, kWrite}});
  s.task(kCompute, {{a, kRead}, {b, kWrite}});
  s.task(kCompute, {{b, kRead}, {c, kWrite}});
  Plan plan = s.builder.take();
  derive_waits(plan);
  place_buffers(plan);
  CHECK(plan.arena_bytes == 1024);
  CHECK((plan.buffers[b].offset + 256 <= plan.buffers[c].offset || plan.buffers[c].offset + 768 <= plan.buffers[b].offset));
}

TEST_CASE("a small long-lived buffer does not split the room of a large later one") {
  Sketch s;
  const auto first = s.device(4096), kept = s.device(256), large = s.device(4352);
  s.task(kCompute, {{first, kWrite}});
  s.task(kCompute, {{first, kRead}, {kept, kWrite}});
  s.task(kCompute, {{large, kWrite}});
  s.task(kCompute, {{kept, kRead}});
  Plan plan = s.builder.take();
  derive_waits(plan);
  place_buffers(plan);
  CHECK(plan.arena_bytes == 4352 + 256);
}

TEST_CASE("constants keep the lowest bytes of every plan to themselves") {
  Sketch s;
  const auto a = s.device(512);
  const auto constants = s.builder.buffer({.kind = BufferKind::constants, .bytes = 300});
  s.task(kCompute, {{a, kWrite}});
  s.task(kCompute, {{constants, kRead}});
  Plan plan = s.builder.take();
  derive_waits(plan);
  place_buffers(plan);
  CHECK(plan.buffers[constants].offset == 0);
  CHECK(plan.buffers[a].offset == 512);
  CHECK(plan.arena_bytes == 1024);
}

TEST_CASE("a plan of no tasks is complete") {
  const model::ModelShape shape = spipe::plan::testing::small_shape({});
  Plan plan = Builder(ScheduleOptions{}, 1, 1, 2).take();
  complete(plan, shape, 4);
  CHECK(plan.device_bytes() == 0);
}
