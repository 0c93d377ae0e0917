// The drawing of a timeline. Positions along time are percentages, so that it fits any screen or sheet while text keeps its
// size; widening it needs no script.
#include <fmt/core.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <set>

#include "spipe/plan/timeline.h"

namespace spipe::plan {
namespace {

constexpr double kTop = 18, kComputeRow = 22, kRow = 12, kRankGap = 12;  // pixels
// Per cent of the width.
constexpr double kNarrow = 0.012;              // below, neighbours are drawn as one
constexpr double kThinnest = 0.03;             // tasks without length can be seen too
constexpr double kDense = 0.4, kPixel = 0.12;  // slices below kDense reach a pixel under the next one

const char* colour_of(const TimelineSlice& slice) {
  switch (slice.kind) {
    case TaskKind::forward:
      return (slice.flags & kRecompute) != 0 ? "#9cc9ea" : "#2f7fc1";
    case TaskKind::loss:
      return "#7b3fa0";
    case TaskKind::backward:
      return "#2e9e5b";
    case TaskKind::reduce:
      return "#8a9a1f";
    case TaskKind::fetch:
      return "#e08a2e";
    case TaskKind::offload:
      return "#9c4a22";
    case TaskKind::send:
    case TaskKind::recv:
    case TaskKind::push:
    case TaskKind::pull:
      return "#d8b820";
    case TaskKind::norm:
      return "#303030";
    case TaskKind::optimize:
    case TaskKind::commit:
      return (slice.flags & kSpeculate) != 0 ? "#e58aa0" : "#c2304e";
    case TaskKind::load:
    case TaskKind::unload:
      return "#b06a9a";
    case TaskKind::input:
    case TaskKind::park:
    case TaskKind::unpark:
    case TaskKind::result:
    case TaskKind::save:
      return "#8a8a8a";
  }
  return "#8a8a8a";
}

std::string time_text(double seconds) {
  return std::abs(seconds) < 1 ? fmt::format("{:.4g} ms", 1e3 * seconds) : fmt::format("{:.5g} s", seconds);
}

class Figure {
 public:
  Figure(const std::vector<TimelineSlice>& slices, std::optional<std::int64_t> step)
      : step_(step), computing_(computing_of(slices, step)) {
    bool found = false;
    double end = 0;
    for (const TimelineSlice& slice : slices) {
      if (step && slice.step != *step) continue;
      origin_ = found ? std::min(origin_, slice.begin) : slice.begin;
      end = found ? std::max(end, slice.end) : slice.end;
      found = true;
    }
    seconds_ = std::max(end - origin_, 1e-9);
    for (const TimelineSlice& slice : slices) {
      rows_[{slice.rank, StreamKind::compute}];  // also where it is idle all the time
      if (slice.end >= origin_ && slice.begin <= end) rows_[{slice.rank, slice.stream}].push_back(&slice);
    }
    for (auto& [row, list] : rows_) {
      std::stable_sort(list.begin(), list.end(),
                       [](const TimelineSlice* a, const TimelineSlice* b) { return a->begin < b->begin; });
    }
  }

  std::string html() {
    double y = kTop;
    int rank = -1;
    for (const auto& [row, list] : rows_) {
      if (row.first != rank && rank >= 0) {
        y += kRankGap;
        fmt::format_to(std::back_inserter(bars_), "<line x1=\"0\" x2=\"100%\" y1=\"{0:.1f}\" y2=\"{0:.1f}\" class=\"rank\"/>\n",
                       y - kRankGap / 2 - 0.5);
      }
      rank = row.first;
      const double height = row.second == StreamKind::compute ? kComputeRow : kRow;
      draw_row(row.second, rank, list, y, height);
      y += height;
    }
    return fmt::format(
        "<div class=\"figure\"><svg class=\"names\" height=\"{0:.0f}\">\n{1}</svg>\n"
        "<div class=\"scroll\"><svg class=\"time\" height=\"{0:.0f}\" role=\"img\" aria-label=\"timeline\">\n"
        "<defs><pattern id=\"idle\" patternUnits=\"userSpaceOnUse\" width=\"5\" height=\"5\" patternTransform=\"rotate(45)\">"
        "<rect width=\"5\" height=\"5\" fill=\"#fbe3e3\"/><rect width=\"1.4\" height=\"5\" "
        "fill=\"#e7a3a3\"/></pattern></defs>\n"
        "{2}{3}</svg></div></div>\n",
        y + 6, names_, ticks(y), bars_);
  }

 private:
  [[nodiscard]] double x_of(double time) const { return std::clamp(100 * (time - origin_) / seconds_, 0.0, 100.0); }

