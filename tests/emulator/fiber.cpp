#include "tests/emulator/fiber.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <cstdint>

#include "spipe/base/error.h"

#if defined(__x86_64__)
// Saves the registers a call preserves and the stack pointer in *save, then takes them from `load`.
extern "C" void spipe_fiber_switch(void** save, void* load);
asm(R"(
.text
.globl spipe_fiber_switch
.type spipe_fiber_switch, @function
spipe_fiber_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size spipe_fiber_switch, . - spipe_fiber_switch
)");
#endif

namespace spipe::emulator {

#if defined(__x86_64__)

struct Fiber::Context {
  void* here = nullptr;   // the fiber's stack pointer while it does not run
  void* there = nullptr;  // resume()'s caller's while it does
};

void Fiber::restart() {
  // As if spipe_fiber_switch had been called at the entry's first instruction: six registers, then the return address. The
  // entry finds the stack as after a call: 8 below a multiple of 16.
  auto* top = reinterpret_cast<std::uintptr_t*>(high_) - 2;
  *top = reinterpret_cast<std::uintptr_t>(entry_);
  for (int i = 1; i <= 6; ++i) top[-i] = 0;
  context_->here = top - 6;
}

void Fiber::resume() { spipe_fiber_switch(&context_->there, context_->here); }
void Fiber::leave() { spipe_fiber_switch(&context_->here, context_->there); }

#else

struct Fiber::Context {
  ucontext_t here, there;
};

void Fiber::restart() {
  getcontext(&context_->here);
  context_->here.uc_stack.ss_sp = low_;
  context_->here.uc_stack.ss_size = static_cast<std::size_t>(high_ - low_);
  context_->here.uc_link = nullptr;
  makecontext(&context_->here, entry_, 0);
}

void Fiber::resume() { swapcontext(&context_->there, &context_->here); }
void Fiber::leave() { swapcontext(&context_->here, &context_->there); }

#endif

Fiber::Fiber(std::byte* low, std::byte* high, void (*entry)())
    : low_(low), high_(high), entry_(entry), context_(std::make_unique<Context>()) {
  restart();
}
Fiber::~Fiber() = default;

namespace {
constexpr std::size_t kGuardBytes = 4096;
constexpr std::size_t kSpacing = FiberPool::kStackBytes + kGuardBytes;
}  // namespace

FiberPool::~FiberPool() {
  for (std::byte* slab : slabs_) munmap(slab, kSlabStacks * kSpacing);
}

void FiberPool::add_slab() {
  void* memory =
      mmap(nullptr, kSlabStacks * kSpacing, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  SPIPE_CHECK(memory != MAP_FAILED, "no memory for the stacks of emulated threads");
  auto* slab = static_cast<std::byte*>(memory);
  slabs_.push_back(slab);
  for (std::size_t i = 0; i < kSlabStacks; ++i) {
    std::byte* guard = slab + i * kSpacing;
    SPIPE_CHECK(mprotect(guard, kGuardBytes, PROT_NONE) == 0, "mprotect of a guard page");
    fibers_.push_back(std::make_unique<Fiber>(guard + kGuardBytes, guard + kSpacing, entry_));
    idle_.push_back(fibers_.back().get());
  }
}

Fiber* FiberPool::take() {
  if (idle_.empty()) add_slab();
  Fiber* fiber = idle_.back();
  idle_.pop_back();
  return fiber;
}

void FiberPool::reset() {
  idle_.clear();
  for (const auto& fiber : fibers_) {
    fiber->restart();
    idle_.push_back(fiber.get());
  }
}

bool FiberPool::holds(const std::byte* address) const {
  for (const std::byte* slab : slabs_) {
    if (address >= slab && address < slab + kSlabStacks * kSpacing) return true;
  }
  return false;
}

}  // namespace spipe::emulator
