#include "spipe/plan/timeline.h"

#include <fmt/core.h>
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>

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

namespace {

std::string name_of(const TimelineSlice& slice) {
  const bool again = slice.kind == TaskKind::forward && (slice.flags & kRecompute) != 0;
  std::string name = again ? "recompute" : task_kind_name(slice.kind);
  if (slice.unit >= 0) name += fmt::format(" u{}", slice.unit);
  if (slice.micro_batch >= 0) name += fmt::format(" m{}", slice.micro_batch);
  return name;
}

double origin_of(const std::vector<TimelineSlice>& slices) {
  double origin = slices.empty() ? 0 : slices.front().begin;
  for (const TimelineSlice& slice : slices) origin = std::min(origin, slice.begin);
  return origin;
}

}  // namespace

std::string chrome_trace(const std::vector<TimelineSlice>& slices) {
  const double origin = origin_of(slices);
  std::string text = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";
  auto out = std::back_inserter(text);
  std::set<std::uint16_t> ranks;
  for (const TimelineSlice& slice : slices) ranks.insert(slice.rank);
  bool first = true;
  const auto comma = [&] {
    if (!first) text += ",\n";
    first = false;
  };
  for (const std::uint16_t rank : ranks) {
    comma();
    fmt::format_to(out, R"({{"ph":"M","name":"process_name","pid":{0},"args":{{"name":"rank {0}"}}}})", rank);
    for (int s = 0; s < kStreamCount; ++s) {
      comma();
      fmt::format_to(out, R"({{"ph":"M","name":"thread_name","pid":{},"tid":{},"args":{{"name":"{}"}}}})", rank, s,
                     stream_name(static_cast<StreamKind>(s)));
    }
  }
  for (const TimelineSlice& slice : slices) {
    comma();
    fmt::format_to(out,
                   R"({{"ph":"X","name":"{}","cat":"{}","pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f},)"
                   R"("args":{{"task":{},"bytes":{},"stage":{},"step":{}}}}})",
                   name_of(slice), task_kind_name(slice.kind), slice.rank, static_cast<int>(slice.stream),
                   1e6 * (slice.begin - origin), 1e6 * (slice.end - slice.begin), slice.task, slice.bytes, slice.stage,
                   slice.step);
  }
  text += "]}\n";
  return text;
}

namespace {

constexpr double kWidth = 1600, kLeft = 90, kRow = 13, kRankGap = 8, kTop = 24;
constexpr double kNarrow = 0.6;  // pixels below which neighbours are drawn as one

const char* colour_of(const TimelineSlice& slice) {
  switch (slice.kind) {
    case TaskKind::forward:
      return (slice.flags & kRecompute) != 0 ? "#8fc1e3" : "#2f7fc1";
    case TaskKind::loss:
      return "#7b3fa0";
    case TaskKind::backward:
      return "#2e9e5b";
    case TaskKind::reduce:
      return "#9aa63a";
    case TaskKind::fetch:
      return "#e08a2e";
    case TaskKind::offload:
      return "#b5542a";
    case TaskKind::send:
    case TaskKind::recv:
    case TaskKind::push:
    case TaskKind::pull:
      return "#d4b52f";
    case TaskKind::norm:
      return "#404040";
    case TaskKind::optimize:
    case TaskKind::commit:
      return "#c23b4e";
    case TaskKind::input:
    case TaskKind::park:
    case TaskKind::unpark:
    case TaskKind::result:
    case TaskKind::save:
      return "#8a8a8a";
  }
  return "#8a8a8a";
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else
      out += c;
  }
  return out;
}

class Page {
 public:
  explicit Page(const std::vector<TimelineSlice>& slices) : origin_(origin_of(slices)) {
    double end = origin_;
    for (const TimelineSlice& slice : slices) {
      rows_[{slice.rank, slice.stream}].push_back(&slice);
      end = std::max(end, slice.end);
    }
    for (auto& [row, list] : rows_) {
      std::stable_sort(list.begin(), list.end(),
                       [](const TimelineSlice* a, const TimelineSlice* b) { return a->begin < b->begin; });
    }
    seconds_ = std::max(end - origin_, 1e-9);
  }

  std::string svg() {
    std::string body;
    double y = kTop;
    int rank = -1;
    for (const auto& [row, list] : rows_) {
      if (row.first != rank) y += rank < 0 ? 0 : kRankGap;
      rank = row.first;
      draw_row(body, row.second, rank, list, y);
      y += kRow;
    }
    std::string axis;
    for (int tick = 0; tick <= 10; ++tick) {
      const double x = kLeft + kWidth * tick / 10;
      fmt::format_to(std::back_inserter(axis),
                     "<line x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"18\" y2=\"{1:.1f}\" class=\"g\"/><text x=\"{0:.1f}\" y=\"13\" "
                     "text-anchor=\"middle\">{2:.4g} s</text>\n",
                     x, y, seconds_ * tick / 10);
    }
    return fmt::format("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {:.0f} {:.0f}\" width=\"100%\">\n{}{}</svg>\n",
                       kLeft + kWidth + 30, y + 10, axis, body);
  }

