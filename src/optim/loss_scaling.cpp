#include "spipe/optim/loss_scaling.h"

#include <algorithm>
#include <cmath>

namespace spipe::optim {

ScalerState first_state(const LossScaling& scaling) { return {scaling.initial, 0, scaling.hysteresis}; }

ScalerState after_step(const LossScaling& scaling, const ScalerState& now, bool overflow) {
  if (!scaling.dynamic) return now;
  ScalerState next = now;
  if (overflow) {
    next.good_steps = 0;
    next.hysteresis_left = std::max<std::int64_t>(0, now.hysteresis_left - 1);
    if (next.hysteresis_left == 0) next.scale = std::max(scaling.minimum, now.scale * scaling.backoff);
  } else if (++next.good_steps >= scaling.window) {
    next.scale = std::min(scaling.maximum, now.scale * scaling.growth);
    next.good_steps = 0;
    next.hysteresis_left = scaling.hysteresis;
  }
  return next;
}

bool is_loss_scale(double value) {
  int exponent = 0;
  return std::isfinite(value) && std::frexp(value, &exponent) == 0.5 && exponent >= -125 && exponent <= 127;
}

}  // namespace spipe::optim
