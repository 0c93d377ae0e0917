#include <catch2/catch.hpp>
#include <cmath>

#include "spipe/optim/loss_scaling.h"

using namespace spipe::optim;

namespace {

LossScaling dynamic(std::int64_t window, std::int64_t hysteresis) {
  LossScaling scaling;
  scaling.dynamic = true;
  scaling.initial = 65536;
  scaling.window = window;
  scaling.hysteresis = hysteresis;
  return scaling;
}

}  // namespace

TEST_CASE("a scale backs off at every overflow without hysteresis, and grows after a window of good steps") {
  const LossScaling scaling = dynamic(3, 1);
  ScalerState state = first_state(scaling);
  for (int i = 0; i < 3; ++i) state = after_step(scaling, state, true);
  CHECK(state.scale == 8192);
  for (int i = 0; i < 2; ++i) state = after_step(scaling, state, false);
  CHECK((state.scale == 8192 && state.good_steps == 2));
  state = after_step(scaling, state, true);
  CHECK((state.scale == 4096 && state.good_steps == 0));
  for (int i = 0; i < 3; ++i) state = after_step(scaling, state, false);
  CHECK((state.scale == 8192 && state.good_steps == 0));
}

TEST_CASE("hysteresis takes the first overflows and only growth refills it") {
  const LossScaling scaling = dynamic(4, 3);
  ScalerState state = first_state(scaling);
  const auto step = [&](bool overflow) { return (state = after_step(scaling, state, overflow)).scale; };
  CHECK(step(true) == 65536);
  CHECK(step(false) == 65536);
  CHECK(step(true) == 65536);
  CHECK(step(true) == 32768);
  CHECK(step(false) == 32768);
  CHECK(step(true) == 16384);  // used up
  for (int i = 0; i < 3; ++i) CHECK(step(false) == 16384);
  CHECK(step(false) == 32768);  // grown: refilled
  CHECK(state.hysteresis_left == 3);
  CHECK(step(true) == 32768);
}

TEST_CASE("a scale keeps to its bounds, and a fixed one never moves") {
  LossScaling scaling = dynamic(1, 1);
  scaling.minimum = 16384;
  scaling.maximum = 131072;
  ScalerState state = first_state(scaling);
  for (int i = 0; i < 9; ++i) state = after_step(scaling, state, true);
  CHECK(state.scale == 16384);
  CHECK(at_minimum(scaling, state));
  for (int i = 0; i < 9; ++i) state = after_step(scaling, state, false);
  CHECK(state.scale == 131072);
  CHECK_FALSE(at_minimum(scaling, state));

  LossScaling fixed;
  fixed.initial = 1024;
  const ScalerState start = first_state(fixed);
  CHECK(after_step(fixed, start, true) == start);
  CHECK(after_step(fixed, start, false) == start);
  CHECK((at_minimum(fixed, start) && fixed.scales() && !LossScaling{}.scales()));
}

TEST_CASE("loss scales are powers of two") {
  for (const double good : {1.0, 2.0, 0.5, 65536.0, 0x1p40}) CHECK(is_loss_scale(good));
  for (const double bad : {0.0, -2.0, 3.0, 1000.0, 0x1p127, static_cast<double>(INFINITY), static_cast<double>(NAN)})
    CHECK_FALSE(is_loss_scale(bad));
}
