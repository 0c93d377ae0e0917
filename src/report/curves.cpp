// Metrics as charts: a line a run, and columns that show the values at a step when pointed at, by style sheet alone.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "spipe/base/units.h"
#include "spipe/report/page.h"

namespace spipe::report {
namespace {

using Points = std::vector<std::pair<double, double>>;

constexpr std::size_t kMostPoints = 400;  // of a line
constexpr std::size_t kMostColumns = 120;
constexpr double kWidth = 430, kHeight = 210, kLeft = 52, kRight = 10, kTop = 42, kBottom = 22;

// So few that they can be told apart: means of neighbours.
Points thinned(const Points& points) {
  const std::size_t each = (points.size() + kMostPoints - 1) / kMostPoints;
  if (each <= 1) return points;
  Points few;
  for (std::size_t begin = 0; begin < points.size(); begin += each) {
    const std::size_t end = std::min(points.size(), begin + each);
    std::pair<double, double> mean = {0, 0};
    for (std::size_t i = begin; i < end; ++i) {
      mean.first += points[i].first / static_cast<double>(end - begin);
      mean.second += points[i].second / static_cast<double>(end - begin);
    }
    few.push_back(mean);
  }
  return few;
}

struct Curve {
  std::size_t run = 0;
  Points line, dots;  // by step
};
struct Chart {
  std::string title;
  std::string (*value_text)(double);
  std::vector<Curve> curves;
};

// The point nearest to x, of points by ascending x; null when there are none or it is farther than `reach`.
const std::pair<double, double>* nearest(const Points& points, double x, double reach) {
  if (points.empty()) return nullptr;
  auto at = std::lower_bound(points.begin(), points.end(), x, [](const auto& p, double value) { return p.first < value; });
  if (at == points.end() || (at != points.begin() && x - std::prev(at)->first < at->first - x)) --at;
  return std::abs(at->first - x) <= reach ? &*at : nullptr;
}

class Drawing {
 public:
  explicit Drawing(const Chart& chart) : chart_(chart) {
    bool first = true;
    for (const Curve& curve : chart.curves) {
      for (const Points* points : {&curve.line, &curve.dots}) {
        for (const auto& [x, y] : *points) {
          x_low_ = first ? x : std::min(x_low_, x);
          x_high_ = first ? x : std::max(x_high_, x);
          y_low_ = first ? y : std::min(y_low_, y);
          y_high_ = first ? y : std::max(y_high_, y);
          first = false;
        }
      }
    }
    if (x_high_ <= x_low_) x_high_ = x_low_ + 1;
    // A flat line lies in the middle.
    const double margin = y_high_ > y_low_ ? 0.04 * (y_high_ - y_low_) : std::max(1e-9, 0.1 * std::abs(y_low_));
    y_low_ -= margin;
    y_high_ += margin;
  }

  std::string svg() const {
    std::string text = fmt::format("<svg class=\"curve\" viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{} over steps\">\n",
                                   kWidth, kHeight, plan::html_escaped(chart_.title));
    fmt::format_to(std::back_inserter(text), "<text x=\"{}\" y=\"14\" class=\"first\">{}</text>\n", kLeft,
                   plan::html_escaped(chart_.title));
    text += axes();
    for (const Curve& curve : chart_.curves) text += lines(curve);
    return text + columns() + "</svg>\n";
  }

 private:
  [[nodiscard]] std::string axes() const {
    std::string text;
    auto out = std::back_inserter(text);
    const double y_step = plan::round_tick((y_high_ - y_low_) / 5),
                 x_step = std::max(1.0, plan::round_tick((x_high_ - x_low_) / 5));
    for (double i = std::ceil(y_low_ / y_step); i * y_step <= y_high_; ++i) {
      fmt::format_to(out,
                     "<g class=\"g\"><line x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\"/><text x=\"{3}\" y=\"{4:.1f}\" "
                     "text-anchor=\"end\">{5}</text></g>\n",
                     kLeft, kWidth - kRight, y_of(i * y_step), kLeft - 5, y_of(i * y_step) + 3.5,
                     chart_.value_text(i * y_step));
    }
    for (double i = std::ceil(x_low_ / x_step); i * x_step <= x_high_; ++i) {
      fmt::format_to(out, "<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n", x_of(i * x_step), kHeight - 6,
                     step_text(i * x_step));
    }
    return text;
  }

  [[nodiscard]] std::string lines(const Curve& curve) const {
    const char* const colour = run_colour(curve.run);
    std::string text;
    auto out = std::back_inserter(text);
    if (curve.line.size() > 1) {
      fmt::format_to(out, "<polyline class=\"line\" stroke=\"{}\" points=\"", colour);
      for (const auto& [x, y] : thinned(curve.line)) fmt::format_to(out, "{:.1f},{:.1f} ", x_of(x), y_of(y));
      text += "\"/>\n";
    }
    for (const auto& [x, y] : thinned(curve.dots)) {
      fmt::format_to(out, "<circle class=\"dot\" r=\"3\" stroke=\"{}\" cx=\"{:.1f}\" cy=\"{:.1f}\"/>\n", colour, x_of(x),
                     y_of(y));
    }
    return text;
  }

