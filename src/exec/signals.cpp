#include "signals.h"

#include <unistd.h>

#include <atomic>
#include <csignal>

#include "spipe/base/error.h"

namespace spipe::exec {

namespace {

std::atomic<int> stop_requests{0};
std::atomic<int> save_requests{0};
static_assert(std::atomic<int>::is_always_lock_free, "the handlers need lock-free flags");

void on_signal(int number) {
  if (number == SIGUSR1) {
    save_requests.store(1, std::memory_order_relaxed);
    return;
  }
  if (stop_requests.fetch_add(1, std::memory_order_relaxed) >= 1 && number != SIGUSR2)
    _exit(static_cast<int>(ExitCode::kInterrupted));
}

}  // namespace

void install_signal_handlers() {
  struct sigaction action = {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  for (const int number : {SIGINT, SIGTERM, SIGUSR1, SIGUSR2}) sigaction(number, &action, nullptr);
}

SignalRequest take_signal_request() {
  if (stop_requests.load(std::memory_order_relaxed) > 0) return SignalRequest::save_and_stop;
  return save_requests.exchange(0, std::memory_order_relaxed) != 0 ? SignalRequest::save_and_go_on : SignalRequest::none;
}

}  // namespace spipe::exec
