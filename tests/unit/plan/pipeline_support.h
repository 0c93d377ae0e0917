// Random pipelines for the tests of plan/.
#pragma once

#include <string>

#include "spipe/plan/schedules.h"
#include "support.h"

namespace spipe::plan::testing {

struct RandomPipeline {
  model::ModelShape shape;
  std::string schedule;
  PipelineInput input;  // points to `shape`: not to be copied apart from it
  [[nodiscard]] std::string text() const;
};

// Whatever can be asked for; some of it is refused.
void roll(Dice& dice, RandomPipeline& out);

}  // namespace spipe::plan::testing
