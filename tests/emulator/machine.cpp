// Blocks, threads, barriers and warp functions. See machine.h.
#include "tests/emulator/machine.h"

#include <fmt/core.h>
#include <link.h>

#include <algorithm>
#include <utility>

#include "spipe/base/error.h"

// What `extern __shared__` names in kernels/cuda/device.cuh; as large as the largest launch allows.
namespace spipe::cuda {
alignas(1024) thread_local unsigned char spipe_dynamic_shared[spipe::emulator::kMaxDynamicShared];
}

namespace spipe::emulator {

Builtins builtins;
constinit thread_local bool in_kernel = false;

namespace {

// The calling thread's copy of the program's thread-local variables.
struct TlsBlock {
  std::byte* begin = nullptr;
  std::size_t bytes = 0;
};
TlsBlock thread_locals() {
  TlsBlock block;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* result) {
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          if (info->dlpi_phdr[i].p_type != PT_TLS) continue;
          *static_cast<TlsBlock*>(result) = {static_cast<std::byte*>(info->dlpi_tls_data), info->dlpi_phdr[i].p_memsz};
        }
        return 1;  // the first object is the program itself
      },
      &block);
  SPIPE_CHECK(block.begin != nullptr, "the program has no thread-local variables");
  return block;
}

std::string at_text(const std::source_location& at) {
  const std::string_view path = at.file_name();
  return fmt::format("{}:{}", path.substr(path.rfind('/') + 1), at.line());
}

bool same_text(const char* a, const char* b) { return a == b || std::string_view(a) == b; }
bool same_place(const std::source_location& a, const std::source_location& b) {
  return a.line() == b.line() && same_text(a.file_name(), b.file_name());
}

Index3 unflatten(std::uint64_t flat, const Index3& size) {
  return {static_cast<unsigned>(flat % size.x), static_cast<unsigned>(flat / size.x % size.y),
          static_cast<unsigned>(flat / size.x / size.y)};
}

}  // namespace

Machine& Machine::instance() {
  static Machine machine;
  return machine;
}

std::atomic<Machine*> Machine::there_ = nullptr;

Machine::Machine() : fibers_(fiber_main) { there_ = this; }

std::string Machine::run(const LaunchShape& shape) {
  const std::lock_guard<std::mutex> lock(mutex_);
  SPIPE_CHECK(!inside_, "a kernel launched a kernel");
  const std::uint64_t threads = std::uint64_t{shape.block.x} * shape.block.y * shape.block.z;
  const std::uint64_t blocks = std::uint64_t{shape.grid.x} * shape.grid.y * shape.grid.z;
  if (threads == 0 || threads > kMaxThreads || blocks == 0 || shape.grid.x > 0x7fffffffU || shape.grid.y > 65535 ||
      shape.grid.z > 65535 || shape.block.z > 64) {
    return fmt::format("a launch of {} blocks of {} threads is not possible", blocks, threads);
  }
  if (shape.dynamic_shared_bytes > kMaxDynamicShared) {
    return fmt::format("{} bytes of dynamic shared memory of {}", shape.dynamic_shared_bytes, kMaxDynamicShared);
  }
  const TlsBlock shared = thread_locals();
  shared_begin_ = shared.begin;
  shared_bytes_ = shared.bytes;
  shared_cells_.resize(shared.bytes);
  dynamic_begin_ = reinterpret_cast<std::byte*>(cuda::spipe_dynamic_shared);
  dynamic_bytes_ = shape.dynamic_shared_bytes;
  shape_ = shape;
  counts_ = {};
  ++launches_;
  fault_.clear();
  builtins.block_size = shape.block;
  builtins.grid_size = shape.grid;
  threads_.resize(threads);
  launch_start_ = interval_ + 1;
  inside_ = true;
  for (std::uint64_t block = 0; block < blocks && fault_.empty(); ++block) {
    builtins.block = unflatten(block, shape.grid);
    run_block();
  }
  inside_ = false;
  if (!fault_.empty()) fibers_.reset();
  return fault_;
}

void Machine::run_block() {
  std::fill(threads_.begin(), threads_.end(), Thread{});
  warp_clocks_.assign(threads_.size() / kWarp + 1, 0);
  ready_.clear();
  next_fresh_ = ended_ = at_barrier_ = 0;
  open_interval();
  block_start_ = interval_;
  while (fault_.empty()) {
    if (!ready_.empty()) {
      const unsigned thread = ready_.front();
      ready_.pop_front();
      fiber_ = threads_[thread].fiber;
      become(thread);
    } else if (next_fresh_ < threads_.size()) {
      fiber_ = fibers_.take();
    } else {
      break;
    }
    fiber_->resume();
  }
  if (fault_.empty() && ended_ != threads_.size()) fault_ = explain_deadlock();
  counts_.threads += threads_.size();
}

// What runs on every fiber: fresh threads one after another. While none of them waits, one fiber serves a whole block as a
// plain loop; a thread that waits keeps its fiber, and the scheduler takes another for the threads after it.
void Machine::fiber_main() {
  Machine& machine = instance();
  for (;;) {
    while (machine.next_fresh_ < machine.threads_.size()) {
      const unsigned thread = machine.next_fresh_++;
      machine.threads_[thread].fiber = machine.fiber_;
      machine.become(thread);
      in_kernel = true;
      machine.shape_.entry(machine.shape_.arguments);
      in_kernel = false;
      machine.threads_[machine.current_].state = State::ended;
      ++machine.ended_;
    }
    machine.fibers_.give_back(machine.fiber_);
    machine.fiber_->leave();
  }
}

