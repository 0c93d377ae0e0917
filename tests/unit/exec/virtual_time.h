// Threads in virtual time, for tests of what sleeps: one runs at a time, and the clock stands still while it does.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

namespace spipe::exec::testing {

class VirtualTime {
 public:
  // Runs every body in a thread of its own until all have returned. At equal times the first of the list goes first. Throws
  // when all that are left wait for ever.
  void run(const std::vector<std::function<void()>>& bodies);
  // For bodies only.
  [[nodiscard]] std::int64_t now() const { return now_; }
  void sleep_until(std::int64_t time);
  void wait(std::function<bool()> until);  // `until` changes only by what other bodies do

 private:
  struct Body {
    std::int64_t wakes = 0;
    std::function<bool()> until;
    bool ended = false;
  };
  void pass_on();  // with the mutex held, like what follows
  void wait_for_turn(std::unique_lock<std::mutex>& lock, std::size_t body);

  std::mutex mutex_;
  std::condition_variable turned_;
  std::vector<Body> bodies_;
  std::size_t turn_ = 0;
  bool stuck_ = false;
  std::int64_t now_ = 0;
};

}  // namespace spipe::exec::testing
