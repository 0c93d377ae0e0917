#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/report/trace.h"
#include "tests/unit/report/temporary_folder.h"

namespace spipe::report {
namespace {

using Catch::Contains;
using plan::StreamKind;
using plan::TaskKind;

plan::Task task_of(TaskKind kind, StreamKind stream, int unit, int micro_batch, int rank = 0) {
  plan::Task task;
  task.kind = kind;
  task.stream = stream;
  task.unit = unit;
  task.micro_batch = micro_batch;
  task.rank = static_cast<std::uint16_t>(rank);
  return task;
}

const plan::Task kForward = task_of(TaskKind::forward, StreamKind::compute, 2, 1);

Trace merged(const std::vector<const TraceWriter*>& writers) {
  std::vector<std::vector<std::byte>> parts;
  for (const TraceWriter* writer : writers) parts.push_back(writer->bytes());
  return merge_traces(parts);
}

nlohmann::json written(const Trace& trace) {
  const TemporaryFolder folder;
  write_trace(folder / "trace.json", trace);
  return nlohmann::json::parse(read_text(folder / "trace.json"));
}

// The events of a phase ("X": slices, "M": names).
std::vector<nlohmann::json> events_of(const Trace& trace, const std::string& phase) {
  std::vector<nlohmann::json> events;
  const nlohmann::json json = written(trace);
  for (const nlohmann::json& event : json.at("traceEvents")) {
    if (event.at("ph") == phase) events.push_back(event);
  }
  return events;
}

std::map<std::int64_t, int> tasks_per_step(const Trace& trace) {
  std::map<std::int64_t, int> counts;
  for (const plan::TimelineSlice& slice : trace.slices) ++counts[slice.step];
  return counts;
}

}  // namespace

TEST_CASE("a trace has one slice a task, in microseconds from the first one, on its stream's row") {
  TraceWriter trace;
  trace.on_task(kForward, 5'000'000, 5'250'000, 7);
  trace.on_task(task_of(TaskKind::fetch, StreamKind::h2d, 3, -1), 4'000'000, 5'000'500, 7);
  const auto slices = events_of(merged({&trace}), "X");
  REQUIRE(slices.size() == 2);
  CHECK(slices[1].at("name") == "forward u2 m1");
  CHECK(slices[1].at("ts").get<double>() == Approx(1000).margin(0.002));
  CHECK(slices[1].at("dur").get<double>() == Approx(250).margin(0.002));
  CHECK(slices[1].at("tid") == static_cast<int>(StreamKind::compute));
  CHECK(slices[1].at("args").at("step") == 8);  // as in metrics.jsonl: from 1
  CHECK(slices[0].at("name") == "fetch u3");
  CHECK(slices[0].at("ts").get<double>() == 0);
  CHECK(slices[0].at("dur").get<double>() == Approx(1000.5).margin(0.002));
}

TEST_CASE("ranks are processes and their streams named rows, and an empty trace has none") {
  TraceWriter trace;
  trace.on_task(task_of(TaskKind::fetch, StreamKind::h2d, 3, -1, 2), 4, 5, 0);
  std::set<std::string> names;
  for (const nlohmann::json& event : events_of(merged({&trace}), "M")) {
    if (event.at("args").contains("name")) names.insert(event.at("args").at("name").get<std::string>());
  }
  CHECK(names == std::set<std::string>{"rank 2", "h2d"});
  CHECK(written(Trace()).at("traceEvents").empty());
}

TEST_CASE("slices of one thread never overlap in the file: a stream's tasks that do get more threads") {
  std::vector<plan::TimelineSlice> slices;
  plan::Task push = task_of(TaskKind::push, StreamKind::comm, 0, 0);
  for (int i = 0; i < 20; ++i) slices.push_back(plan::slice_of(push, 0.001 * i + 1e-10 * i, 0.001 * (i % 4 + i) + 0.0005));
  std::map<int, std::int64_t> ends;
  std::set<std::string> names;
  const auto ns = [](const nlohmann::json& us) { return std::llround(1000 * us.get<double>()); };
  for (const nlohmann::json& event : events_of(slices, "X")) {
    const int thread = event.at("tid").get<int>();
    CHECK(thread % plan::kStreamCount == static_cast<int>(StreamKind::comm));
    CHECK(ns(event.at("ts")) >= ends[thread]);
    ends[thread] = ns(event.at("ts")) + ns(event.at("dur"));
  }
  CHECK(ends.size() == 3);
  for (const nlohmann::json& event : events_of(slices, "M")) {
    if (event.at("name") == "thread_name") names.insert(event.at("args").at("name").get<std::string>());
  }
  CHECK(names == std::set<std::string>{"comm", "comm (2)", "comm (3)"});
}

TEST_CASE("ranks of one machine come together on its steady clock, whatever their readings of the wall clock") {
  TraceWriter first, second;
  first.on_task(kForward, 2'000'000'000, 3'000'000'000, 4);
  second.on_task(task_of(TaskKind::forward, StreamKind::compute, 2, 1, 1), 1'000'000'000, 4'000'000'000, 4);
  const Trace trace = merge_traces(std::vector{first.bytes({.machine = 9, .wall_minus_steady = 50'000}),  //
                                               second.bytes({.machine = 9, .wall_minus_steady = 51'000})});
  REQUIRE(trace.slices.size() == 2);
  CHECK(trace.slices[0].rank == 0);
  CHECK(trace.slices[1].rank == 1);
  CHECK(trace.slices[0].step == 4);
  CHECK(trace.slices[0].begin - trace.slices[1].begin == Approx(1).margin(1e-8));
  CHECK(trace.left_out == 0);
  CHECK(this_machine_clock().machine == this_machine_clock().machine);
}

TEST_CASE("ranks of several machines come together on the wall clock") {
  TraceWriter first, second;
  first.on_task(kForward, 2'000'000'000, 3'000'000'000, 0);     // at 102 s
  second.on_task(kForward, 90'000'000'000, 90'500'000'000, 0);  // at 101 s
  second.on_task(kForward, 91'250'000'000, 91'500'000'000, 0);  // at 102.25 s
  const Trace trace = merge_traces(std::vector{first.bytes({.machine = 1, .wall_minus_steady = 100'000'000'000}),
                                               second.bytes({.machine = 2, .wall_minus_steady = 11'000'000'000})});
  REQUIRE(trace.slices.size() == 3);
  CHECK(trace.slices[1].begin - trace.slices[0].begin == Approx(-1).margin(1e-8));
  CHECK(trace.slices[2].begin - trace.slices[0].begin == Approx(0.25).margin(1e-8));
}

TEST_CASE("a trace is bounded and takes tasks from several threads") {
  TraceWriter trace(100);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&trace] {
      for (int k = 0; k < 50; ++k) trace.on_task(kForward, k, k + 1, 0);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const Trace all = merged({&trace});
  CHECK(all.slices.size() == 100);
  CHECK(all.left_out == 100);
}

TEST_CASE("a bounded trace keeps whole steps, and says what it left out") {
  TraceWriter trace(10);
  for (const std::uint64_t step : {0, 0, 0, 0, 1, 1, 1, 2, 2, 2}) trace.on_task(kForward, 0, 1, step);
  trace.on_task(kForward, 0, 1, 2);                                          // no room: step 2 goes
  trace.on_task(kForward, 0, 1, 1);                                          // steps overlap: a late task of step 1
  trace.on_task(kForward, 0, 1, 3);                                          // and nothing after it
  trace.on_task(kForward, 0, 1, static_cast<std::uint64_t>(plan::kNoStep));  // ... not even an evaluation
  const Trace all = merged({&trace});
  CHECK(tasks_per_step(all) == std::map<std::int64_t, int>{{0, 4}, {1, 4}});
  CHECK(all.left_out == 6);
  CHECK(written(all).at("otherData").at("left_out") == 6);
  CHECK_THAT(written(all).dump(), Contains("6 later tasks left out"));
  CHECK_THAT(written(Trace(all.slices)).dump(), !Contains("left out"));
}

TEST_CASE("tasks of an evaluation belong to no step") {
  TraceWriter trace;
  trace.on_task(kForward, 0, 1, static_cast<std::uint64_t>(plan::kNoStep));
  const Trace all = merged({&trace});
  REQUIRE(all.slices.size() == 1);
  CHECK(all.slices[0].step == plan::kNoStep);
  CHECK(events_of(all, "X").at(0).at("args").at("step") == 0);
}

TEST_CASE("where one rank's trace was cut, the other ranks' end with the same step") {
  TraceWriter busy(4), idle;
  for (std::uint64_t step = 0; step < 5; ++step) {
    for (int i = 0; i < 2; ++i) busy.on_task(kForward, 0, 1, step);
    idle.on_task(kForward, 0, 1, step);
  }
  const Trace all = merged({&idle, &busy});
  CHECK(tasks_per_step(all) == std::map<std::int64_t, int>{{0, 3}, {1, 3}});
  CHECK(all.left_out == 9);
}

TEST_CASE("a trace reads back as it was written") {
  plan::Task again = task_of(TaskKind::forward, StreamKind::compute, 2, 5, 3);
  again.id = 4'000'000'000;
  again.flags = plan::kRecompute | plan::kLastOfStage;
  again.stage = 7;
  again.bytes = 123'456'789'012;
  const plan::Task push = task_of(TaskKind::push, StreamKind::comm, -1, -1);
  const Trace trace({plan::slice_of(again, 10.5, 10.75000025, 41), plan::slice_of(push, 10.25, 10.6, 42),
                     plan::slice_of(push, 10.3, 10.3, plan::kNoStep)},
                    17);
  const TemporaryFolder folder;
  write_trace(folder / "trace.json", trace);
  const Trace back = read_trace(folder / "trace.json");
  CHECK(back.left_out == 17);
  REQUIRE(back.slices.size() == 3);
  for (const auto& [at, from] : {std::pair{0, 1}, std::pair{1, 2}, std::pair{2, 0}}) {  // in order of begin
    const plan::TimelineSlice& got = back.slices[static_cast<std::size_t>(at)];
    const plan::TimelineSlice& was = trace.slices[static_cast<std::size_t>(from)];
    CHECK(got.task == was.task);
    CHECK(got.kind == was.kind);
    CHECK(got.stream == was.stream);
    CHECK(got.rank == was.rank);
    CHECK(got.stage == was.stage);
    CHECK(got.flags == was.flags);
    CHECK(got.unit == was.unit);
    CHECK(got.micro_batch == was.micro_batch);
    CHECK(got.bytes == was.bytes);
    CHECK(got.step == was.step);
    CHECK(got.begin == Approx(was.begin - 10.25).margin(2e-9));
    CHECK(got.end == Approx(was.end - 10.25).margin(2e-9));
  }
  CHECK(read_text(folder / "trace.json") == plan::chrome_trace(back.slices, back.left_out));
  write_trace(folder / "empty.json", Trace());
  CHECK(read_trace(folder / "empty.json").slices.empty());
}

TEST_CASE("a trace that is cut short anywhere is refused as such") {
  const std::string whole = plan::chrome_trace({plan::slice_of(kForward, 0, 1, 3)});
  const TemporaryFolder folder;
  const auto file = folder / "trace.json";
  for (std::size_t size = 1; size + 2 < whole.size(); ++size) {
    write_text_atomic(file, std::string_view(whole).substr(0, size));
    INFO(size);
    CHECK_THROWS_WITH(read_trace(file), Contains("trace.json") && Contains("cut short"));
  }
}

TEST_CASE("files that are not traces are refused in one line that says why") {
  const auto changed = [](const std::string& from, const std::string& to) {
    std::string text = plan::chrome_trace({plan::slice_of(kForward, 0, 1, 3)});
    REQUIRE(text.find(from) != std::string::npos);
    return text.replace(text.find(from), from.size(), to);
  };
  const std::pair<std::string, std::string> cases[] = {
      {"", "the file is empty"},
      {" \n", "the file is empty"},
      {"step,loss\n1,2\n", "no JSON at byte 1"},
      {"[]", "not a trace of spipe"},
      {"17", "not a trace of spipe"},
      {"{}", "not a trace of spipe"},
      {R"({"traceEvents":{}})", "not a trace of spipe"},
      {R"({"traceEvents":[]})", "not a trace of spipe"},
      {changed("\"spipe\"", "\"other\""), "not a trace of spipe"},
      {changed("\"version\":1", "\"version\":2"), "not a trace of spipe"},
      {changed("\"left_out\":0", "\"left_out\":-1"), "the trace has a left_out out of range: -1"},
      {changed("\"cat\":\"forward\"", "\"cat\":\"sleep\""), "event 1 of the trace is of an unknown kind 'sleep'"},
      {changed("\"cat\":\"forward\"", "\"cat\":5"), "has no cat"},
      {changed("\"pid\":0", "\"pid\":65536"), "pid out of range: 65536"},
      {changed("\"pid\":0", "\"pid\":0.5"), "no whole number pid"},
      {changed("\"tid\":0", "\"tid\":-1"), "tid out of range: -1"},
      {changed("\"ts\":0.000", "\"ts\":-1"), "no ts in microseconds"},
      {changed("\"ts\":0.000", "\"ts\":1e300"), "no ts in microseconds"},
      {changed("\"dur\":1000000.000", "\"dur\":\"1\""), "no dur in microseconds"},
      {changed("\"unit\":2", "\"unit\":-2"), "unit out of range: -2"},
      {changed("\"bytes\":0", "\"bytes\":18446744073709551615"), "bytes out of range"},
      {changed("\"step\":4,", ""), "no whole number step"},
      {changed("\"args\"", "\"more\""), "has no args"},
  };
  const TemporaryFolder folder;
  const auto file = folder / "trace.json";
  for (const auto& [text, why] : cases) {
    write_text_atomic(file, text);
    INFO(text);
    std::string error;
    try {
      (void)read_trace(file);
    } catch (const Error& caught) {
      error = caught.what();
    }
    CHECK_THAT(error, Contains("trace.json: ") && Contains(why) && !Contains("\n"));
  }
  CHECK_THROWS_WITH(read_trace(folder / "none.json"), Contains("none.json"));
}

}  // namespace spipe::report