void Machine::become(unsigned thread) {
  current_ = thread;
  builtins.thread = unflatten(thread, builtins.block_size);
  threads_[thread].state = State::running;
  stamp_own();
}

// The running thread lets others run until somebody wakes it.
void Machine::wait() {
  ++counts_.blocked;
  fiber_->leave();
}

void Machine::wake(unsigned thread) {
  threads_[thread].state = State::ready;
  ready_.push_back(thread);
}

void Machine::fault(const std::string& text) {
  in_kernel = false;
  fault_ = fmt::format("{}: {}", name_of(current_), text);
  fiber_->leave();
  SPIPE_CHECK(false, "a thread ran on after its fault");
}

void Machine::fault(const char* name, const char* text) {
  const OutsideKernel outside;
  fault(std::string(name) + text);
}

// A new stretch between barriers: what was done before it is seen by all.
void Machine::open_interval() {
  ++interval_;
  SPIPE_CHECK(interval_ < std::uint64_t{1} << 33, "too many barriers for one process");
  std::fill(warp_clocks_.begin(), warp_clocks_.end(), 0);
  for (Thread& thread : threads_) thread.warp_clock = 0;
  stamp_own();
}

void Machine::sync_block(const std::source_location& at) {
  const OutsideKernel outside;
  Thread& own = threads_[current_];
  own.at = at;
  own.state = State::at_barrier;
  if (++at_barrier_ < threads_.size()) return wait();
  for (unsigned i = 0; i < threads_.size(); ++i) {
    const std::source_location& other = threads_[i].at;
    if (!same_place(other, at)) {
      fault(fmt::format("barrier divergence: it waits at {}, thread {} at {}", at_text(at), i, at_text(other)));
    }
  }
  at_barrier_ = 0;
  open_interval();
  const unsigned last = current_;
  for (unsigned i = 0; i < threads_.size(); ++i) {
    if (i != last) wake(i);
  }
  own.state = State::running;
}

void Machine::sync_warp(const char* name, std::uint32_t mask, void* data, void (*complete)(WarpData&), bool orders,
                        const std::source_location& at) {
  const OutsideKernel outside;
  Thread& own = threads_[current_];
  const unsigned warp = current_ / kWarp;
  if ((mask >> lane() & 1U) == 0)
    fault(fmt::format("{} at {}: the mask {:#x} lacks the calling lane", name, at_text(at), mask));
  own.at = at;
  own.state = State::at_warp;
  own.warp_function = name;
  own.mask = mask;
  own.data = data;
  WarpData lanes{.mask = mask};
  bool all_here = true;
  for (unsigned i = 0; i < kWarp; ++i) {
    if ((mask >> i & 1U) == 0) continue;
    const unsigned other = warp * kWarp + i;
    if (other >= threads_.size())
      fault(fmt::format("{} at {}: the mask names lane {}, which has no thread", name, at_text(at), i));
    const Thread& thread = threads_[other];
    if (thread.state == State::ended || thread.state == State::at_barrier) {
      fault(fmt::format("{} at {}: lane {} of the mask {}", name, at_text(at), i,
                        thread.state == State::ended ? "has ended" : "waits at the barrier " + at_text(thread.at)));
    }
    if (thread.state != State::at_warp) {
      all_here = false;
    } else if (thread.mask != mask || !same_text(thread.warp_function, name) || !same_place(thread.at, at)) {
      fault(fmt::format("warp divergence: it calls {} with mask {:#x} at {}, lane {} calls {} with mask {:#x} at {}", name,
                        mask, at_text(at), i, thread.warp_function, thread.mask, at_text(thread.at)));
    } else {
      lanes.lane[i] = thread.data;
    }
  }
  if (!all_here) return wait();
  complete(lanes);
  const std::uint32_t clock = orders ? ++warp_clocks_[warp] : 0;
  for (unsigned i = 0; i < kWarp; ++i) {
    if (lanes.lane[i] == nullptr) continue;
    Thread& thread = threads_[warp * kWarp + i];
    if (orders) thread.warp_clock = clock;
    if (&thread != &own) wake(warp * kWarp + i);
  }
  own.state = State::running;
  stamp_own();
}

std::string Machine::explain_deadlock() const {
  std::string ended, waiting;
  for (unsigned i = 0; i < threads_.size(); ++i) {
    const Thread& thread = threads_[i];
    if (thread.state == State::ended && ended.empty()) ended = fmt::format("thread {} has ended", i);
    if (thread.state != State::at_barrier && thread.state != State::at_warp) continue;
    if (!waiting.empty()) continue;
    const std::string what = thread.state == State::at_barrier ? "the barrier" : thread.warp_function;
    waiting = fmt::format("thread {} waits in {} at {}", i, what, at_text(thread.at));
  }
  if (ended.empty()) {
    for (unsigned i = 0; i < threads_.size(); ++i) {
      const Thread& thread = threads_[i];
      if (thread.state == State::at_warp)
        ended = fmt::format("thread {} in {} at {}", i, thread.warp_function, at_text(thread.at));
    }
  }
  return fmt::format("block ({}, {}, {}): barrier divergence: {}, {}", builtins.block.x, builtins.block.y, builtins.block.z,
                     waiting, ended);
}

std::string Machine::name_of(unsigned thread) const {
  const Index3 t = unflatten(thread, builtins.block_size);
  return fmt::format("block ({}, {}, {}) thread ({}, {}, {})", builtins.block.x, builtins.block.y, builtins.block.z, t.x, t.y,
                     t.z);
}

std::string Machine::take_host_fault() { return std::exchange(host_fault_, {}); }

}  // namespace spipe::emulator
