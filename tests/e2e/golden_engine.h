// The golden models through the whole engine: store, plans, executor and optimizer, against the float64 reference (AdamW steps,
// tolerances of tests/golden/data/README.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "spipe/device/device.h"

namespace spipe::test {

// Folders of tests/golden/data (or of SPIPE_GOLDEN_DIR) whose architecture this engine knows; others are named in a warning.
[[nodiscard]] std::vector<std::filesystem::path> golden_models();

struct EngineCase {
  std::string name;          // of the case in golden.json: "clip" or "noclip"
  std::uint64_t budget = 0;  // 0: everything resident; 1: streamed through the smallest budget
  std::size_t steps = 5;     // at most so many of the case's
  std::function<std::unique_ptr<device::Device>()> make_device;  // the CPU with two threads when empty
};
// Fails the running test where losses, norms, clip factors or updates are not the reference's.
void check_engine(const std::filesystem::path& folder, const EngineCase& of);

}  // namespace spipe::test
