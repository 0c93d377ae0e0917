// A monotone 64-bit counter that threads and processes can wait on: the event of the engine. Lives in ordinary or shared
// memory (no pointers inside). Waiting spins briefly, then sleeps on a futex over the low 32 bits.
#pragma once

#include <atomic>
#include <cstdint>

namespace spipe {

class alignas(64) Counter {
 public:
  // Raises the counter to `value` (never lowers it) with release order and wakes the sleepers.
  void signal(std::uint64_t value);
  [[nodiscard]] std::uint64_t value() const { return value_.load(std::memory_order_acquire); }
  [[nodiscard]] bool reached(std::uint64_t value) const { return this->value() >= value; }
  // Waits until value() >= `value`, or *stop becomes non-zero (checked at least every 50 ms; may be null).
  // Returns whether the value was reached.
  bool wait(std::uint64_t value, const std::atomic<std::uint32_t>* stop = nullptr) const;
  // As above with a deadline in milliseconds; returns whether the value was reached.
  bool wait_for(std::uint64_t value, std::uint32_t milliseconds) const;

 private:
  std::atomic<std::uint64_t> value_{0};
  mutable std::atomic<std::uint32_t> sleepers_{0};
};
static_assert(sizeof(Counter) == 64);

}  // namespace spipe
