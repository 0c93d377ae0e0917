// The golden models trained by the CUDA kernels: the emulated device under the real executor, parameters streamed through the
// smallest budget, two steps with clipping.
#include <catch2/catch.hpp>

#include "golden_engine.h"
#include "tests/emulator/emulated_device.h"
#include "tests/emulator/machine.h"

namespace spipe::test {

TEST_CASE("golden models train by CUDA kernels on the emulated device") {
  REQUIRE_FALSE(golden_models().empty());
  for (const auto& folder : golden_models()) {
    const std::uint64_t before = emulator::Machine::instance().launches();
    check_engine(folder, {.name = "clip", .budget = 1, .steps = 2, .make_device = make_emulated_device});
    CHECK(emulator::Machine::instance().launches() - before > 100);  // the kernels really ran
  }
}

}  // namespace spipe::test
