// A CUDA device's memory for the conformance suite. Only where a device is.
#pragma once

#include "tests/kernels/conformance.h"

namespace spipe::test {

// Copies wait for what was enqueued on the default stream, and report its faults as InternalError.
[[nodiscard]] Memory& cuda_memory();

}  // namespace spipe::test
