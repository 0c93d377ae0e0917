// A step of a trace in numbers.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "spipe/base/error.h"
#include "spipe/base/units.h"
#include "spipe/report/page.h"

namespace spipe::report {
namespace {

using plan::StreamKind;
using plan::TimelineSlice;

// Seconds of [from, to] in which one of the slices ran.
double busy_seconds(const std::vector<const TimelineSlice*>& slices, double from, double to) {
  double seconds = 0;
  for (const auto& [begin, end] : plan::busy_intervals(slices)) {
    seconds += std::max(0.0, std::min(end, to) - std::max(begin, from));
  }
  return seconds;
}

void count_bytes(RankSummary& rank, const TimelineSlice& slice) {
  if (slice.stream == StreamKind::h2d || slice.stream == StreamKind::recv) rank.to_device += slice.bytes;
  if (slice.stream == StreamKind::d2h || slice.stream == StreamKind::send) rank.from_device += slice.bytes;
  if (slice.kind == plan::TaskKind::push) rank.network += slice.bytes;
}

std::string time_text(double seconds) {
  if (seconds == 0) return "0";
  if (seconds < 1e-3) return fmt::format("{:.3g} µs", 1e6 * seconds);
  return seconds < 1 ? fmt::format("{:.3g} ms", 1e3 * seconds) : fmt::format("{:.4g} s", seconds);
}

std::string bytes_text(std::uint64_t bytes) { return bytes == 0 ? "0" : format_bytes(bytes); }

}  // namespace

std::vector<std::int64_t> whole_steps(const Trace& trace) {
  std::set<std::uint16_t> ranks;
  std::map<std::int64_t, std::set<std::uint16_t>> steps;
  std::set<std::int64_t> trained;  // where a run ends with an evaluation, the next step was not begun
  for (const TimelineSlice& slice : trace.slices) {
    ranks.insert(slice.rank);
    if (slice.step == plan::kNoStep) continue;
    steps[slice.step].insert(slice.rank);
    if (slice.kind == plan::TaskKind::backward) trained.insert(slice.step);
  }
  std::vector<std::int64_t> whole;
  for (const auto& [step, there] : steps) {
    if (there == ranks && trained.contains(step)) whole.push_back(step);
  }
  return whole;
}

StepSummary summarise(const Trace& trace, std::int64_t step) {
  StepSummary summary{.step = step};
  std::map<std::pair<int, StreamKind>, std::vector<const TimelineSlice*>> streams;
  std::map<int, std::vector<const TimelineSlice*>> computes;  // of all steps
  double first = 0, last = 0;
  bool found = false;
  for (const TimelineSlice& slice : trace.slices) {
    RankSummary& rank = summary.ranks[slice.rank];
    if (slice.stream == StreamKind::compute) computes[slice.rank].push_back(&slice);
    if (slice.step != step) continue;
    first = found ? std::min(first, slice.begin) : slice.begin;
    last = found ? std::max(last, slice.end) : slice.end;
    found = true;
    streams[{slice.rank, slice.stream}].push_back(&slice);
    count_bytes(rank, slice);
  }
  SPIPE_CHECK(found, "a summary is of a step in the trace");
  summary.span = last - first;
  for (const auto& [row, slices] : streams) {
    summary.ranks[row.first].busy[static_cast<std::size_t>(row.second)] = busy_seconds(slices, first, last);
  }
  const auto [from, to] = plan::computing_of(trace.slices, step);
  summary.computing = to - from;
  for (auto& [number, rank] : summary.ranks) {
    if (to > from) rank.bubble = 1 - busy_seconds(computes[number], from, to) / (to - from);
    summary.bubble += rank.bubble / static_cast<double>(summary.ranks.size());
  }
  for (const std::int64_t other : {step + 1, step - 1}) {
    const auto [begin, end] = plan::computing_of(trace.slices, other);
    if (other == plan::kNoStep || end <= begin) continue;
    summary.step_seconds = std::min(summary.step_seconds.value_or(HUGE_VAL), std::abs(begin - from));
  }
  return summary;
}

std::string summary_line(const StepSummary& summary) {
  std::string text;
  if (summary.step_seconds) text = fmt::format("{} a step, ", time_text(*summary.step_seconds));
  return text + fmt::format("{} from its first task to its last, {} from the first to the last computation, bubble {:.1f} %",
                            time_text(summary.span), time_text(summary.computing), 100 * summary.bubble);
}

std::vector<std::vector<std::string>> summary_rows(const StepSummary& summary) {
  RankSummary all;
  for (const auto& [number, rank] : summary.ranks) {
    for (std::size_t s = 0; s < rank.busy.size(); ++s) all.busy[s] += rank.busy[s];
    all.to_device += rank.to_device;
    all.from_device += rank.from_device;
    all.network += rank.network;
  }
  all.bubble = summary.bubble;
  const auto row = [&](std::string name, const RankSummary& rank) {
    std::vector<std::string> cells = {std::move(name)};
    for (std::size_t s = 0; s < rank.busy.size(); ++s) {
      if (all.busy[s] > 0) cells.push_back(time_text(rank.busy[s]));
    }
    cells.push_back(fmt::format("{:.1f} %", 100 * rank.bubble));
    if (all.to_device > 0) cells.push_back(bytes_text(rank.to_device));
    if (all.from_device > 0) cells.push_back(bytes_text(rank.from_device));
    if (all.network > 0) cells.push_back(bytes_text(rank.network));
    return cells;
  };
  std::vector<std::string> heading = {"rank"};
  for (std::size_t s = 0; s < all.busy.size(); ++s) {
    if (all.busy[s] > 0) heading.push_back(plan::stream_name(static_cast<StreamKind>(s)));
  }
  heading.push_back("bubble");
  if (all.to_device > 0) heading.push_back("to device");
  if (all.from_device > 0) heading.push_back("from device");
  if (all.network > 0) heading.push_back("to hosts");
  std::vector<std::vector<std::string>> rows = {std::move(heading)};
  for (const auto& [number, rank] : summary.ranks) rows.push_back(row(std::to_string(number), rank));
  if (summary.ranks.size() > 1) rows.push_back(row("all", all));
  return rows;
}

}  // namespace spipe::report
