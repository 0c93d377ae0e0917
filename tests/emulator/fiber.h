// Fibers: stacks that are switched by hand, so that thousands of emulated threads cost no system calls.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace spipe::emulator {

// One stack and where it was left. Made and owned by FiberPool.
class Fiber {
 public:
  Fiber(std::byte* low, std::byte* high, void (*entry)());
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  // Forgets what ran on it: the next resume() begins `entry` anew. Nothing on the stack is destroyed.
  void restart();
  // From outside: runs the fiber until it calls leave(). One fiber at a time, on the thread that made it.
  void resume();
  // On the fiber: goes back to resume()'s caller; returns at the next resume().
  void leave();
  [[nodiscard]] bool holds(const std::byte* address) const { return address >= low_ && address < high_; }

 private:
  struct Context;
  std::byte* low_;
  std::byte* high_;
  void (*entry_)();
  std::unique_ptr<Context> context_;
};

// Fibers on stacks of kStackBytes, each above a page that may not be touched; stacks are kept and used again.
class FiberPool {
 public:
  static constexpr std::size_t kStackBytes = 256 * 1024;
  explicit FiberPool(void (*entry)()) : entry_(entry) {}  // entry never returns: it leaves
  ~FiberPool();
  FiberPool(const FiberPool&) = delete;
  FiberPool& operator=(const FiberPool&) = delete;
  [[nodiscard]] Fiber* take();
  void give_back(Fiber* fiber) { idle_.push_back(fiber); }
  // Every fiber is idle and restarted (after a fault left some in the middle).
  void reset();
  // Whether an address lies on any fiber's stack.
  [[nodiscard]] bool holds(const std::byte* address) const;

 private:
  static constexpr std::size_t kSlabStacks = 64;
  void add_slab();

  void (*entry_)();
  std::vector<std::byte*> slabs_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
};

}  // namespace spipe::emulator