  void rectangle(double begin, double end, double y, double height, const std::string& look, const std::string& text) {
    const double width = std::max(kThinnest, x_of(end) - x_of(begin));
    fmt::format_to(std::back_inserter(bars_),
                   "<rect x=\"{:.3f}%\" y=\"{:.1f}\" width=\"{:.3f}%\" height=\"{:.1f}\" {}><title>{}</title></rect>\n",
                   std::min(x_of(begin), 100 - kThinnest), y, width, height, look, text);
  }

  void draw_row(StreamKind stream, int rank, const std::vector<const TimelineSlice*>& list, double y, double height) {
    fmt::format_to(std::back_inserter(names_), "<text x=\"72\" y=\"{:.1f}\" text-anchor=\"end\"{}>r{} {}</text>\n",
                   y + height / 2 + 3, stream == StreamKind::compute ? " class=\"first\"" : "", rank, stream_name(stream));
    fmt::format_to(std::back_inserter(bars_), "<rect width=\"100%\" y=\"{:.1f}\" height=\"{:.1f}\" class=\"row\"/>\n", y,
                   height - 1);
    if (stream == StreamKind::compute) draw_bubbles(list, y, height);
    const std::vector<double> run_ends = run_ends_of(list);
    for (std::size_t i = 0; i < list.size();) {
      const TimelineSlice& slice = *list[i];
      double end = slice.end;
      std::size_t next = i + 1;
      const bool narrow = x_of(slice.end) - x_of(slice.begin) < kNarrow;
      while (narrow && next < list.size() && looks_like(*list[next], slice) &&
             x_of(list[next]->end) - x_of(slice.begin) < 4 * kNarrow && x_of(list[next]->begin) - x_of(end) < kNarrow / 4) {
        end = std::max(end, list[next++]->end);
      }
      const std::string more = next - i > 1 ? fmt::format(" and {} more", next - i - 1) : "";
      const bool dense = x_of(end) - x_of(slice.begin) < kDense && !other(slice);
      const double drawn = dense ? std::max(end, std::min(run_ends[i], end + seconds_ * kPixel / 100)) : end;
      rectangle(slice.begin, drawn, y, height - 1,
                fmt::format("fill=\"{}\"{}", colour_of(slice), other(slice) ? " class=\"pale\"" : ""),
                fmt::format("{}{}{}, stage {}: {} to {} ({})", slice_name(slice), more, step_text(slice), slice.stage,
                            time_text(slice.begin - origin_), time_text(end - origin_), time_text(end - slice.begin)));
      i = next;
    }
  }

  // Where the uninterrupted run of slices ends that a slice belongs to. Two edges that share a pixel would let the background
  // shine through, and make busy streams look idle: inside a run, slices are drawn up to under the next one.
  [[nodiscard]] std::vector<double> run_ends_of(const std::vector<const TimelineSlice*>& list) const {
    std::vector<double> ends(list.size());
    for (std::size_t i = list.size(); i-- > 0;) {
      ends[i] = list[i]->end;
      const bool goes_on =
          i + 1 < list.size() && !other(*list[i + 1]) && x_of(list[i + 1]->begin) - x_of(list[i]->end) < kNarrow / 4;
      if (goes_on) ends[i] = std::max(ends[i], ends[i + 1]);
    }
    return ends;
  }

  void draw_bubbles(const std::vector<const TimelineSlice*>& list, double y, double height) {
    double free = computing_.first;
    const auto gap_until = [&](double time) {
      time = std::min(time, computing_.second);
      if (x_of(time) - x_of(free) < kNarrow) return;
      rectangle(
          free, time, y, height - 1, "class=\"idle\"",
          fmt::format("idle: {} to {} ({})", time_text(free - origin_), time_text(time - origin_), time_text(time - free)));
    };
    for (const auto& [begin, end] : busy_intervals(list)) {
      gap_until(begin);
      free = std::max(free, end);
    }
    gap_until(computing_.second);
  }

  // Three grids: the finer ones appear where the drawing is widened.
  [[nodiscard]] std::string ticks(double bottom) const {
    std::string text;
    std::set<std::int64_t> drawn;  // thousandths of a per cent
    for (const auto& [count, look] : {std::pair{8, "g"}, std::pair{32, "g g4"}, std::pair{128, "g g16"}}) {
      const double step = round_tick(seconds_ / count);
      for (int i = 0; i * step <= seconds_ * (1 + 1e-9); ++i) {
        if (!drawn.insert(std::llround(1e5 * i * step / seconds_)).second) continue;
        const double x = x_of(origin_ + i * step);
        fmt::format_to(std::back_inserter(text),
                       "<g class=\"{0}\"><line x1=\"{1:.3f}%\" x2=\"{1:.3f}%\" y1=\"14\" y2=\"{2:.1f}\"/>"
                       "<text x=\"{1:.3f}%\" y=\"10\" text-anchor=\"{3}\">{4}</text></g>\n",
                       look, x, bottom, x < 1 ? "start" : (x > 97 ? "end" : "middle"), i == 0 ? "0" : time_text(i * step));
      }
    }
    return text;
  }

