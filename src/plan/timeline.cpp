// Slices, and the trace file they become.
#include "spipe/plan/timeline.h"

#include <fmt/core.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>

namespace spipe::plan {

TimelineSlice slice_of(const Task& task, double begin, double end, std::int64_t step) {
  return {.task = task.id,
          .kind = task.kind,
          .stream = task.stream,
          .rank = task.rank,
          .stage = task.stage,
          .flags = task.flags,
          .unit = task.unit,
          .micro_batch = task.micro_batch,
          .bytes = task.bytes,
          .step = step,
          .begin = begin,
          .end = end};
}

std::vector<TimelineSlice> slices_of(const Plan& plan, const Simulation& simulation) {
  std::vector<TimelineSlice> slices;
  slices.reserve(plan.tasks.size());
  for (const Task& task : plan.tasks) {
    slices.push_back(slice_of(task, simulation.tasks[task.id].begin, simulation.tasks[task.id].end));
  }
  return slices;
}

std::string slice_name(const TimelineSlice& slice) {
  const bool again = slice.kind == TaskKind::forward && (slice.flags & kRecompute) != 0;
  std::string name = again ? "recompute" : task_kind_name(slice.kind);
  if (slice.unit >= 0) name += fmt::format(" u{}", slice.unit);
  if (slice.micro_batch >= 0) name += fmt::format(" m{}", slice.micro_batch);
  return name;
}

std::pair<double, double> computing_of(const std::vector<TimelineSlice>& slices, std::optional<std::int64_t> step) {
  std::pair<double, double> span = {0, 0};
  bool found = false;
  for (const TimelineSlice& slice : slices) {
    if (slice.stream != StreamKind::compute || (step && slice.step != *step)) continue;
    span.first = found ? std::min(span.first, slice.begin) : slice.begin;
    span.second = found ? std::max(span.second, slice.end) : slice.end;
    found = true;
  }
  return span;
}

std::vector<std::pair<double, double>> busy_intervals(const std::vector<const TimelineSlice*>& slices) {
  std::vector<std::pair<double, double>> sorted;
  for (const TimelineSlice* slice : slices) sorted.emplace_back(slice->begin, slice->end);
  std::sort(sorted.begin(), sorted.end());
  std::vector<std::pair<double, double>> intervals;
  for (const auto& [begin, end] : sorted) {
    if (!intervals.empty() && begin <= intervals.back().second) {
      intervals.back().second = std::max(intervals.back().second, end);
    } else {
      intervals.emplace_back(begin, end);
    }
  }
  return intervals;
}

namespace {

class TraceText {
 public:
  explicit TraceText(std::uint64_t left_out) {
    fmt::format_to(out_,
                   "{{\"displayTimeUnit\":\"ms\",\"otherData\":{{\"program\":\"spipe\",\"version\":1,\"left_out\":{}}},\n",
                   left_out);
    text_ += "\"traceEvents\":[";
  }

  // Viewers want slices of a thread to be nested or apart: one that overlaps moves to the stream's next lane. Whole
  // nanoseconds, since begins and lengths rounded apart could overlap.
  void slice(const TimelineSlice& slice, double origin) {
    const std::int64_t begin = std::llround(1e9 * (slice.begin - origin)), end = std::llround(1e9 * (slice.end - origin));
    std::vector<std::int64_t>& lanes = ends_[{slice.rank, static_cast<int>(slice.stream)}];
    const auto free = std::find_if(lanes.begin(), lanes.end(), [&](std::int64_t busy) { return busy <= begin; });
    const auto lane = static_cast<int>(free - lanes.begin());
    if (free == lanes.end()) {
      lanes.push_back(end);
    } else {
      *free = end;
    }
    event();
    fmt::format_to(out_,
                   R"({{"ph":"X","name":"{}","cat":"{}","pid":{},"tid":{},"ts":{}.{:03},"dur":{}.{:03},)"
                   R"("args":{{"task":{},"bytes":{},"stage":{},"step":{},"unit":{},"micro_batch":{},"flags":{}}}}})",
                   slice_name(slice), task_kind_name(slice.kind), slice.rank,
                   static_cast<int>(slice.stream) + kStreamCount * lane, begin / 1000, begin % 1000, (end - begin) / 1000,
                   (end - begin) % 1000, slice.task, slice.bytes, slice.stage, slice.step + 1, slice.unit, slice.micro_batch,
                   slice.flags);
  }

  // After the slices: only now all lanes are known.
  std::string end(std::uint64_t left_out) {
    int last_rank = -1;
    for (const auto& [row, lanes] : ends_) {
      const auto& [rank, stream] = row;
      if (rank != last_rank) name_rank(rank, left_out);
      last_rank = rank;
      for (int lane = 0; lane < static_cast<int>(lanes.size()); ++lane) {
        const std::string name = stream_name(static_cast<StreamKind>(stream));
        name_thread(rank, stream + kStreamCount * lane, lane == 0 ? name : fmt::format("{} ({})", name, lane + 1),
                    stream * 1000 + lane);
      }
    }
    text_ += "]}\n";
    return std::move(text_);
  }

 private:
  void event() {
    if (!first_) text_ += ",\n";
    first_ = false;
  }

  void name_rank(int rank, std::uint64_t left_out) {
    event();
    fmt::format_to(out_, R"({{"ph":"M","name":"process_name","pid":{0},"args":{{"name":"rank {0}"}}}})", rank);
    event();
    fmt::format_to(out_, R"({{"ph":"M","name":"process_sort_index","pid":{0},"args":{{"sort_index":{0}}}}})", rank);
    if (left_out == 0) return;
    event();
    fmt::format_to(out_, R"({{"ph":"M","name":"process_labels","pid":{},"args":{{"labels":"cut: {} later tasks left out"}}}})",
                   rank, left_out);
  }

  void name_thread(int rank, int thread, const std::string& name, int order) {
    event();
    fmt::format_to(out_, R"({{"ph":"M","name":"thread_name","pid":{},"tid":{},"args":{{"name":"{}"}}}})", rank, thread, name);
    event();
    fmt::format_to(out_, R"({{"ph":"M","name":"thread_sort_index","pid":{},"tid":{},"args":{{"sort_index":{}}}}})", rank,
                   thread, order);
  }

  std::string text_;
  std::back_insert_iterator<std::string> out_{text_};
  bool first_ = true;
  std::map<std::pair<int, int>, std::vector<std::int64_t>> ends_;  // of (rank, stream): when its lanes are free
};

}  // namespace

std::string chrome_trace(std::vector<TimelineSlice> slices, std::uint64_t left_out) {
  std::stable_sort(slices.begin(), slices.end(),
                   [](const TimelineSlice& a, const TimelineSlice& b) { return a.begin < b.begin; });
  TraceText text(left_out);
  for (const TimelineSlice& slice : slices) text.slice(slice, slices.front().begin);
  return text.end(left_out);
}

}  // namespace spipe::plan
