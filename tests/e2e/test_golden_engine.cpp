// The golden models on the CPU device: resident, and streamed through the smallest budget, five steps of both cases.
#include <catch2/catch.hpp>

#include "golden_engine.h"

namespace spipe::test {

TEST_CASE("golden models train through the engine, resident") {
  REQUIRE_FALSE(golden_models().empty());
  for (const auto& folder : golden_models()) {
    for (const char* name : {"clip", "noclip"}) check_engine(folder, {.name = name});
  }
}

TEST_CASE("golden models train through the engine, streamed through the smallest budget") {
  for (const auto& folder : golden_models()) check_engine(folder, {.name = "clip", .budget = 1});
}

}  // namespace spipe::test
