// The progress of a run on stdout: one line rewritten in place on a terminal, plain lines elsewhere.
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <mutex>
#include <string_view>

#include "spipe/base/log.h"
#include "spipe/base/units.h"
#include "spipe/report/report.h"

namespace spipe::report {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kRedrawEvery = std::chrono::milliseconds(100);
constexpr std::string_view kEraseLine = "\r\x1b[K";
constexpr double kEtaDecay = 0.9;  // weight of the past per step in the moving average

// Straight to the descriptor, after what is still buffered, so that the order with log lines on stderr is the true one.
// Progress is not worth failing for: a closed or full stdout is ignored.
void put(std::string_view text) {
  std::fflush(stdout);
  while (!text.empty()) {
    const ssize_t count = ::write(STDOUT_FILENO, text.data(), text.size());
    if (count < 0 && errno != EINTR) {
      return;
    }
    text.remove_prefix(count > 0 ? static_cast<std::size_t>(count) : 0);
  }
}

std::size_t terminal_width() {
  winsize size{};
  return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

// Whole fields that fit `width` columns; a line that wraps could not be erased.
std::string_view fit(std::string_view text, std::size_t width) {
  while (text.size() > width) {
    const std::size_t gap = text.rfind("  ");
    text = text.substr(0, gap == std::string_view::npos ? width : gap);
  }
  return text;
}

// Seconds left, from a moving average over steps of their mean times.
class Eta {
 public:
  double update(const StepMetrics& metrics, std::uint64_t total_steps) {
    const double steps = metrics.step > last_step_ ? static_cast<double>(metrics.step - last_step_) : 1.0;
    const double past = known_ ? std::pow(kEtaDecay, steps) : 0.0;
    if (std::isfinite(metrics.step_seconds)) {
      average_ = past * average_ + (1 - past) * metrics.step_seconds;
      known_ = true;
    }
    last_step_ = metrics.step;
    return metrics.step < total_steps ? average_ * static_cast<double>(total_steps - metrics.step) : 0.0;
  }

 private:
  double average_ = 0;
  bool known_ = false;
  std::uint64_t last_step_ = 0;
};

// The live line on the terminal now. One per process, as the log's hook is; never destroyed, since late threads may log.
struct LiveLine {
  std::mutex lock;
  bool shown = false;

  void draw(std::string_view text) {
    const std::lock_guard guard(lock);
    put(std::string(kEraseLine) + std::string(fit(text, terminal_width() - 1)));
    shown = true;
  }
  void erase() {
    const std::lock_guard guard(lock);
    if (shown) {
      put(kEraseLine);
      shown = false;
    }
  }
  // A line that stays: in place of the live one.
  void print(std::string_view text) {
    const std::lock_guard guard(lock);
    put((shown ? std::string(kEraseLine) : std::string()) + std::string(text) + '\n');
    shown = false;
  }
};

LiveLine& live_line() {
  static LiveLine* const line = new LiveLine;
  return *line;
}

}  // namespace

struct Progress::Impl {
  std::uint64_t total_steps = 0;
  std::uint64_t log_every = 0;
  bool terminal = false;
  Eta eta;
  std::string last;      // text of the newest step
  bool printed = false;  // ... and whether it stands on a line of its own
  bool drawn = false;
  Clock::time_point drawn_at;

  void step(const StepMetrics& metrics) {
    last = progress_text(metrics, total_steps, eta.update(metrics, total_steps));
    printed = false;
    if (terminal) {
      const Clock::time_point now = Clock::now();
      if (!drawn || now - drawn_at >= kRedrawEvery) {
        live_line().draw(last);
        drawn = true;
        drawn_at = now;
      }
    } else if (metrics.step >= total_steps || (log_every > 0 && metrics.step % log_every == 0)) {
      live_line().print(last);
      printed = true;
    }
  }

  // The newest numbers stay on the screen when the run ends.
  void finish() {
    if (terminal && !last.empty() && !printed) {
      live_line().print(last);
      printed = true;
    }
  }
};

Progress::Progress(std::uint64_t total_steps, std::int64_t log_every, bool terminal) : impl_(std::make_unique<Impl>()) {
  impl_->total_steps = total_steps;
  impl_->log_every = log_every > 0 ? static_cast<std::uint64_t>(log_every) : 0;
  impl_->terminal = terminal;
  if (terminal) {
    set_log_line_hook([] { live_line().erase(); });
  }
}

Progress::~Progress() {
  if (impl_->terminal) {
    set_log_line_hook(nullptr);
    live_line().erase();
  }
}

void Progress::step(const StepMetrics& metrics) { impl_->step(metrics); }

void Progress::evaluation(std::uint64_t step, double loss, std::uint64_t targets) {
  live_line().print(
      fmt::format("eval at step {}  loss {:.4f}  perplexity {:.4g}  {} targets", step, loss, std::exp(loss), targets));
}

void Progress::line(std::string_view text) { live_line().print(text); }

void Progress::finish() { impl_->finish(); }

}  // namespace spipe::report
