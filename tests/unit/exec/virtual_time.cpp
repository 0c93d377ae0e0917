#include "virtual_time.h"

#include <algorithm>
#include <stdexcept>
#include <thread>

namespace spipe::exec::testing {

namespace {
thread_local std::size_t this_body = 0;
struct Stuck {};
}  // namespace

void VirtualTime::run(const std::vector<std::function<void()>>& bodies) {
  bodies_.assign(bodies.size(), {.wakes = now_});
  stuck_ = false;
  std::vector<std::thread> threads;
  {
    std::unique_lock lock(mutex_);
    turn_ = bodies.size();
    for (std::size_t b = 0; b < bodies.size(); ++b) {
      threads.emplace_back([this, b, &body = bodies[b]] {
        this_body = b;
        std::unique_lock turn(mutex_);
        try {
          wait_for_turn(turn, b);
          turn.unlock();
          body();
          turn.lock();
        } catch (const Stuck&) {
          if (!turn.owns_lock()) turn.lock();
        }
        bodies_[b].ended = true;
        pass_on();
      });
    }
    pass_on();
  }
  for (std::thread& thread : threads) thread.join();
  if (stuck_) throw std::runtime_error("all that are left wait for ever");
}

void VirtualTime::sleep_until(std::int64_t time) {
  std::unique_lock lock(mutex_);
  bodies_[this_body].wakes = std::max(now_, time);
  pass_on();
  wait_for_turn(lock, this_body);
}

void VirtualTime::wait(std::function<bool()> until) {
  std::unique_lock lock(mutex_);
  if (until()) return;
  bodies_[this_body].until = std::move(until);
  pass_on();
  wait_for_turn(lock, this_body);
}

void VirtualTime::wait_for_turn(std::unique_lock<std::mutex>& lock, std::size_t body) {
  turned_.wait(lock, [&] { return turn_ == body || stuck_; });
  if (stuck_) throw Stuck{};
}

// The next to run is who wakes first.
void VirtualTime::pass_on() {
  std::size_t first = bodies_.size();
  for (std::size_t b = 0; b < bodies_.size(); ++b) {
    Body& body = bodies_[b];
    if (body.ended) continue;
    if (body.until) {
      if (!body.until()) continue;
      body.until = nullptr;
      body.wakes = now_;
    }
    if (first == bodies_.size() || body.wakes < bodies_[first].wakes) first = b;
  }
  if (first == bodies_.size()) {
    stuck_ = std::any_of(bodies_.begin(), bodies_.end(), [](const Body& body) { return !body.ended; });
  } else {
    now_ = std::max(now_, bodies_[first].wakes);
  }
  turn_ = first;
  turned_.notify_all();
}

}  // namespace spipe::exec::testing
