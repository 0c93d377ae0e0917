// metrics.jsonl as curves.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/base/units.h"
#include "spipe/report/page.h"

namespace spipe::report {
namespace {

using nlohmann::json;

std::optional<double> number_of(const json& line, const char* key) {
  const auto found = line.find(key);
  if (found == line.end() || !found->is_number()) return std::nullopt;
  return found->get<double>();
}

using Points = std::vector<std::pair<double, double>>;

constexpr std::size_t kMostPoints = 400;
constexpr double kWidth = 560, kHeight = 190, kLeft = 52, kRight = 12, kTop = 24, kBottom = 24;

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
  std::string title;
  Points line, dots;
  std::string (*value_text)(double);
};

class Drawing {
 public:
  explicit Drawing(const Curve& curve) : curve_(curve) {
    x_low_ = x_high_ = curve.line.front().first;
    y_low_ = y_high_ = curve.line.front().second;
    for (const Points* points : {&curve.line, &curve.dots}) {
      for (const auto& [x, y] : *points) {
        x_low_ = std::min(x_low_, x);
        x_high_ = std::max(x_high_, x);
        y_low_ = std::min(y_low_, y);
        y_high_ = std::max(y_high_, y);
      }
    }
    if (x_high_ <= x_low_) x_high_ = x_low_ + 1;
    // A flat line lies in the middle.
    const double margin = y_high_ > y_low_ ? 0.04 * (y_high_ - y_low_) : std::max(1e-9, 0.1 * std::abs(y_low_));
    y_low_ -= margin;
    y_high_ += margin;
  }

  std::string svg() const {
    std::string text = fmt::format("<svg class=\"curve\" viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">\n", kWidth,
                                   kHeight, curve_.title);
    auto out = std::back_inserter(text);
    fmt::format_to(out, "<text x=\"{}\" y=\"12\" class=\"first\">{}</text>\n", kLeft, curve_.title);
    const double y_step = plan::round_tick((y_high_ - y_low_) / 5),
                 x_step = std::max(1.0, plan::round_tick((x_high_ - x_low_) / 6));
    for (double i = std::ceil(y_low_ / y_step); i * y_step <= y_high_; ++i) {
      fmt::format_to(out,
                     "<g class=\"g\"><line x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\"/><text x=\"{3}\" y=\"{4:.1f}\" "
                     "text-anchor=\"end\">{5}</text></g>\n",
                     kLeft, kWidth - kRight, y_of(i * y_step), kLeft - 5, y_of(i * y_step) + 3.5,
                     curve_.value_text(i * y_step));
    }
    for (double i = std::ceil(x_low_ / x_step); i * x_step <= x_high_; ++i) {
      fmt::format_to(out, "<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:.0f}</text>\n", x_of(i * x_step), kHeight - 8,
                     i * x_step);
    }
    text += "<polyline class=\"line\" points=\"";
    for (const auto& [x, y] : curve_.line) fmt::format_to(out, "{:.1f},{:.1f} ", x_of(x), y_of(y));
    text += "\"/>\n";
    for (const auto& [x, y] : curve_.dots) {
      fmt::format_to(out, "<circle class=\"dot\" r=\"3\" cx=\"{:.1f}\" cy=\"{:.1f}\"><title>step {:.0f}: {}</title></circle>\n",
                     x_of(x), y_of(y), x, curve_.value_text(y));
    }
    return text + "</svg>\n";
  }

 private:
  [[nodiscard]] double x_of(double x) const { return kLeft + (kWidth - kLeft - kRight) * (x - x_low_) / (x_high_ - x_low_); }
  [[nodiscard]] double y_of(double y) const {
    return kHeight - kBottom - (kHeight - kTop - kBottom) * (y - y_low_) / (y_high_ - y_low_);
  }

  const Curve& curve_;
  double x_low_ = 0, x_high_ = 0, y_low_ = 0, y_high_ = 0;
};

}  // namespace

std::vector<MetricPoint> read_metrics(const std::filesystem::path& file) {
  const std::string text = read_text(file);
  std::vector<MetricPoint> points;
  std::size_t number = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\n', begin);
    if (end == std::string::npos) break;  // torn
    ++number;
    const json line = json::parse(text.begin() + static_cast<std::ptrdiff_t>(begin),
                                  text.begin() + static_cast<std::ptrdiff_t>(end), nullptr, /*allow_exceptions=*/false);
    if (!line.is_object() || !line.contains("step") || !line["step"].is_number_unsigned()) {
      throw Error("not a line of metrics", fmt::format("{}:{}", file.string(), number), "remove the line, or the file");
    }
    points.push_back({line["step"].get<std::uint64_t>(), number_of(line, "loss"), number_of(line, "eval_loss"),
                      number_of(line, "tokens_per_s")});
    begin = end + 1;
  }
  return points;
}

std::string metric_curves(const std::vector<MetricPoint>& points) {
  Curve loss{"loss", {}, {}, [](double value) { return fmt::format("{:.4g}", value); }};
  Curve speed{"tokens per second", {}, {}, [](double value) { return format_count(value); }};
  for (const MetricPoint& point : points) {
    const auto step = static_cast<double>(point.step);
    if (point.loss) loss.line.emplace_back(step, *point.loss);
    if (point.eval_loss) loss.dots.emplace_back(step, *point.eval_loss);
    if (point.tokens_per_s) speed.line.emplace_back(step, *point.tokens_per_s);
  }
  if (!loss.dots.empty()) loss.title += " (dots: held out)";
  std::string text;
  for (Curve* curve : {&loss, &speed}) {
    if (curve->line.size() < 2) continue;
    curve->line = thinned(curve->line);
    text += Drawing(*curve).svg();
  }
  return text.empty() ? text : "<div class=\"curves\">\n" + text + "</div>\n";
}

}  // namespace spipe::report
