// What the emulator knows of each byte, and what it finds with it: accesses out of bounds, reads of what nobody wrote, races.
//
// A stamp says when and by whom a byte was accessed: the stretch between barriers (33 bits), whether by an atomic operation,
// the thread (or "several of warp w", "several warps"), and the warp's clock, which __syncwarp advances. Two accesses, one of
// them a write, not both atomic, race unless they are the same thread's, or a barrier of their block lies between, or a
// __syncwarp of their warp. Threads of different blocks of one launch are never ordered. What is found does not depend on the
// order in which the emulator runs the threads.
#include <fmt/core.h>

#include <algorithm>

#include "spipe/base/error.h"
#include "tests/emulator/machine.h"

extern "C" const std::byte __executable_start, _end;  // the linker's: the program's own code and variables

namespace spipe::emulator {
namespace {

constexpr int kClockBits = 19, kWhoBits = 11;
constexpr std::uint64_t kClockMask = (1U << kClockBits) - 1, kWhoMask = (1U << kWhoBits) - 1;
constexpr std::uint64_t kSeveralOfWarp = kMaxThreads, kSeveralWarps = kWhoMask;
constexpr std::uint64_t kAtomic = std::uint64_t{1} << (kClockBits + kWhoBits);

constexpr std::uint64_t interval_of(std::uint64_t stamp) { return stamp >> (kClockBits + kWhoBits + 1); }
constexpr std::uint64_t who_of(std::uint64_t stamp) { return stamp >> kClockBits & kWhoMask; }
constexpr std::uint64_t clock_of(std::uint64_t stamp) { return stamp & kClockMask; }
// kSeveralWarps when there is no one warp.
constexpr std::uint64_t warp_of(std::uint64_t who) {
  return who == kSeveralWarps ? kSeveralWarps : who >= kSeveralOfWarp ? who - kSeveralOfWarp : who / kWarp;
}

const char* verb(Access kind) {
  return kind == Access::read ? "reads" : kind == Access::write ? "writes" : "changes atomically";
}

}  // namespace

void Machine::stamp_own() {
  const std::uint64_t clock = threads_[current_].warp_clock;
  SPIPE_CHECK(clock <= kClockMask, "too many __syncwarp between barriers");
  own_stamp_ = ((interval_ << 1) << kWhoBits | current_) << kClockBits | clock;
}

// Whether an access remembered by `stamp` and the running thread's access now are not ordered.
bool Machine::conflicts(std::uint64_t stamp) const {
  const std::uint64_t interval = interval_of(stamp);
  if (interval < launch_start_) return false;  // an earlier launch, or the host
  if (interval < block_start_) return true;    // another block of this launch
  if (interval < interval_) return false;      // before the last barrier
  const std::uint64_t who = who_of(stamp);
  if (who == current_) return false;
  return warp_of(who) != current_ / kWarp || clock_of(stamp) >= clock_of(own_stamp_);
}

// The readers so far and the running thread. Who is ordered before the running thread need not be remembered: what comes after
// it comes after them.
std::uint64_t Machine::merge_read(std::uint64_t old, bool shared) const {
  // A block before this one: every write of this launch still to come conflicts with it.
  if (!shared && interval_of(old) >= launch_start_ && interval_of(old) < block_start_) return old;
  if (interval_of(old) != interval_ || !conflicts(old)) return own_stamp_;
  const std::uint64_t warp = current_ / kWarp;
  const std::uint64_t who = warp_of(who_of(old)) == warp ? kSeveralOfWarp + warp : kSeveralWarps;
  const std::uint64_t clock = std::max(clock_of(old), clock_of(own_stamp_));
  return ((interval_ << 1) << kWhoBits | who) << kClockBits | clock;
}

void Machine::fault_access(std::size_t bytes, Access kind, const std::string& where) {
  fault(fmt::format("{} {} bytes {}", verb(kind), bytes, where));
}

void Machine::fault_race(const std::byte* address, Access kind, std::uint64_t stamp, bool was_write, bool shared) {
  const std::uint64_t who = who_of(stamp);
  std::string other;
  if (interval_of(stamp) < block_start_) {
    other = "another block";
  } else if (who < kMaxThreads) {
    other = fmt::format("thread {}", who);
  } else {
    other = who == kSeveralWarps ? "threads of several warps" : fmt::format("threads of warp {}", who - kSeveralOfWarp);
  }
  const std::string place =
      shared ? fmt::format("byte {} of shared memory", address - shared_begin_) : "device memory " + heap_.describe(address);
  fault(fmt::format("race: {} {}, which {} {} without a barrier between", verb(kind), place, other,
                    was_write ? "wrote" : "read"));
}

// One byte: `at` in the cells' and the memory's order.
void Machine::check_byte(const std::byte* address, std::size_t at, std::size_t bytes, Access kind, ShadowCell& cell,
                         bool shared) {
  const std::uint64_t own = kind == Access::atomic ? own_stamp_ | kAtomic : own_stamp_;
  const bool unwritten = shared ? interval_of(cell.write) < block_start_ : cell.write == kUnwritten;
  if (!shared && cell.write == kForbidden) fault_access(bytes, kind, "of forbidden memory " + heap_.describe(address + at));
  if (kind != Access::write && unwritten) {
    fault_access(bytes, kind, "that nobody wrote, " + (shared ? "in shared memory" : heap_.describe(address + at)));
  }
  const bool both_atomic = kind == Access::atomic && (cell.write & kAtomic) != 0 && cell.write > kLastMark;
  if (cell.write != own && !both_atomic && !(shared && unwritten) && conflicts(cell.write)) {
    fault_race(address + at, kind, cell.write, true, shared);
  }
  if (kind == Access::read) {
    if (cell.read != own) cell.read = merge_read(cell.read, shared);
    return;
  }
  // Reads of an earlier block stay in the cells of shared memory, which it had to itself.
  if (cell.read != own && !(shared && interval_of(cell.read) < block_start_) && conflicts(cell.read)) {
    fault_race(address + at, kind, cell.read, false, shared);
  }
  cell.write = own;
}

void Machine::check_bytes(const std::byte* address, std::size_t bytes, Access kind, ShadowCell* cells, bool shared) {
  // Nearly always the bytes of an access have one history.
  std::uint64_t different = 0;
  for (std::size_t i = 1; i < bytes; ++i) different |= (cells[i].write ^ cells[0].write) | (cells[i].read ^ cells[0].read);
  const ShadowCell before = cells[0];
  check_byte(address, 0, bytes, kind, cells[0], shared);
  if (different != 0) {
    for (std::size_t i = 1; i < bytes; ++i) check_byte(address, i, bytes, kind, cells[i], shared);
  } else if (cells[0].write != before.write || cells[0].read != before.read) {
    for (std::size_t i = 1; i < bytes; ++i) cells[i] = cells[0];
  }
}

void Machine::host_access(const void* pointer, std::size_t bytes, Access kind) {
  const auto* address = static_cast<const std::byte*>(pointer);
  if (inside_ || !heap_.holds(address) || !host_fault_.empty()) return;
  host_fault_ = fmt::format("the host {} {} bytes of device memory {}", verb(kind), bytes, heap_.describe(address));
}

void Machine::access(const void* pointer, std::size_t bytes, Access kind) {
  const OutsideKernel outside;
  const auto* address = static_cast<const std::byte*>(pointer);
  ++counts_.accesses;
  if (heap_.holds(address)) {
    const Allocation& allocation = heap_.around(address);
    if (address < allocation.begin || address + bytes > allocation.begin + allocation.bytes) {
      const std::byte* first =
          address < allocation.begin ? address : std::max<const std::byte*>(address, allocation.begin + allocation.bytes);
      fault_access(bytes, kind, "out of bounds, " + heap_.describe(first));
    }
    return check_bytes(address, bytes, kind, heap_.shadow(address), false);
  }
  if (address >= shared_begin_ && address < shared_begin_ + shared_bytes_) {
    if (address >= dynamic_begin_ && address < dynamic_begin_ + kMaxDynamicShared &&
        address + bytes > dynamic_begin_ + dynamic_bytes_) {
      fault_access(
          bytes, kind,
          fmt::format("out of bounds, at byte {} of {} of dynamic shared memory", address - dynamic_begin_, dynamic_bytes_));
    }
    return check_bytes(address, bytes, kind, shared_cells_.data() + (address - shared_begin_), true);
  }
  if (fiber_->holds(address)) return;
  if (fibers_.holds(address)) fault_access(bytes, kind, "of another thread's local variable");
  const bool own_program = address >= &__executable_start && address < &_end;
  const bool argument =
      static_cast<std::size_t>(address - static_cast<const std::byte*>(shape_.arguments)) < shape_.arguments_bytes;
  if (kind == Access::read && (own_program || argument)) return;
  fault_access(bytes, kind, "of the host's memory");
}

void Machine::atomic_access(const void* address, std::size_t bytes) {
  const OutsideKernel outside;
  if (reinterpret_cast<std::uintptr_t>(address) % bytes != 0) fault("misaligned address of an atomic operation");
  access(address, bytes, Access::atomic);
}

}  // namespace spipe::emulator
