// A device whose kernels are the CUDA ones, on the emulator: its memory is the emulated device's, where kernels may touch
// nothing else, its streams are the CPU device's.
#pragma once

#include <memory>

#include "spipe/device/device.h"

namespace spipe::test {

// Everything the host writes to its memory counts as written. One at a time.
[[nodiscard]] std::unique_ptr<device::Device> make_emulated_device();

}  // namespace spipe::test
