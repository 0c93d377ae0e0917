#include <fcntl.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "spipe/base/log.h"
#include "spipe/report/report.h"

namespace spipe::report {
namespace {

using Catch::Contains;
using namespace std::chrono_literals;

StepMetrics example() {
  StepMetrics metrics;
  metrics.step = 120;
  metrics.loss = 2.34123;
  metrics.grad_norm = 0.8123;
  metrics.lr = 2.9e-4;
  metrics.tokens_per_s = 12400;
  metrics.step_seconds = 0.1;
  metrics.peak_fraction = 0.714;
  metrics.h2d_bytes_per_s = 310.4e6;
  metrics.d2h_bytes_per_s = 95.1e6;
  return metrics;
}

// Puts another descriptor in the place of stdout or stderr for a while.
class Redirect {
 public:
  Redirect(int target, int source) : target_(target), saved_(::dup(target)) {
    std::fflush(nullptr);
    ::dup2(source, target);
  }
  ~Redirect() {
    std::fflush(nullptr);
    ::dup2(saved_, target_);
    ::close(saved_);
  }
  Redirect(const Redirect&) = delete;
  Redirect& operator=(const Redirect&) = delete;

 private:
  int target_, saved_;
};

// What `work` writes to stdout and stderr when both are the same file.
template <typename Work>
std::string captured(const Work& work) {
  std::FILE* file = std::tmpfile();
  REQUIRE(file != nullptr);
  const int fd = ::fileno(file);
  ::fcntl(fd, F_SETFL, O_APPEND);
  {
    const Redirect out(STDOUT_FILENO, fd);
    const Redirect err(STDERR_FILENO, fd);
    work();
  }
  std::string text(static_cast<std::size_t>(::lseek(fd, 0, SEEK_END)), '\0');
  CHECK(::pread(fd, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()));
  std::fclose(file);
  return text;
}

// The same on a pseudo-terminal of `columns` columns.
template <typename Work>
std::string captured_on_terminal(unsigned short columns, const Work& work) {
  const int master = ::posix_openpt(O_RDWR | O_NOCTTY);
  REQUIRE(master >= 0);
  REQUIRE(::grantpt(master) == 0);
  REQUIRE(::unlockpt(master) == 0);
  const int terminal = ::open(::ptsname(master), O_RDWR | O_NOCTTY);
  REQUIRE(terminal >= 0);
  winsize size{};
  size.ws_row = 24;
  size.ws_col = columns;
  REQUIRE(::ioctl(terminal, TIOCSWINSZ, &size) == 0);
  termios settings{};
  REQUIRE(::tcgetattr(terminal, &settings) == 0);
  settings.c_oflag &= ~static_cast<tcflag_t>(OPOST);
  REQUIRE(::tcsetattr(terminal, TCSANOW, &settings) == 0);
  {
    const Redirect out(STDOUT_FILENO, terminal);
    const Redirect err(STDERR_FILENO, terminal);
    work();
  }
  ::fcntl(master, F_SETFL, O_NONBLOCK);
  std::string text;
  char buffer[4096];
  for (ssize_t count = 0; (count = ::read(master, buffer, sizeof buffer)) > 0;) {
    text.append(buffer, static_cast<std::size_t>(count));
  }
  ::close(terminal);
  ::close(master);
  return text;
}

// What stands on the screen after `text`: lines, with "\r\x1b[K" emptying the present one.
std::string screen(const std::string& text) {
  std::string done, line;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text.compare(i, 4, "\r\x1b[K") == 0) {
      line.clear();
      i += 3;
    } else if (text[i] == '\n') {
      done += line + '\n';
      line.clear();
    } else {
      line += text[i];
    }
  }
  return done + line;
}

std::size_t occurrences(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) {
    ++count;
  }
  return count;
}

}  // namespace

TEST_CASE("the progress line reads as documented") {
  CHECK(progress_text(example(), 2000, 187) ==
        "step 120/2000  loss 2.3412  norm 0.81  lr 2.9e-04  12.4 k tok/s  ETA 3 m 07 s  71 % of peak  link 310/95 MB/s");
}

TEST_CASE("a window's tokens per second are shown as they are, and an unknown peak is left out") {
  // Batch 2, 16 tokens, 4 micro-batches, one second a step: 128 tokens a second, whatever the number of ranks.
  StepMetrics metrics;
  metrics.step = 3;
  metrics.tokens = 3 * 2 * 16 * 4;
  metrics.step_seconds = 1;
  metrics.tokens_per_s = static_cast<double>(metrics.tokens) / 3;
  CHECK(progress_text(metrics, 10, 0) == "step 3/10  loss 0.0000  norm 0.00  lr 0.0e+00  128 tok/s");
}

