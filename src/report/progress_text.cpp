// The text of progress lines: fields separated by two spaces, the most telling first, unknown ones left out.
#include <fmt/format.h>

#include <cmath>

#include "spipe/base/units.h"
#include "spipe/report/report.h"

namespace spipe::report {
namespace {

// Two decimals where they say something, else scientific.
std::string short_number(double value) {
  const double size = std::abs(value);
  return size == 0 || (size >= 0.01 && size < 10000) || !std::isfinite(value) ? fmt::format("{:.2f}", value)
                                                                              : fmt::format("{:.1e}", value);
}

}  // namespace

std::string progress_text(const StepMetrics& metrics, std::uint64_t total_steps, double eta_seconds) {
  std::string text = fmt::format("step {}/{}  loss {:.4f}", metrics.step, total_steps, metrics.loss);
  if (metrics.eval_loss) {
    text += fmt::format("  eval {:.4f}", *metrics.eval_loss);
  }
  text += fmt::format("  norm {}  lr {:.1e}", short_number(metrics.grad_norm), metrics.lr);
  if (metrics.loss_scale) {
    text += fmt::format("  scale {:g}", *metrics.loss_scale);
  }
  text += fmt::format("  {} tok/s", format_count(metrics.tokens_per_s));
  if (eta_seconds > 0 && std::isfinite(eta_seconds)) {
    text += "  ETA " + format_duration(eta_seconds);
  }
  if (metrics.peak_fraction) {
    text += fmt::format("  {:.0f} % of peak", *metrics.peak_fraction * 100);
  }
  if (metrics.h2d_bytes_per_s > 0 || metrics.d2h_bytes_per_s > 0) {
    text += fmt::format("  link {:.0f}/{:.0f} MB/s", metrics.h2d_bytes_per_s / 1e6, metrics.d2h_bytes_per_s / 1e6);
  }
  if (metrics.skipped_steps > 0) {
    text += fmt::format("  skipped {}", metrics.skipped_steps);
  }
  return text;
}

}  // namespace spipe::report
