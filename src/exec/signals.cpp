#include "spipe/exec/signals.h"

#include <time.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>

#include "spipe/base/error.h"

namespace spipe::exec {

namespace {

std::atomic<int> stop_requests{0};
std::atomic<int> save_requests{0};
static_assert(std::atomic<int>::is_always_lock_free, "the handlers need lock-free flags");

// When SIGINT came first, in milliseconds; launchers and terminals may send a signal more than once.
std::atomic<std::int64_t> interrupted_at{0};
constexpr std::int64_t kSameSignal = 1000;

std::int64_t milliseconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1000 + now.tv_nsec / 1'000'000;
}

void on_signal(int number) {
  if (number == SIGUSR1) {
    save_requests.store(1, std::memory_order_relaxed);
    return;
  }
  stop_requests.store(1, std::memory_order_relaxed);
  if (number != SIGINT) return;
  std::int64_t first = 0;
  if (interrupted_at.compare_exchange_strong(first, milliseconds()) || milliseconds() - first < kSameSignal) return;
  constexpr char kMessage[] = "interrupted a second time: stopped at once, without saving\n";
  const auto ignored = write(STDERR_FILENO, kMessage, sizeof(kMessage) - 1);
  (void)ignored;
  _exit(static_cast<int>(ExitCode::kInterrupted));
}

// A mapped file that shrinks, or shared memory that cannot be backed, ends in SIGBUS: say so instead of just dying.
void on_bus_error(int) {
  constexpr char kMessage[] =
      "error: bus error: a token or model file was cut short while in use, or host memory ran out; restore it and --resume\n";
  const auto ignored = write(STDERR_FILENO, kMessage, sizeof(kMessage) - 1);
  (void)ignored;
  _exit(static_cast<int>(ExitCode::kUser));
}

}  // namespace

void install_signal_handlers(bool several_ranks) {
  struct sigaction action = {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  for (const int number : {SIGUSR1, SIGUSR2}) sigaction(number, &action, nullptr);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction before = {};
    sigaction(number, nullptr, &before);
    // nohup and shells ignore what their background jobs are not to hear.
    if (!several_ranks && (number == SIGTERM || before.sa_handler != SIG_IGN)) sigaction(number, &action, nullptr);
  }
  action.sa_handler = on_bus_error;
  sigaction(SIGBUS, &action, nullptr);
  action.sa_handler = SIG_IGN;  // a file-size limit is an error of write(), which names the file
  sigaction(SIGXFSZ, &action, nullptr);
}

SignalRequest take_signal_request() {
  if (stop_requests.load(std::memory_order_relaxed) > 0) return SignalRequest::save_and_stop;
  return save_requests.exchange(0, std::memory_order_relaxed) != 0 ? SignalRequest::save_and_go_on : SignalRequest::none;
}

}  // namespace spipe::exec
