// The emulated GPU: runs the blocks of a launch one after another and the threads of a block in turns on one OS thread, watches
// every memory access of theirs, and stops a launch at its first fault. docs/cuda.md says what it finds and what it cannot.
//
// Kernels reach it through the emulated cuda_runtime.h, and through the calls that the compiler puts before every access to
// memory (hooks.cpp).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <source_location>
#include <string>
#include <vector>

#include "tests/emulator/device_heap.h"
#include "tests/emulator/fiber.h"

namespace spipe::emulator {

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};

// threadIdx, blockIdx, blockDim, gridDim of the thread that runs.
struct Builtins {
  Index3 thread, block, block_size, grid_size;
};
extern Builtins builtins;

struct LaunchShape {
  Index3 grid, block;
  std::size_t dynamic_shared_bytes = 0;
  void (*entry)(const void* arguments) = nullptr;  // the kernel, for one thread
  const void* arguments = nullptr;                 // memory of the host that the kernel may read
  std::size_t arguments_bytes = 0;
};

enum class Access : std::uint8_t { read, write, atomic };

inline constexpr unsigned kWarp = 32;
inline constexpr unsigned kMaxThreads = 1024;
inline constexpr std::size_t kMaxDynamicShared = 227 * 1024;  // of compute capability 9.0

// The data that the lanes of a warp bring to a warp function, by lane (null where a lane takes no part).
struct WarpData {
  void* lane[kWarp] = {};
  std::uint32_t mask = 0;
};

// True on the OS thread that runs a kernel while it runs the kernel's own code. The linker may take an inline function (of
// std::string, say) from an instrumented object for the whole program: what the machine itself or another thread does by it is
// no access of the kernel.
extern constinit thread_local bool in_kernel;

// While it lives, the machine works, not the kernel. Made by every function that a kernel calls.
class OutsideKernel {
 public:
  OutsideKernel() : was_(in_kernel) { in_kernel = false; }
  ~OutsideKernel() { in_kernel = was_; }
  OutsideKernel(const OutsideKernel&) = delete;
  OutsideKernel& operator=(const OutsideKernel&) = delete;

 private:
  bool was_;
};

class Machine {
 public:
  static Machine& instance();

  [[nodiscard]] DeviceHeap& heap() { return heap_; }
  // Runs the kernel for every thread of every block. Returns the fault, or "" when there was none. Any OS thread may call it;
  // launches run one at a time.
  [[nodiscard]] std::string run(const LaunchShape& shape);
  // What the last run did.
  struct Counts {
    std::uint64_t threads = 0, blocked = 0, accesses = 0;  // `blocked`: how often a thread had to wait for others
  };
  [[nodiscard]] const Counts& counts() const { return counts_; }
  [[nodiscard]] std::uint64_t launches() const { return launches_; }  // since the program began
  // A use of device memory by code of the host that was compiled with the kernels, since the last call; "" when none.
  [[nodiscard]] std::string take_host_fault();

  // ---- for the running kernel ----
  void sync_block(const std::source_location& at);
  // Waits until all lanes of `mask` have called it from the same place with the same name; the last one calls `complete` for
  // all. `orders`: what the lanes wrote before is seen by the others afterwards (__syncwarp).
  void sync_warp(const char* name, std::uint32_t mask, void* data, void (*complete)(WarpData&), bool orders,
                 const std::source_location& at);
  [[nodiscard]] unsigned lane() const { return current_ % kWarp; }
  // Atomic operations call this, then do the operation.
  void atomic_access(const void* address, std::size_t bytes);
  [[noreturn]] void fault(const std::string& text);
  [[noreturn]] void fault(const char* name, const char* text);  // for kernel code, which makes no strings
  // ---- for hooks.cpp ----
  void access(const void* address, std::size_t bytes, Access kind);       // by a kernel
  void host_access(const void* address, std::size_t bytes, Access kind);  // by other code of kernel files
  // The machine, or null before there is one: its constructor and other static initialisation run instrumented code, too.
  [[nodiscard]] static Machine* if_there() { return there_.load(std::memory_order_relaxed); }

 private:
  enum class State : std::uint8_t { fresh, ready, running, at_barrier, at_warp, ended };
  struct Thread {
    State state = State::fresh;
    Fiber* fiber = nullptr;
    std::source_location at;
    const char* warp_function = nullptr;
    std::uint32_t mask = 0;
    void* data = nullptr;
    std::uint32_t warp_clock = 0;  // when its warp last met (within the interval between barriers)
  };

  Machine();
  [[noreturn]] static void fiber_main();
  void run_block();
  void become(unsigned thread);
  void wait();
  void wake(unsigned thread);
  void open_interval();
  [[nodiscard]] std::string explain_deadlock() const;
  [[nodiscard]] std::string name_of(unsigned thread) const;
  // shadow.cpp: what is remembered of every byte of device and shared memory.
  void stamp_own();
  void check_byte(const std::byte* address, std::size_t at, std::size_t bytes, Access kind, ShadowCell& cell, bool shared);
  void check_bytes(const std::byte* address, std::size_t bytes, Access kind, ShadowCell* cells, bool shared);
  [[nodiscard]] bool conflicts(std::uint64_t stamp) const;
  [[nodiscard]] std::uint64_t merge_read(std::uint64_t old, bool shared) const;
  [[noreturn]] void fault_race(const std::byte* address, Access kind, std::uint64_t stamp, bool was_write, bool shared);
  [[noreturn]] void fault_access(std::size_t bytes, Access kind, const std::string& where);

  static std::atomic<Machine*> there_;
  DeviceHeap heap_;
  FiberPool fibers_;
  std::mutex mutex_;
  Counts counts_;
  std::atomic<std::uint64_t> launches_ = 0;
  std::string host_fault_;

  bool inside_ = false;  // a launch runs
  std::string fault_;
  LaunchShape shape_;
  std::vector<Thread> threads_;
  std::deque<unsigned> ready_;
  Fiber* fiber_ = nullptr;  // on which the current thread runs
  unsigned current_ = 0, next_fresh_ = 0, ended_ = 0, at_barrier_ = 0;
  std::vector<std::uint32_t> warp_clocks_;

  // Shared memory: the thread-local variables of the program (cuda_runtime.h makes __shared__ thread_local), with a cell a
  // byte.
  std::byte* shared_begin_ = nullptr;
  std::size_t shared_bytes_ = 0;
  std::byte* dynamic_begin_ = nullptr;
  std::size_t dynamic_bytes_ = 0;
  std::vector<ShadowCell> shared_cells_;

  // Time in stretches between barriers, all launches and blocks counted on.
  std::uint64_t interval_ = 1, block_start_ = 1, launch_start_ = 1;
  std::uint64_t own_stamp_ = 0;
};

}  // namespace spipe::emulator