TEST_CASE("fields appear when they have something to say") {
  StepMetrics metrics = example();
  metrics.h2d_bytes_per_s = metrics.d2h_bytes_per_s = 0;
  metrics.peak_fraction.reset();
  metrics.skipped_steps = 2;
  metrics.eval_loss = 3.25;
  CHECK(progress_text(metrics, 2000, 0) ==
        "step 120/2000  loss 2.3412  eval 3.2500  norm 0.81  lr 2.9e-04  12.4 k tok/s  skipped 2");
  metrics.grad_norm = 0.00012;
  CHECK_THAT(progress_text(metrics, 2000, 0), Contains("norm 1.2e-04"));
  metrics.grad_norm = std::numeric_limits<double>::infinity();
  metrics.loss = std::numeric_limits<double>::quiet_NaN();
  CHECK_THAT(progress_text(metrics, 2000, std::numeric_limits<double>::infinity()),
             Contains("loss nan") && Contains("norm inf") && !Contains("ETA"));
}

TEST_CASE("without a terminal a plain line comes every few steps and at the end") {
  const std::string text = captured([] {
    Progress progress(7, 3, false);
    for (std::uint64_t step = 1; step <= 7; ++step) {
      StepMetrics metrics = example();
      metrics.step = step;
      progress.step(metrics);
    }
    progress.finish();
  });
  CHECK(occurrences(text, "\n") == 3);
  CHECK(occurrences(text, "step ") == 3);
  CHECK_THAT(text, Contains("step 3/7") && Contains("step 6/7") && Contains("step 7/7"));
  CHECK_THAT(text, !Contains("\r") && !Contains("\x1b"));
}

TEST_CASE("the time left follows the recent steps' time") {
  const std::string text = captured([] {
    Progress progress(1000, 100, false);
    for (const std::uint64_t step : {100, 200, 300}) {
      StepMetrics metrics = example();
      metrics.step = step;
      metrics.step_seconds = step == 100 ? 50.0 : 1.0;  // a slow start is forgotten
      progress.step(metrics);
    }
  });
  CHECK_THAT(text, Contains("ETA 12 h 30 m"));  // 900 steps of 50 s
  CHECK_THAT(text, Contains("ETA 11 m 40 s"));  // 700 steps of 1 s
}

TEST_CASE("on a terminal there is one line, rewritten not more often than ten times a second") {
  const std::string text = captured_on_terminal(200, [] {
    Progress progress(1000, 10, true);
    const auto start = std::chrono::steady_clock::now();
    StepMetrics metrics = example();
    for (metrics.step = 1; std::chrono::steady_clock::now() - start < 350ms; ++metrics.step) {
      progress.step(metrics);
      std::this_thread::sleep_for(1ms);
    }
  });
  CHECK(occurrences(text, "step ") >= 2);
  CHECK(occurrences(text, "step ") <= 5);
  CHECK(occurrences(text, "\n") == 0);
  CHECK(screen(text).empty());  // nothing is left behind by a run that ends with an error
}

TEST_CASE("finish leaves the newest numbers on the screen") {
  const std::string text = captured_on_terminal(200, [] {
    Progress progress(121, 10, true);
    StepMetrics metrics = example();
    progress.step(metrics);
    metrics.step = 121;
    metrics.loss = 1.5;
    progress.step(metrics);  // too soon to be drawn
    progress.finish();
    progress.finish();
  });
  CHECK(screen(text).starts_with("step 121/121  loss 1.5000"));
  CHECK(occurrences(screen(text), "\n") == 1);
}

TEST_CASE("a narrow terminal gets fewer fields, never a line that wraps") {
  for (const unsigned short columns : {120, 80, 40, 20, 5}) {
    const std::string text = captured_on_terminal(columns, [] {
      Progress progress(2000, 10, true);
      progress.step(example());
      std::fputs("|", stdout);  // ends the live line before it is erased
    });
    const std::string live = text.substr(4, text.find('|') - 4);
    INFO(columns << ": " << live);
    CHECK(live.size() < columns);
    CHECK(progress_text(example(), 2000, 0.1 * 1880).starts_with(live));
  }
}

TEST_CASE("log lines and evaluations take the live line's place and do not mix with it") {
  const std::string text = captured_on_terminal(200, [] {
    Progress progress(2000, 10, true);
    progress.step(example());
    log_info("checkpoint saved");
    progress.evaluation(120, 2.5, 4096);
    std::this_thread::sleep_for(110ms);
    progress.step(example());
    log_info("another line");
  });
  CHECK(screen(text) == "checkpoint saved\neval at step 120  loss 2.5000  perplexity 12.18  4096 targets\nanother line\n");
  CHECK(occurrences(text, "step 120/2000") == 2);
}

TEST_CASE("after a progress line is gone, log lines are left alone") {
  const std::string text = captured([] {
    { const Progress progress(10, 1, true); }
    log_info("later");
  });
  CHECK(text == "later\n");
}

}  // namespace spipe::report
