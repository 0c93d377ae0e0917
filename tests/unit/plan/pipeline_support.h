// Random pipelines for the tests of plan/.
#pragma once

#include <random>
#include <string>

#include "spipe/plan/schedules.h"
#include "support.h"

namespace spipe::plan::testing {

class Dice {
 public:
  explicit Dice(std::uint32_t seed) : engine_(seed) {}
  int from(int low, int high) { return low + static_cast<int>(engine_() % static_cast<std::uint32_t>(high - low + 1)); }
  bool coin() { return from(0, 1) == 1; }
  std::vector<int> cuts(int end) {
    std::vector<int> list = {0};
    const int density = from(1, 4);
    for (int u = 1; u < end; ++u) {
      if (from(1, density) == 1) list.push_back(u);
    }
    return list;
  }

 private:
  std::mt19937 engine_;
};

struct RandomPipeline {
  model::ModelShape shape;
  std::string schedule;
  PipelineInput input;  // points to `shape`: not to be copied apart from it
  [[nodiscard]] std::string text() const;
};

// Whatever can be asked for; some of it is refused.
void roll(Dice& dice, RandomPipeline& out);

}  // namespace spipe::plan::testing