  // Steps at which something was measured, or evenly spread ones where those are many.
  [[nodiscard]] std::vector<double> column_steps() const {
    std::vector<double> steps;
    for (const Curve& curve : chart_.curves) {
      for (const Points* points : {&curve.line, &curve.dots}) {
        for (const auto& point : *points) steps.push_back(point.first);
      }
    }
    std::sort(steps.begin(), steps.end());
    steps.erase(std::unique(steps.begin(), steps.end()), steps.end());
    if (steps.size() <= kMostColumns) return steps;
    std::vector<double> few;
    for (std::size_t i = 0; i < kMostColumns; ++i) few.push_back(steps[i * (steps.size() - 1) / (kMostColumns - 1)]);
    return few;
  }

  [[nodiscard]] std::string columns() const {
    const std::vector<double> steps = column_steps();
    std::string text;
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const double left = i == 0 ? kLeft : (x_of(steps[i - 1]) + x_of(steps[i])) / 2;
      const double right = i + 1 == steps.size() ? kWidth - kRight : (x_of(steps[i]) + x_of(steps[i + 1])) / 2;
      const double reach = steps.size() > 1 ? (x_high_ - x_low_) / static_cast<double>(steps.size() - 1) : 1;
      text += column(steps[i], left, right, reach);
    }
    return text;
  }

  [[nodiscard]] std::string column(double step, double left, double right, double reach) const {
    std::string values, marks;
    for (const Curve& curve : chart_.curves) {
      const char* const colour = run_colour(curve.run);
      for (const Points* points : {&curve.line, &curve.dots}) {
        const auto* point = nearest(*points, step, points == &curve.line ? reach : 0);
        if (point == nullptr) continue;
        fmt::format_to(std::back_inserter(marks), "<circle r=\"2.5\" fill=\"{}\" cx=\"{:.1f}\" cy=\"{:.1f}\"/>", colour,
                       x_of(point->first), y_of(point->second));
        fmt::format_to(std::back_inserter(values), "<tspan fill=\"{}\" dx=\"6\">{}{}</tspan>", colour,
                       points == &curve.dots ? "held out " : "", chart_.value_text(point->second));
      }
    }
    return fmt::format(
        "<g class=\"p\"><rect x=\"{:.1f}\" y=\"{}\" width=\"{:.1f}\" height=\"{}\"/><g class=\"tip\">"
        "<line x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{}\" y2=\"{}\"/>{}<text x=\"{}\" y=\"30\">step {}{}</text></g></g>\n",
        left, kTop, std::max(0.5, right - left), kHeight - kTop - kBottom, x_of(step), x_of(step), kTop, kHeight - kBottom,
        marks, kLeft, step_text(step), values);
  }

  [[nodiscard]] static std::string step_text(double step) { return fmt::format("{:.0f}", step); }
  [[nodiscard]] double x_of(double x) const { return kLeft + (kWidth - kLeft - kRight) * (x - x_low_) / (x_high_ - x_low_); }
  [[nodiscard]] double y_of(double y) const {
    return kHeight - kBottom - (kHeight - kTop - kBottom) * (y - y_low_) / (y_high_ - y_low_);
  }

  const Chart& chart_;
  double x_low_ = 0, x_high_ = 0, y_low_ = 0, y_high_ = 0;
};

std::string four_digits(double value) { return fmt::format("{:.4g}", value == 0 ? 0.0 : value); }  // no "-0"

Chart chart_of(const std::vector<ReportedRun>& runs, const char* title, std::optional<double> MetricPoint::*value,
               std::string (*value_text)(double), bool held_out) {
  Chart chart{title, value_text, {}};
  bool dots = false;
  for (std::size_t r = 0; r < runs.size(); ++r) {
    Curve curve{r, {}, {}};
    for (const MetricPoint& point : runs[r].metrics) {
      const auto step = static_cast<double>(point.step);
      // The line of an evaluation repeats what the step's own line said.
      if (point.*value && !point.eval_loss) curve.line.emplace_back(step, *(point.*value));
      if (held_out && point.eval_loss) curve.dots.emplace_back(step, *point.eval_loss);
    }
    const auto by_step = [](const auto& a, const auto& b) { return a.first < b.first; };
    std::stable_sort(curve.line.begin(), curve.line.end(), by_step);
    std::stable_sort(curve.dots.begin(), curve.dots.end(), by_step);
    dots = dots || !curve.dots.empty();
    if (curve.line.size() + curve.dots.size() > 0) chart.curves.push_back(std::move(curve));
  }
  if (dots) chart.title += " (rings: held out)";
  return chart;
}

bool can_be_drawn(const Chart& chart) {
  return std::any_of(chart.curves.begin(), chart.curves.end(),
                     [](const Curve& curve) { return curve.line.size() > 1 || curve.dots.size() > 1; });
}

}  // namespace

const char* run_colour(std::size_t run) {
  constexpr const char* colours[] = {"#2f7fc1", "#c2304e", "#2e9e5b", "#c0741c", "#7b3fa0", "#4d5a63", "#8a9a1f", "#b06a9a"};
  return colours[run % std::size(colours)];
}

std::string metric_curves(const std::vector<ReportedRun>& runs) {
  std::string text;
  for (const Chart& chart : {chart_of(runs, "loss", &MetricPoint::loss, four_digits, true),
                             chart_of(runs, "tokens per second", &MetricPoint::tokens_per_s, format_count, false),
                             chart_of(runs, "gradient norm", &MetricPoint::grad_norm, four_digits, false),
                             chart_of(runs, "learning rate", &MetricPoint::lr, four_digits, false)}) {
    if (can_be_drawn(chart)) text += Drawing(chart).svg();
  }
  return text.empty() ? text : "<div class=\"curves\">\n" + text + "</div>\n";
}

}  // namespace spipe::report
