#include <catch2/catch.hpp>
#include <cmath>
#include <regex>
#include <string>
#include <vector>

#include "spipe/base/file.h"
#include "spipe/report/page.h"
#include "spipe/report/report.h"
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
  const std::string page = report_page("a <run>", trace, 1, {});
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
  CHECK_THAT(report_page("run", Trace(trace.slices, 12), 1, {}), Contains("It was cut: 12 tasks"));
  // Nothing is loaded: no scripts, images, style sheets or addresses.
  for (const char* loads : {"<script", "<img", "<link", "src=", "href=", "http:", "https:", "@import"}) {
    INFO(loads);
    CHECK_THAT(page, !Contains(loads));
  }
}

TEST_CASE("positions in the drawing stay inside it") {
  const std::string page = report_page("run", two_ranks(), 1, {});
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
  CHECK_THAT(report_page("run", trace, 0, {}), Contains("<title>commit u1, stage 0: 1 s to 1 s (0 ms)"));
}

TEST_CASE("curves are drawn of metrics that can be drawn") {
  const std::vector<MetricPoint> points = {
      {10, 3.5, std::nullopt, 1000}, {20, std::nullopt, 3.25, 2000}, {30, 2.5, std::nullopt, 3000}};
  const std::string curves = metric_curves(points);
  CHECK(count(curves, "<svg class=\"curve\"") == 2);
  CHECK(count(curves, "<circle") == 1);
  CHECK_THAT(curves, Contains("step 20: 3.25"));
  CHECK_THAT(curves, Contains("loss (dots: held out)"));
  CHECK_THAT(curves, !Contains("nan") && !Contains("inf"));
  CHECK(metric_curves({}).empty());
  CHECK(metric_curves({{1, 2.0, std::nullopt, 100}}).empty());
  CHECK(count(metric_curves({{1, 2.0, {}, {}}, {2, 2.0, {}, {}}}), "<svg class=\"curve\"") == 1);  // flat, and no throughput
  CHECK_THAT(report_page("run", two_ranks(), 1, points), Contains("<h2>30 steps</h2>"));
}

TEST_CASE("long curves are thinned to means") {
  std::vector<MetricPoint> points;
  for (std::uint64_t step = 1; step <= 100'000; ++step) points.push_back({step, step % 2 == 0 ? 1.0 : 3.0, {}, {}});
  const std::string curves = metric_curves(points);
  CHECK(count(curves, ",") < 900);
  CHECK(curves.size() < 20'000);
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
