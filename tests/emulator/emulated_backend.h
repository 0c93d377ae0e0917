// The CUDA kernels on the emulated device, as a backend of the conformance suite.
#pragma once

#include "kernels/cuda/cuda_ops.h"
#include "tests/emulator/emulated_memory.h"
#include "tests/kernels/conformance.h"

namespace spipe::test {

template <CudaAttention attention>
const Backends& emulated_cuda() {
  static EmulatedMemory memory;
  static const std::unique_ptr<Ops> ops = make_cuda_ops(memory.allocate(kCudaScratchBytes), attention);
  static const Backends backends = {{.name = "emulated CUDA",
                                     .ops = ops.get(),
                                     .memory = &memory,
                                     .rounds_probabilities = attention == CudaAttention::kBest}};
  return backends;
}

}  // namespace spipe::test
