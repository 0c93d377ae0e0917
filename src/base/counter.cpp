// Sleepers announce themselves before they look at the value, signallers raise the value before they look for sleepers (both
// sequentially consistent), so one of the two always sees the other. The futex compares the low 32 bits only: a value that
// changes by a multiple of 2^32 between look and sleep is found at the next time-out.
#include "spipe/base/counter.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <climits>
#include <ctime>

namespace spipe {
namespace {

using Clock = std::chrono::steady_clock;

static_assert(std::endian::native == std::endian::little, "the futex word is the first half of the counter");
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

constexpr std::chrono::microseconds kSpin{20};
constexpr std::chrono::milliseconds kLongestSleep{50};

// Not FUTEX_PRIVATE: the counter may lie in memory shared between processes.
long futex(const std::atomic<std::uint64_t>* word, int operation, std::uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, word, operation, value, timeout, nullptr, 0);
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

bool stopped(const std::atomic<std::uint32_t>* stop) { return stop != nullptr && stop->load(std::memory_order_acquire) != 0; }

bool wait_until(const std::atomic<std::uint64_t>& word, std::atomic<std::uint32_t>& sleepers, std::uint64_t value,
                const std::atomic<std::uint32_t>* stop, Clock::time_point deadline) {
  if (word.load(std::memory_order_acquire) >= value) return true;
  const Clock::time_point spin_end = std::min(Clock::now() + kSpin, deadline);
  while (Clock::now() < spin_end) {
    for (int i = 0; i < 16; ++i) {
      if (word.load(std::memory_order_acquire) >= value) return true;
      pause();
    }
  }
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  std::uint64_t seen = 0;
  while ((seen = word.load(std::memory_order_seq_cst)) < value && !stopped(stop)) {
    const auto left = deadline - Clock::now();
    if (left <= Clock::duration::zero()) break;
    const auto sleep = std::min<std::chrono::nanoseconds>(left, kLongestSleep);
    const timespec timeout{.tv_sec = 0, .tv_nsec = sleep.count()};
    futex(&word, FUTEX_WAIT, static_cast<std::uint32_t>(seen), &timeout);
  }
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return seen >= value;
}

}  // namespace

void Counter::signal(std::uint64_t value) {
  std::uint64_t seen = value_.load(std::memory_order_relaxed);
  while (seen < value && !value_.compare_exchange_weak(seen, value, std::memory_order_seq_cst, std::memory_order_relaxed)) {
  }
  if (sleepers_.load(std::memory_order_seq_cst) != 0) futex(&value_, FUTEX_WAKE, INT_MAX, nullptr);
}

bool Counter::wait(std::uint64_t value, const std::atomic<std::uint32_t>* stop) const {
  return wait_until(value_, sleepers_, value, stop, Clock::time_point::max());
}

bool Counter::wait_for(std::uint64_t value, std::uint32_t milliseconds) const {
  return wait_until(value_, sleepers_, value, nullptr, Clock::now() + std::chrono::milliseconds(milliseconds));
}

}  // namespace spipe
