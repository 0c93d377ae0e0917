// The emulated device's memory for the conformance suite: kernels must not touch guards, nor read outputs that they have not
// written.
#pragma once

#include "tests/emulator/machine.h"
#include "tests/kernels/conformance.h"

namespace spipe::test {

class EmulatedMemory final : public Memory {
 public:
  void* allocate(std::size_t bytes) override { return heap().allocate(bytes); }
  void release(void* pointer) override { heap().release(pointer); }
  void upload(void* device, const void* host, std::size_t bytes) override { heap().upload(device, host, bytes); }
  void download(void* host, const void* device, std::size_t bytes) override { heap().download(host, device, bytes); }
  void forbid(void* device, std::size_t bytes) override { heap().forbid(device, bytes); }
  void poison(void* device, std::size_t bytes) override { heap().poison(device, bytes); }

 private:
  static emulator::DeviceHeap& heap() { return emulator::Machine::instance().heap(); }
};

}  // namespace spipe::test
