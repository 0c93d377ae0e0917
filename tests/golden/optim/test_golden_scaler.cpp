// The dynamic loss scale against tests/golden/data/optim.json, exactly.
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "spipe/base/file.h"
#include "spipe/optim/loss_scaling.h"

namespace spipe::optim {
namespace {

// Steps whose scale differs from the golden one.
int differences(const LossScaling& scaling, const nlohmann::json& golden) {
  ScalerState state = first_state(scaling);
  int count = 0;
  for (std::size_t i = 0; i < golden.at("overflow").size(); ++i) {
    count += state.scale == golden.at("scale_used")[i].get<double>() ? 0 : 1;
    state = after_step(scaling, state, golden.at("overflow")[i].get<int>() != 0);
    count += state.scale == golden.at("scale_after")[i].get<double>() ? 0 : 1;
  }
  return count;
}

}  // namespace

TEST_CASE("the golden loss scales are reproduced, and another interval or hysteresis gives others") {
  const nlohmann::json golden = nlohmann::json::parse(read_text("tests/golden/data/optim.json")).at("loss_scaler");
  const nlohmann::json& params = golden.at("params");
  LossScaling scaling;
  scaling.dynamic = true;
  scaling.initial = params.at("init").get<double>();
  scaling.growth = params.at("growth").get<double>();
  scaling.backoff = params.at("backoff").get<double>();
  scaling.window = params.at("interval").get<std::int64_t>();
  scaling.minimum = params.at("minimum").get<double>();
  scaling.maximum = params.at("maximum").get<double>();
  scaling.hysteresis = 1;
  REQUIRE(golden.at("overflow").size() > 40);
  CHECK(differences(scaling, golden) == 0);
  scaling.hysteresis = 2;
  CHECK(differences(scaling, golden) > 5);
  scaling.hysteresis = 1;
  ++scaling.window;
  CHECK(differences(scaling, golden) > 5);
}

}  // namespace spipe::optim
