#include <catch2/catch.hpp>
#include <cmath>
#include <regex>
#include <string>
#include <vector>

#include "spipe/base/file.h"
#include "spipe/report/page.h"
#include "spipe/report/report.h"
#include "tests/unit/report/html_check.h"
#include "tests/unit/report/temporary_folder.h"

namespace spipe::report {
namespace {

using Catch::Contains;
using plan::StreamKind;
using plan::TaskKind;

plan::TimelineSlice slice(int rank, TaskKind kind, StreamKind stream, double begin, double end, std::int64_t step,
                          std::uint64_t bytes = 0) {
  plan::Task task;
  task.kind = kind;
  task.stream = stream;
  task.rank = static_cast<std::uint16_t>(rank);
  task.unit = 1;
  task.bytes = bytes;
  return plan::slice_of(task, begin, end, step);
}

plan::TimelineSlice compute(int rank, TaskKind kind, double begin, double end, std::int64_t step) {
  return slice(rank, kind, StreamKind::compute, begin, end, step);
}

// Two ranks, step 1 in full: it computes from 10 to 20. Rank 0 is idle for 1 s of it, rank 1 for 4 s, of which 1 s goes to
// step 2.
Trace two_ranks() {
  return Trace(
      {compute(0, TaskKind::forward, 4, 5, 0), compute(1, TaskKind::backward, 4, 5, 0),
       slice(0, TaskKind::fetch, StreamKind::h2d, 9, 10, 1, 1000), compute(0, TaskKind::forward, 10, 14, 1),
       compute(1, TaskKind::backward, 14, 20, 1), compute(0, TaskKind::backward, 15, 20, 1),
       slice(1, TaskKind::send, StreamKind::send, 20, 20.5, 1, 50), slice(1, TaskKind::push, StreamKind::comm, 20, 21, 1, 7),
       slice(1, TaskKind::pull, StreamKind::comm, 20, 21, 1, 9), slice(0, TaskKind::optimize, StreamKind::cpu, 20, 23, 1),
       slice(0, TaskKind::optimize, StreamKind::cpu, 21, 24, 1), compute(1, TaskKind::forward, 13, 14, 2),
       compute(0, TaskKind::backward, 25, 26, 2)});
}

std::vector<std::uint64_t> steps_of(const std::vector<MetricPoint>& points) {
  std::vector<std::uint64_t> steps;
  for (const MetricPoint& point : points) steps.push_back(point.step);
  return steps;
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++found;
  return found;
}

ReportedRun run_of(const std::string& name, std::optional<Trace> trace, std::int64_t step,
                   std::vector<MetricPoint> metrics = {}) {
  ReportedRun run;
  run.name = name;
  run.metrics = std::move(metrics);
  if (trace) run.step = step;
  run.trace = std::move(trace);
  return run;
}

std::string page_of(const std::string& name, const Trace& trace, std::int64_t step, const std::vector<MetricPoint>& metrics) {
  return report_page({run_of(name, trace, step, metrics)});
}

std::string curves_of(const std::vector<MetricPoint>& metrics) { return metric_curves({run_of("run", {}, 0, metrics)}); }

RunFacts some_facts() {
  RunFacts facts;
  facts.started = "2026-01-02 03:04:05 UTC";
  facts.total_steps = 40;
  facts.environment = {{"program", "spipe-train <x> & more"}, {"host", "\"box\""}};
  facts.model = {{"family", "llama"}};
  facts.plan = "training step";
  facts.device = {{"parameters", 3 << 20}, {"saved", 1 << 20}};
  facts.device_limit = 8 << 20;
  facts.host = {{"store (state)", 5 << 20}};
  facts.end = RunEnd{"failed", "non-finite loss at step 30", "2026-01-02 04:04:05 UTC", 30, 3600};
  return facts;
}

// A run of which everything is known.
ReportedRun whole_run(const std::string& name, double lr) {
  ReportedRun run = run_of(name, two_ranks(), 1);
  for (std::uint64_t step = 10; step <= 30; step += 10) {
    const auto at = static_cast<double>(step);
    run.metrics.push_back({.step = step,
                           .loss = 4 - at / 20,
                           .eval_loss = {},
                           .tokens_per_s = 1000,
                           .lr = lr,
                           .grad_norm = 1 / at,
                           .step_seconds = 0.1,
                           .tokens = at * 100});
  }
  run.metrics.push_back({.step = 30,
                         .loss = 2.5,
                         .eval_loss = 2.75,
                         .tokens_per_s = 1000,
                         .lr = lr,
                         .grad_norm = 1,
                         .step_seconds = 0.1,
                         .tokens = 3000});
  run.samples = {{10, "In <the>", "old text"}, {30, "", "new & better"}};
  run.facts = some_facts();
  run.config = "optimizer:\n  lr: " + std::to_string(lr) +
               "     # file\n  eps: 1e-08   # default\ntrain:\n  steps: 40 # file\n# spipe-train\n";
  return run;
}

std::string problems_of(const std::string& page) {
  std::string text;
  for (const std::string& problem : html_problems(page)) text += problem + "\n";
  return text;
}

}  // namespace

TEST_CASE("a step's summary counts busy streams, idle compute and bytes") {
  const StepSummary summary = summarise(two_ranks(), 1);
  CHECK(summary.span == 15);
  CHECK(summary.computing == 10);
  CHECK(summary.step_seconds == 3);  // to the next one; 6 from the one before
  CHECK(summarise(two_ranks(), 0).step_seconds == 6);
  CHECK_FALSE(summarise(Trace({compute(0, TaskKind::backward, 0, 1, 3)}), 3).step_seconds);
  REQUIRE(summary.ranks.size() == 2);
  const RankSummary &first = summary.ranks.at(0), &second = summary.ranks.at(1);
  CHECK(first.busy[static_cast<std::size_t>(StreamKind::compute)] == 9);
  CHECK(first.busy[static_cast<std::size_t>(StreamKind::cpu)] == 4);  // updates overlap
  CHECK(second.busy[static_cast<std::size_t>(StreamKind::compute)] == 6);
  CHECK(second.busy[static_cast<std::size_t>(StreamKind::comm)] == 1);
  CHECK(first.bubble == Approx(0.1));
  CHECK(second.bubble == Approx(0.3));
  CHECK(summary.bubble == Approx(0.2));
  CHECK(first.to_device == 1000);
  CHECK(second.from_device == 50);
  CHECK(second.network == 7);
  CHECK(summary_rows(summary) ==
        std::vector<std::vector<std::string>>{
            {"rank", "compute", "h2d", "cpu", "comm", "send", "bubble", "to device", "from device", "to hosts"},
            {"0", "9 s", "1 s", "4 s", "0", "0", "10.0 %", "1000 B", "0", "0"},
            {"1", "6 s", "0", "0", "1 s", "500 ms", "30.0 %", "0", "50 B", "7 B"},
            {"all", "15 s", "1 s", "4 s", "1 s", "500 ms", "20.0 %", "1000 B", "50 B", "7 B"}});
}

TEST_CASE("a whole step has tasks of every rank and trains, and an evaluation is none") {
  CHECK(whole_steps(two_ranks()) == std::vector<std::int64_t>{0, 1, 2});
  CHECK(whole_steps(Trace()).empty());
  CHECK(whole_steps(Trace({compute(0, TaskKind::forward, 0, 1, plan::kNoStep), compute(0, TaskKind::backward, 0, 1, 3),
                           compute(0, TaskKind::forward, 1, 2, 4)})) == std::vector<std::int64_t>{3});
  CHECK(whole_steps(Trace({compute(0, TaskKind::backward, 0, 1, 3), compute(1, TaskKind::backward, 0, 1, 3),
                           compute(0, TaskKind::backward, 1, 2, 4)})) == std::vector<std::int64_t>{3});
}

TEST_CASE("the page shows the step's tasks, its bubbles and its table, and needs nothing from elsewhere") {
  const Trace trace = two_ranks();
  const std::string page = page_of("a <run>", trace, 1, {});
  CHECK_THAT(page, Contains("<h1>a &lt;run&gt;</h1>"));
  CHECK_THAT(page, Contains("<meta name=\"viewport\""));
  CHECK_THAT(page, Contains("<h2>Step 2</h2>"));
  CHECK_THAT(page, Contains("<th>bubble</th>"));
  CHECK_THAT(page, Contains("<td>30.0 %</td>"));
  CHECK_THAT(page, Contains("fetch u1, stage 0: 0 ms to 1 s (1 s)"));
  CHECK_THAT(page, Contains("class=\"pale\"><title>forward u1 of step 3, stage 0: 4 s to 5 s (1 s)"));
  CHECK(count(page, "class=\"idle\"><title>idle: ") == 2);
  CHECK_THAT(page, Contains("idle: 1 s to 4 s (3 s)"));  // rank 1 until it works for step 2, then for step 1
  CHECK_THAT(page, Contains("idle: 5 s to 6 s (1 s)"));  // rank 0 between its passes
  CHECK_THAT(page, !Contains("class=\"curve\""));
  CHECK_THAT(page, !Contains("left out") && !Contains("It was cut"));
  CHECK_THAT(page_of("run", Trace(trace.slices, 12), 1, {}), Contains("It was cut: 12 tasks"));
  CHECK(problems_of(page) == "");
}

TEST_CASE("positions in the drawing stay inside it") {
  const std::string page = page_of("run", two_ranks(), 1, {});
  const std::regex box("<rect x=\"([0-9.-]+)%\" y=\"[0-9.]+\" width=\"([0-9.-]+)%\"");
  int boxes = 0;
  for (std::sregex_iterator it(page.begin(), page.end(), box), end; it != end; ++it, ++boxes) {
    const double x = std::stod((*it)[1]), width = std::stod((*it)[2]);
    CHECK(x >= 0);
    CHECK(width > 0);
    CHECK(x + width <= 100.002);
  }
  CHECK(boxes == 12);  // nine tasks of the step, one of the next in its time, two bubbles
}

TEST_CASE("a task without length is drawn, at the end of the time too") {
  const Trace trace({compute(0, TaskKind::backward, 0, 1, 0), slice(0, TaskKind::commit, StreamKind::cpu, 1, 1, 0)});
  CHECK_THAT(page_of("run", trace, 0, {}), Contains("<title>commit u1, stage 0: 1 s to 1 s (0 ms)"));
}

TEST_CASE("curves are drawn of metrics that can be drawn") {
  const std::vector<MetricPoint> points = {
      {10, 3.5, std::nullopt, 1000, 0.25}, {20, std::nullopt, 3.25, 2000}, {30, 2.5, std::nullopt, 3000, 0.125}};
  const std::string curves = curves_of(points);
  CHECK(count(curves, "<svg class=\"curve\"") == 3);  // loss, throughput, learning rate
  CHECK(count(curves, "<circle class=\"dot\"") == 1);
  CHECK_THAT(curves, Contains("held out 3.25") && Contains("loss (rings: held out)"));
  CHECK_THAT(curves, !Contains("nan") && !Contains("inf"));
  CHECK(curves_of({}).empty());
  CHECK(curves_of({{1, 2.0, std::nullopt, 100}}).empty());
  CHECK(count(curves_of({{1, 2.0, {}, {}}, {2, 2.0, {}, {}}}), "<svg class=\"curve\"") == 1);  // flat, and no throughput
}

TEST_CASE("pointing at a chart shows the step and the value of every run there") {
  const std::string curves = metric_curves(
      {run_of("a", {}, 0, {{10, 3.5}, {20, 3.25}, {30, 3.125}}), run_of("b", {}, 0, {{10, 2.5}, {20, 2.25}, {30, 2.125}})});
  CHECK(count(curves, "<g class=\"p\">") == 3);
  CHECK(count(curves, "<polyline") == 2);
  const std::string pointed = curves.substr(curves.find("step 20"), 200);
  CHECK_THAT(pointed, Contains(">3.25<") && Contains(">2.25<"));
  // The columns lie side by side and cover the drawing.
  const std::regex column("<g class=\"p\"><rect x=\"([0-9.]+)\" y=\"[0-9.]+\" width=\"([0-9.]+)\"");
  double end = 0;
  for (std::sregex_iterator it(curves.begin(), curves.end(), column), last; it != last; ++it) {
    if (end > 0) CHECK(std::stod((*it)[1]) == Approx(end).margin(0.11));
    end = std::stod((*it)[1]) + std::stod((*it)[2]);
  }
  CHECK(end == Approx(420).margin(0.2));
}

TEST_CASE("a page of all there is of a run is well-formed and loads nothing") {
  const std::string page = report_page({whole_run("first", 0.001)});
  CHECK(problems_of(page) == "");
  for (const char* part : {"<h2>Curves over steps</h2>", "<h2>Memory</h2>", "<h2>Step 2</h2>", "<h2>Samples</h2>",
                           "<h2>Configuration</h2>", "<h2>Model and environment</h2>", "30 of 40", "2.7500 (step 30)",
                           "non-finite loss at step 30", "<title>parameters: 3.00 MiB</title>", "x=\"75.000%\"", "8.00 MiB",
                           "<b>In &lt;the&gt;</b>old text", "new &amp; better", "spipe-train &lt;x&gt; &amp; more",
                           "gradient norm over steps", "learning rate over steps", "@media print", "name=\"viewport\""}) {
    INFO(part);
    CHECK_THAT(page, Contains(part));
  }
}

TEST_CASE("runs are compared on one page: curves over each other, what differs, memory side by side") {
  const std::string page = report_page({whole_run("first", 0.001), whole_run("second", 0.002), run_of("third", {}, 0)});
  CHECK(problems_of(page) == "");
  CHECK_THAT(page, Contains("<h1>first, second, third</h1>"));
  const std::size_t differs = page.find("What differs:");
  REQUIRE(differs != std::string::npos);
  const std::string table = page.substr(differs, page.find("</table>", differs) - differs);
  CHECK_THAT(table, Contains("<td>optimizer.lr</td><td>0.001000</td><td>0.002000</td><td></td>"));
  CHECK_THAT(report_page({whole_run("first", 0.001), whole_run("second", 0.001)}), Contains("<p>Nothing differs.</p>"));
  CHECK_THAT(page, Contains("<h2>Step 2 of first</h2>") && !Contains("<h2>Step 2 of second</h2>"));
  CHECK(count(page, "class=\"bar\" role") == 4);
}

TEST_CASE("the check of pages sees what is wrong with one") {
  const std::string good = report_page({whole_run("first", 0.001)});
  const std::vector<std::pair<std::string, std::string>> mistakes = {
      {"</table>", ""},
      {"<h1>", "<h1><p>"},
      {"<td>", "<td class=x>"},
      {"<h1>", "<h1>a & b"},
      {"<h1>", "<h1>a < b"},
      {"<h1>", "<script></script><h1>"},
      {"<h1>", "<img src=\"http://x.org/y.png\"><h1>"},
      {"<style>", "<style>@import 'x.css';"},
      {"<!doctype html>", ""},
      {"id=\"w4\"", "id=\"w1\""},
      {"<rect ", "<rect x=\"1\" x=\"2\" "},
      {"<tr>", "<tr>text"},
  };
  for (const auto& [from, to] : mistakes) {
    INFO(from << " -> " << to);
    std::string bad = good;
    const std::size_t at = bad.find(from);
    REQUIRE(at != std::string::npos);
    bad.replace(at, from.size(), to);
    CHECK_FALSE(html_problems(bad).empty());
  }
}

TEST_CASE("run.json is read as it was written, and what is none is refused") {
  const TemporaryFolder folder;
  const auto file = folder / "run.json";
  const RunFacts facts = some_facts();
  write_run_facts(file, facts);
  const RunFacts read = read_run_facts(file);
  CHECK(read.started == facts.started);
  CHECK(read.total_steps == 40);
  CHECK(read.environment == facts.environment);
  CHECK(read.model == facts.model);
  CHECK(read.device.at(1).name == "saved");
  CHECK(read.device.at(1).bytes == 1 << 20);
  CHECK(read.device_limit == 8 << 20);
  CHECK(read.host_limit == 0);
  REQUIRE(read.end);
  CHECK(read.end->how == "failed");
  CHECK(read.end->seconds == 3600);
  RunFacts running = facts;
  running.end.reset();
  write_run_facts(file, running);
  CHECK_FALSE(read_run_facts(file).end);
  for (const char* bad : {"", "{}", "[]", "{\"format\": 2}", "{\"format\": 1, \"started\": 5}"}) {
    write_text_atomic(file, bad);
    CHECK_THROWS_WITH(read_run_facts(file), Contains("run.json: is not what this version writes"));
  }
}

TEST_CASE("long curves are thinned to means") {
  std::vector<MetricPoint> points;
  for (std::uint64_t step = 1; step <= 100'000; ++step) points.push_back({step, step % 2 == 0 ? 1.0 : 3.0, {}, {}});
  const std::string curves = curves_of(points);
  CHECK(count(curves, ",") < 900);
  CHECK(count(curves, "<g class=\"p\">") <= 120);
  CHECK(curves.size() < 60'000);
}

TEST_CASE("metrics are read as they were written, a torn last line is passed over, other lines are refused") {
  const TemporaryFolder folder;
  const auto file = folder / "metrics.jsonl";
  {
    MetricsWriter writer(file, 0);
    StepMetrics metrics;
    metrics.step = 1;
    metrics.loss = 2.5;
    metrics.tokens_per_s = 128;
    writer.write(metrics);
    metrics.step = 2;
    metrics.loss = std::nan("");
    metrics.eval_loss = 3.5;
    writer.write(metrics);
  }
  const std::vector<MetricPoint> points = read_metrics(file);
  REQUIRE(steps_of(points) == std::vector<std::uint64_t>{1, 2});
  CHECK(points[0].loss == 2.5);
  CHECK(points[0].tokens_per_s == 128);
  CHECK_FALSE(points[0].eval_loss);
  CHECK_FALSE(points[1].loss);
  CHECK(points[1].eval_loss == 3.5);
  const std::string whole = read_text(file);
  write_text_atomic(file, whole + R"({"step":3,"lo)");
  CHECK(steps_of(read_metrics(file)) == std::vector<std::uint64_t>{1, 2});
  for (const char* bad : {"{\"step\":3,\"lo\n", "[]\n", "{}\n", "{\"step\":-1}\n", "\n", "{\"step\":\"3\"}\n"}) {
    write_text_atomic(file, whole + bad);
    INFO(bad);
    CHECK_THROWS_WITH(read_metrics(file), Contains("metrics.jsonl:3: not a line of metrics"));
  }
}

}  // namespace spipe::report
