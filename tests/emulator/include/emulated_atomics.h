// Atomic operations: one thread runs at a time, so plain ones do; the machine is told that they were meant to be atomic.
#pragma once

#include <algorithm>

#include "tests/emulator/machine.h"

namespace spipe::emulator {

template <typename T, typename F>
__attribute__((no_sanitize("thread"), noinline)) T change_atomically(T* address, F change) {
  Machine::instance().atomic_access(address, sizeof(T));
  const T old = *address;
  *address = change(old);
  return old;
}

}  // namespace spipe::emulator

#define SPIPE_ATOMIC(name, expression)                                                                \
  template <typename T>                                                                               \
  T name(T* address, T value) {                                                                       \
    return ::spipe::emulator::change_atomically(address, [value](T old) -> T { return expression; }); \
  }
SPIPE_ATOMIC(atomicAdd, old + value)
SPIPE_ATOMIC(atomicOr, old | value)
SPIPE_ATOMIC(atomicAnd, old& value)
SPIPE_ATOMIC(atomicMax, std::max(old, value))
SPIPE_ATOMIC(atomicMin, std::min(old, value))
SPIPE_ATOMIC(atomicExch, ((void)old, value))
#undef SPIPE_ATOMIC
template <typename T>
T atomicCAS(T* address, T expected, T value) {
  return ::spipe::emulator::change_atomically(address, [=](T old) -> T { return old == expected ? value : old; });
}
