// Loss scaling: the gradient of scale x loss is what backward computes and offload rounds, so that fp16 holds small gradients;
// the update divides by the scale again. Scales are powers of two: scaling and unscaling change exponents only.
#pragma once

#include <cstdint>

namespace spipe::optim {

// How the scale moves. Growth, backoff and hysteresis are those of Megatron's and DeepSpeed's dynamic scalers.
struct LossScaling {
  bool dynamic = false;
  double initial = 1;  // of a fixed scale: the scale
  double growth = 2, backoff = 0.5;
  double minimum = 1, maximum = 0x1p24;
  std::int64_t window = 1000;   // steps without overflow after which the scale grows
  std::int64_t hysteresis = 2;  // overflows since the last growth until the scale backs off; then every one does
  [[nodiscard]] bool scales() const { return dynamic || initial != 1; }
};

// What the next step is scaled with. Part of a checkpoint.
struct ScalerState {
  double scale = 1;
  std::int64_t good_steps = 0;       // without overflow since the last change of the scale or overflow
  std::int64_t hysteresis_left = 0;  // overflows until the scale backs off
  bool operator==(const ScalerState&) const = default;
};

[[nodiscard]] ScalerState first_state(const LossScaling& scaling);

// The state after a step that was scaled with `now`. Overflow: good_steps = 0, hysteresis_left -= 1 (not below 0), and where
// nothing is left of it scale = max(minimum, scale * backoff). Otherwise good_steps += 1, and when the window is full: scale =
// min(maximum, scale * growth), good_steps = 0, hysteresis_left refilled. A fixed scale never changes. Formula: Megatron-LM's
// DynamicGradScaler; with hysteresis 1 the rule of tests/golden/data/README.md.
[[nodiscard]] ScalerState after_step(const LossScaling& scaling, const ScalerState& now, bool overflow);

// Whether the scale cannot be lowered any more.
[[nodiscard]] inline bool at_minimum(const LossScaling& scaling, const ScalerState& now) {
  return !scaling.dynamic || now.scale <= scaling.minimum;
}

// Whether a value is a power of two that fp32 holds exactly with its inverse (2^-126 .. 2^126).
[[nodiscard]] bool is_loss_scale(double value);

}  // namespace spipe::optim