  [[nodiscard]] bool other(const TimelineSlice& slice) const { return step_ && slice.step != *step_; }
  [[nodiscard]] bool looks_like(const TimelineSlice& a, const TimelineSlice& b) const {
    return colour_of(a) == colour_of(b) && other(a) == other(b);
  }
  [[nodiscard]] std::string step_text(const TimelineSlice& slice) const {
    if (!other(slice)) return "";
    return slice.step == kNoStep ? " of an evaluation" : fmt::format(" of step {}", slice.step + 1);
  }

  std::optional<std::int64_t> step_;
  std::pair<double, double> computing_;
  double origin_ = 0, seconds_ = 0;
  std::map<std::pair<int, StreamKind>, std::vector<const TimelineSlice*>> rows_;
  std::string names_, bars_;
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
  return text + "<span><i class=\"idle\"></i>bubble (idle compute)</span></p>\n";
}

constexpr const char* kStyle =
    "body{font:14px/1.45 system-ui,sans-serif;margin:1.2em;color:#222;background:#fff;-webkit-text-size-adjust:100%;"
    "print-color-adjust:exact;-webkit-print-color-adjust:exact}"
    "h1{font-size:1.5em;margin:.3em 0}h2{font-size:1.15em;margin:1.4em 0 "
    ".3em}pre{background:#f4f4f4;padding:.7em;overflow:auto}"
    "svg text{font:10px system-ui,sans-serif;fill:#444}.names .first{font-weight:600;fill:#111}"
    ".figure{display:grid;grid-template-columns:76px minmax(0,1fr)}.names{width:76px}.scroll{overflow-x:auto}"
    ".time{width:100%;min-width:820px;display:block}#w4:checked~.figure .time{width:400%}#w16:checked~.figure "
    ".time{width:1600%}"
    ".row{fill:#f4f4f4}.rank{stroke:#ccc}.pale{opacity:.3}svg .idle{fill:url(#idle)}.g "
    "line{stroke:#e2e2e2}.g4,.g16{display:none}"
    "#w4:checked~.figure .g4,#w16:checked~.figure .g4,#w16:checked~.figure .g16{display:inline}"
    ".wide{margin-right:.9em}.legend{margin:.5em 0}.legend span{display:inline-block;margin-right:1em}"
    ".legend i{display:inline-block;width:1.1em;height:.8em;margin-right:.35em}"
    ".legend .idle{background:repeating-linear-gradient(45deg,#e7a3a3 0 1.4px,#fbe3e3 1.4px 5px)}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}th,td{padding:.15em "
    ".8em;text-align:right;white-space:nowrap}"
    "th{border-bottom:1px solid #999}tr:nth-child(odd) td{background:#f6f6f6}.note{color:#555;max-width:60em}"
    "@media print{@page{size:landscape;margin:10mm}body{margin:0}.time,#w4:checked~.figure .time,#w16:checked~.figure "
    ".time{min-width:0;width:100%}.scroll{overflow:visible}.choice,.wide{display:none}.figure{break-inside:avoid}}";

}  // namespace

double round_tick(double least) {
  const double power = std::pow(10.0, std::floor(std::log10(least)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= least * (1 - 1e-9)) return factor * power;
  }
  return 10 * power;
}

std::string html_escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else
      out += c;
  }
  return out;
}

std::string html_page(std::string_view title, std::string_view body, std::string_view more_style) {
  return fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
      "<meta name=\"viewport\" "
      "content=\"width=device-width,initial-scale=1\"><title>{}</title><style>{}{}</style></head><body>\n"
      "{}</body></html>\n",
      html_escaped(title), kStyle, more_style, body);
}

std::string timeline_figure(const std::vector<TimelineSlice>& slices, std::optional<std::int64_t> step) {
  std::string text = "<div>\n" + legend();
  for (const auto& [width, checked] : {std::pair{1, " checked"}, std::pair{4, ""}, std::pair{16, ""}}) {
    text += fmt::format(
        "<input type=\"radio\" name=\"width\" id=\"w{0}\" class=\"choice\"{1}><label for=\"w{0}\" class=\"wide\">{0}×</label>",
        width, checked);
  }
  return text + "\n" + Figure(slices, step).html() + "</div>\n";
}

std::string timeline_html(const std::vector<TimelineSlice>& slices, const TimelineText& text) {
  return html_page(text.title, fmt::format("<h1>{}</h1>\n<pre>{}</pre>\n{}", html_escaped(text.title),
                                           html_escaped(text.summary), timeline_figure(slices, std::nullopt)));
}

}  // namespace spipe::plan
