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
  trace.write(folder / "trace.json");
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
  trace.on_task(task_of(plan::TaskKind::forward, plan::StreamKind::compute, 2, 1), 5'000'000, 5'250'000);
  trace.on_task(task_of(plan::TaskKind::fetch, plan::StreamKind::h2d, 3, -1), 4'000'000, 5'000'500);
  const auto slices = events_of(trace, "X");
  REQUIRE(slices.size() == 2);
  CHECK(slices[0].at("name") == std::string(plan::task_kind_name(plan::TaskKind::forward)) + " u2 m1");
  CHECK(slices[0].at("ts").get<double>() == Approx(1000));
  CHECK(slices[0].at("dur").get<double>() == Approx(250));
  CHECK(slices[0].at("tid") == static_cast<int>(plan::StreamKind::compute));
  CHECK(slices[1].at("name") == std::string(plan::task_kind_name(plan::TaskKind::fetch)) + " u3");
  CHECK(slices[1].at("ts").get<double>() == Approx(0));
  CHECK(slices[1].at("dur").get<double>() == Approx(1000.5));
}

TEST_CASE("every stream's row is named, also in an empty trace") {
  std::set<std::string> names;
  for (const nlohmann::json& event : events_of(TraceWriter(), "M")) {
    names.insert(event.at("args").at("name").get<std::string>());
  }
  CHECK(names.size() == plan::kStreamCount);
  CHECK(events_of(TraceWriter(), "X").empty());
}

TEST_CASE("a trace is bounded and takes tasks from several threads") {
  TraceWriter trace(100);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&trace] {
      for (int k = 0; k < 50; ++k) {
        trace.on_task(task_of(plan::TaskKind::input, plan::StreamKind::h2d, -1, k), k, k + 1);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(events_of(trace, "X").size() == 100);
}

}  // namespace spipe::report
