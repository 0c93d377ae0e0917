// Timelines of simulated and of real steps, in the same two formats: Chrome/Perfetto JSON, and HTML with inline SVG that needs
// nothing else.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "spipe/plan/plan.h"
#include "spipe/plan/simulator.h"

namespace spipe::plan {

inline constexpr std::int64_t kNoStep = -1;  // of slices that belong to no training step: an evaluation

// One run of one task. Times in seconds from any origin that all slices share; steps count from 0.
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
[[nodiscard]] std::string slice_name(const TimelineSlice& slice);  // "recompute u3 m1"

// chrome://tracing and ui.perfetto.dev (docs/formats.md): one process a rank, one thread a stream, and more where its tasks
// overlap; in order of begin, whole nanoseconds from the first. `left_out`: tasks that should be there; the file says so.
[[nodiscard]] std::string chrome_trace(std::vector<TimelineSlice> slices, std::uint64_t left_out = 0);

// From the first to the last task on any rank's compute stream: what is idle in it is the bubble. Of one step, or of all
// slices; (0, 0) without such tasks.
[[nodiscard]] std::pair<double, double> computing_of(const std::vector<TimelineSlice>& slices,
                                                     std::optional<std::int64_t> step);
// Slices as disjoint intervals in order of begin: tasks of a stream may overlap.
[[nodiscard]] std::vector<std::pair<double, double>> busy_intervals(const std::vector<const TimelineSlice*>& slices);

// Legend and drawing, to be put into a page: ranks x streams over time, coloured by kind; bubbles are hatched. Every slice says
// what it is when pointed at. Neighbours too narrow to be told apart are drawn as one. With a step: the time from its first
// begin to its last end, other steps' slices in it pale. Wide drawings scroll and can be widened.
[[nodiscard]] std::string timeline_figure(const std::vector<TimelineSlice>& slices, std::optional<std::int64_t> step);
// The least of 1, 2 and 5 times a power of ten that is at least `least` (above 0): between two ticks of an axis.
[[nodiscard]] double round_tick(double least);
[[nodiscard]] std::string html_escaped(std::string_view text);
// A whole page in the figure's style and `more_style` (CSS); `body` is HTML.
[[nodiscard]] std::string html_page(std::string_view title, std::string_view body, std::string_view more_style = {});

struct TimelineText {
  std::string title, summary;  // plain text
};
// Title, summary and the figure of all slices.
[[nodiscard]] std::string timeline_html(const std::vector<TimelineSlice>& slices, const TimelineText& text);

}  // namespace spipe::plan
