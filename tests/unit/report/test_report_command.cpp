#include <catch2/catch.hpp>
#include <filesystem>
#include <string>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/report/trace.h"
#include "tests/unit/report/html_check.h"
#include "tests/unit/report/temporary_folder.h"
#include "tools/report_command.h"

namespace spipe::tools {
namespace {

using Catch::Contains;

// Steps 3 to 5 of one rank.
report::Trace three_steps() {
  report::Trace trace;
  for (const int step : {2, 3, 4}) {
    plan::Task task;
    task.kind = plan::TaskKind::backward;
    trace.slices.push_back(plan::slice_of(task, step, step + 0.5, step));
  }
  return trace;
}

std::string error_of(const ReportFlags& flags) {
  try {
    run_report(flags);
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kUser);
    return error.what();
  }
  return "none";
}

}  // namespace

TEST_CASE("a run's page lies in its folder, shows the last step, and has curves where there are metrics") {
  const report::TemporaryFolder folder;
  std::filesystem::create_directory(folder / "mine");
  report::write_trace(folder / "mine/trace.json", three_steps());
  run_report({.runs = {(folder / "mine").string()}});
  const std::string page = read_text(folder / "mine/report.html");
  CHECK_THAT(page, Contains("<h1>mine</h1>") && Contains("<h2>Step 5</h2>") && !Contains("class=\"curves\""));
  write_text_atomic(folder / "mine/metrics.jsonl", "{\"step\":1,\"loss\":3.0}\n{\"step\":2,\"loss\":2.0}\n");
  run_report({.runs = {(folder / "mine/trace.json").string()}, .step = 4});
  CHECK_THAT(read_text(folder / "mine/report.html"), Contains("<h2>Step 4</h2>") && Contains("class=\"curves\""));
}

TEST_CASE("a run without a trace has a page too, and several runs have one together") {
  const report::TemporaryFolder folder;
  for (const char* name : {"a", "b"}) {
    std::filesystem::create_directory(folder / name);
    write_text_atomic(folder / name / "metrics.jsonl", "{\"step\":1,\"loss\":3.0}\n{\"step\":2,\"loss\":2.0}\n");
  }
  run_report({.runs = {(folder / "a").string()}});
  CHECK(report::html_problems(read_text(folder / "a/report.html")).empty());
  const std::string both = (folder / "both.html").string();
  run_report({.runs = {(folder / "a").string(), (folder / "b").string()}, .output = both});
  CHECK_THAT(read_text(both), Contains("<h1>a, b</h1>"));
  std::filesystem::create_directories(folder / "c/a");  // names of folders that do not differ
  write_text_atomic(folder / "c/a/metrics.jsonl", "{\"step\":1,\"loss\":3.0}\n");
  run_report({.runs = {(folder / "a").string(), (folder / "c/a").string()}, .output = both});
  CHECK_THAT(read_text(both), Contains("c/a</h1>"));
  CHECK_THAT(error_of({.runs = {(folder / "a").string()}, .step = 1}), Contains("no trace.json to draw a step of"));
}

TEST_CASE("any trace file has its page beside it, or where it was asked for") {
  const report::TemporaryFolder folder;
  report::write_trace(folder / "step.json", three_steps());
  write_text_atomic(folder / "metrics.jsonl", "not metrics\n");  // of something else
  run_report({.runs = {(folder / "step.json").string()}});
  CHECK_THAT(read_text(folder / "step.html"), Contains("<h1>step</h1>"));
  run_report({.runs = {(folder / "step.json").string()}, .output = (folder / "page.html").string()});
  CHECK(read_text(folder / "page.html") == read_text(folder / "step.html"));
}

TEST_CASE("what cannot be reported is said in one line, with the way out") {
  const report::TemporaryFolder folder;
  const std::string run = (folder / "run").string();
  CHECK_THAT(error_of({.runs = {run}}), Contains("run: no such run folder or trace file; give"));
  std::filesystem::create_directory(run);
  CHECK_THAT(error_of({.runs = {run}}), Contains("no run.json, metrics.jsonl or trace.json in this folder"));
  report::write_trace(folder / "run/trace.json", report::Trace());
  CHECK_THAT(error_of({.runs = {run}}), Contains("trace.json: the trace holds no whole step"));
  report::write_trace(folder / "run/trace.json", three_steps());
  for (const std::int64_t step : {2, 6}) {
    CHECK_THAT(error_of({.runs = {run}, .step = step}),
               Contains("step " + std::to_string(step) + " is not in the trace; it holds steps 3 to 5"));
  }
  CHECK_THAT(error_of({.runs = {run}, .output = (folder / "none/page.html").string()}), Contains("none/page.html"));
  write_text_atomic(folder / "run/metrics.jsonl", "not metrics\n");
  CHECK_THAT(error_of({.runs = {run}}), Contains("metrics.jsonl:1: not a line of metrics"));
  write_text_atomic(folder / "run/trace.json", "{\"traceEvents\":[");
  CHECK_THAT(error_of({.runs = {run}}), Contains("cut short"));
  CHECK_FALSE(std::filesystem::exists(folder / "run/report.html"));
}

}  // namespace spipe::tools
