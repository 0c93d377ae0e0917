#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "spipe/base/file.h"
#include "spipe/report/trace.h"
#include "tests/unit/report/temporary_folder.h"

namespace spipe::report {
namespace {

plan::Task task_of(plan::TaskKind kind, plan::StreamKind stream, int unit, int micro_batch) {
  plan::Task task;
  task.kind = kind;
  task.stream = stream;
  task.unit = unit;
  task.micro_batch = micro_batch;
  return task;
}

// The events of a phase ("X": slices, "M": names).
std::vector<nlohmann::json> events_of(const TraceWriter& trace, const std::string& phase) {
  const TemporaryFolder folder;
  write_trace(folder / "trace.json", slices_from_bytes(trace.bytes()));
  std::vector<nlohmann::json> events;
  const nlohmann::json json = nlohmann::json::parse(read_text(folder / "trace.json"));
  for (const nlohmann::json& event : json.at("traceEvents")) {
    if (event.at("ph") == phase) {
      events.push_back(event);
    }
  }
  return events;
}

}  // namespace

TEST_CASE("a trace has one slice a task, in microseconds from the first one, on its stream's row") {
  TraceWriter trace;
  trace.on_task(task_of(plan::TaskKind::forward, plan::StreamKind::compute, 2, 1), 5'000'000, 5'250'000, 7);
  trace.on_task(task_of(plan::TaskKind::fetch, plan::StreamKind::h2d, 3, -1), 4'000'000, 5'000'500, 7);
  const auto slices = events_of(trace, "X");
  REQUIRE(slices.size() == 2);
  CHECK(slices[1].at("name") == std::string(plan::task_kind_name(plan::TaskKind::forward)) + " u2 m1");
  CHECK(slices[1].at("ts").get<double>() == Approx(1000).margin(1));
  CHECK(slices[1].at("dur").get<double>() == Approx(250).margin(1));
  CHECK(slices[1].at("tid") == static_cast<int>(plan::StreamKind::compute));
  CHECK(slices[0].at("name") == std::string(plan::task_kind_name(plan::TaskKind::fetch)) + " u3");
  CHECK(slices[0].at("ts").get<double>() == Approx(0).margin(1));
  CHECK(slices[0].at("dur").get<double>() == Approx(1000.5).margin(1));
}

TEST_CASE("ranks are processes and their streams named rows, and an empty trace has none") {
  TraceWriter trace;
  trace.on_task(task_of(plan::TaskKind::fetch, plan::StreamKind::h2d, 3, -1), 4, 5, 0);
  std::set<std::string> names;
  for (const nlohmann::json& event : events_of(trace, "M")) names.insert(event.at("args").at("name").get<std::string>());
  CHECK(names.size() == plan::kStreamCount + 1);
  CHECK(names.contains("rank 0"));
  CHECK(names.contains("h2d"));
  CHECK(events_of(TraceWriter(), "X").empty());
}

TEST_CASE("the traces of several ranks come together on one clock") {
  TraceWriter first, second;
  plan::Task task = task_of(plan::TaskKind::forward, plan::StreamKind::compute, 2, 1);
  first.on_task(task, 2'000'000'000, 3'000'000'000, 4);
  task.rank = 1;
  second.on_task(task, 1'000'000'000, 4'000'000'000, 4);
  auto slices = slices_from_bytes(first.bytes());
  const auto more = slices_from_bytes(second.bytes());
  slices.insert(slices.end(), more.begin(), more.end());
  REQUIRE(slices.size() == 2);
  CHECK(slices[0].step == 4);
  CHECK(slices[0].rank == 0);
  CHECK(slices[1].rank == 1);
  CHECK(slices[0].begin - slices[1].begin == Approx(1).margin(0.01));
  CHECK(slices[1].end - slices[1].begin == Approx(3).margin(0.01));
}

TEST_CASE("a trace is bounded and takes tasks from several threads") {
  TraceWriter trace(100);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&trace] {
      for (int k = 0; k < 50; ++k) {
        trace.on_task(task_of(plan::TaskKind::input, plan::StreamKind::h2d, -1, k), k, k + 1, 0);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(events_of(trace, "X").size() == 100);
}

}  // namespace spipe::report
