// Timelines of simulated and of real steps, in the same two formats: Chrome/Perfetto JSON, and one HTML page with inline SVG
// that needs nothing else.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spipe/plan/plan.h"
#include "spipe/plan/simulator.h"

namespace spipe::plan {

// One run of one task. Times in seconds from any origin that all slices share.
struct TimelineSlice {
  std::uint32_t task = 0;
  TaskKind kind = TaskKind::forward;
  StreamKind stream = StreamKind::compute;
  std::uint16_t rank = 0, stage = 0, flags = 0;
  std::int32_t unit = -1, micro_batch = -1;
  std::uint64_t bytes = 0;
  std::int64_t step = 0;
  double begin = 0, end = 0;
};

[[nodiscard]] TimelineSlice slice_of(const Task& task, double begin, double end, std::int64_t step = 0);
[[nodiscard]] std::vector<TimelineSlice> slices_of(const Plan& plan, const Simulation& simulation);

// chrome://tracing and ui.perfetto.dev: one process a rank, one thread a stream, microseconds.
[[nodiscard]] std::string chrome_trace(const std::vector<TimelineSlice>& slices);

struct TimelineText {
  std::string title, summary;  // plain text
};
// Ranks x streams over time, coloured by kind; idle compute stays visible as background. Every slice says what it is when
// pointed at. Neighbours too narrow to be told apart are drawn as one.
[[nodiscard]] std::string timeline_html(const std::vector<TimelineSlice>& slices, const TimelineText& text);

}  // namespace spipe::plan