 private:
  [[nodiscard]] double x_of(double time) const { return kLeft + kWidth * (time - origin_) / seconds_; }

  void draw_row(std::string& body, StreamKind stream, int rank, const std::vector<const TimelineSlice*>& list, double y) {
    auto out = std::back_inserter(body);
    const bool compute = stream == StreamKind::compute;
    fmt::format_to(out, "<text x=\"{:.0f}\" y=\"{:.1f}\" text-anchor=\"end\">r{} {}</text>\n", kLeft - 4, y + kRow - 3, rank,
                   stream_name(stream));
    // Behind the compute stream: what stays visible of it is idle time.
    fmt::format_to(out, "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" class=\"{}\"/>\n", kLeft, y, kWidth,
                   kRow - 1, compute ? "idle" : "row");
    for (std::size_t i = 0; i < list.size();) {
      const TimelineSlice& slice = *list[i];
      double end = slice.end;
      std::size_t next = i + 1;
      const bool narrow = x_of(slice.end) - x_of(slice.begin) < kNarrow;
      while (narrow && next < list.size() && colour_of(*list[next]) == colour_of(slice) &&
             x_of(list[next]->end) - x_of(slice.begin) < 4 * kNarrow && x_of(list[next]->begin) - x_of(end) < kNarrow / 4) {
        end = std::max(end, list[next++]->end);
      }
      const std::string more = next - i > 1 ? fmt::format(" and {} more", next - i - 1) : "";
      if (slice.end > slice.begin || !more.empty()) {
        fmt::format_to(out,
                       "<rect x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\" fill=\"{}\"><title>{}{}, stage {}: "
                       "{:.6g} s to {:.6g} s ({:.3g} ms)</title></rect>\n",
                       x_of(slice.begin), y, std::max(0.05, x_of(end) - x_of(slice.begin)), kRow - 1, colour_of(slice),
                       name_of(slice), more, slice.stage, slice.begin - origin_, end - origin_, 1e3 * (end - slice.begin));
      }
      i = next;
    }
  }

  double origin_ = 0, seconds_ = 0;
  std::map<std::pair<int, StreamKind>, std::vector<const TimelineSlice*>> rows_;
};

std::string legend() {
  struct Entry {
    const char* text;
    TaskKind kind;
    std::uint16_t flags = 0;
  };
  constexpr Entry kEntries[] = {{"forward", TaskKind::forward},   {"recompute", TaskKind::forward, kRecompute},
                                {"loss", TaskKind::loss},         {"backward", TaskKind::backward},
                                {"reduce", TaskKind::reduce},     {"fetch", TaskKind::fetch},
                                {"offload", TaskKind::offload},   {"messages", TaskKind::send},
                                {"norm", TaskKind::norm},         {"update", TaskKind::optimize},
                                {"other copies", TaskKind::input}};
  std::string text = "<p class=\"legend\">";
  for (const Entry& entry : kEntries) {
    const TimelineSlice slice{.kind = entry.kind, .flags = entry.flags};
    text += fmt::format("<span><i style=\"background:{}\"></i>{}</span> ", colour_of(slice), entry.text);
  }
  return text + "<span><i class=\"idle\"></i>idle compute</span></p>\n";
}

constexpr const char* kStyle =
    "body{font:14px system-ui,sans-serif;margin:1.5em;color:#222;background:#fff}"
    "svg text{font:10px system-ui,sans-serif;fill:#444}pre{background:#f4f4f4;padding:.7em;overflow:auto}"
    ".idle{fill:#f6d5d5;background:#f6d5d5}.row{fill:#f3f3f3}.g{stroke:#ddd}"
    ".legend span{margin-right:1em;white-space:nowrap}.legend i{display:inline-block;width:1em;height:.8em;margin-right:.3em}";

}  // namespace

std::string timeline_html(const std::vector<TimelineSlice>& slices, const TimelineText& text) {
  const std::string title = escaped(text.title);
  return fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{0}</title><style>{1}</style></head><body>\n"
      "<h1>{0}</h1>\n<pre>{2}</pre>\n{3}{4}</body></html>\n",
      title, kStyle, escaped(text.summary), legend(), Page(slices).svg());
}

}  // namespace spipe::plan
