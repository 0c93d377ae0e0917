// The report of runs as one HTML page: curves, memory, a step of the trace, samples, configuration and environment.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "spipe/plan/plan.h"
#include "spipe/report/run_facts.h"
#include "spipe/report/trace.h"

namespace spipe::report {

// Of one step; seconds and bytes.
struct RankSummary {
  std::array<double, plan::kStreamCount> busy{};  // time in which the stream ran a task of the step
  double bubble = 0;                              // of the time in StepSummary::computing, in which the rank computed nothing
  std::uint64_t to_device = 0, from_device = 0, network = 0;  // over the link, in both its directions; pushed to other hosts
};
struct StepSummary {
  std::int64_t step = 0;  // from 0
  // Between its first computation and a neighbour's; the shorter, as an evaluation may lie between.
  std::optional<double> step_seconds;
  double span = 0;       // from the first begin to the last end of a task
  double computing = 0;  // from the first to the last computation of any rank
  double bubble = 0;     // of `computing`, over all ranks; work for other steps in the trace is not idle
  std::map<int, RankSummary> ranks;
};
// Steps that trained and in which every rank of the trace has tasks, ascending.
[[nodiscard]] std::vector<std::int64_t> whole_steps(const Trace& trace);
[[nodiscard]] StepSummary summarise(const Trace& trace, std::int64_t step);
// "262 ms a step, ..., bubble 44.2 %"
[[nodiscard]] std::string summary_line(const StepSummary& summary);
// Heading, a row a rank, and one of all; streams and directions that nobody used are left out. For table() and for pages.
[[nodiscard]] std::vector<std::vector<std::string>> summary_rows(const StepSummary& summary);

// A line of metrics.jsonl. Nothing: absent, or not finite.
struct MetricPoint {
  std::uint64_t step = 0;  // from 1
  std::optional<double> loss, eval_loss, tokens_per_s, lr, grad_norm, step_seconds, tokens;
};
// Lines of a metrics.jsonl. A last line that is torn (a job that was killed, or writes it now) is passed over; other lines that
// are no metrics are errors that name file and line.
[[nodiscard]] std::vector<MetricPoint> read_metrics(const std::filesystem::path& file);

// A line of samples.jsonl.
struct SampleText {
  std::uint64_t step = 0;
  std::string prompt, text;
};
[[nodiscard]] std::vector<SampleText> read_samples(const std::filesystem::path& file);

// What is known of a run; nothing but the name is needed.
struct ReportedRun {
  std::string name;
  std::vector<MetricPoint> metrics;
  std::vector<SampleText> samples;
  std::optional<RunFacts> facts;
  std::string config;  // config.yaml
  std::optional<Trace> trace;
  std::optional<std::int64_t> step;  // of the trace, from 0, whole; given where trace is
};

// Loss (and held-out loss), learning rate, gradient norm and throughput over steps, a chart each with a line a run, as HTML.
// Pointing at a place of a chart shows the values there, without a script. Charts with fewer than two points are left out.
[[nodiscard]] std::string metric_curves(const std::vector<ReportedRun>& runs);
// What runs of this place in the list are drawn in.
[[nodiscard]] const char* run_colour(std::size_t run);

// One page that needs no other file and no network, for screens of any width and for paper. Runs are compared where there are
// several; the timeline is that of the first run with a trace.
[[nodiscard]] std::string report_page(const std::vector<ReportedRun>& runs);

}  // namespace spipe::report
