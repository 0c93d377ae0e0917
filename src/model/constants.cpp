// Rotary tables: angles in double, rounded once.
#include <cmath>
#include <numbers>

#include "spipe/base/error.h"
#include "spipe/model/layers.h"

namespace spipe::model {
namespace {

// "llama3" (formula: tests/golden/data/README.md): short wavelengths stay, long ones are stretched by `factor`, a linear blend
// in between.
double llama3_frequency(const Rope& rope, double frequency) {
  const double wavelength = 2 * std::numbers::pi / frequency;
  const double old = static_cast<double>(rope.original_max_positions);
  if (wavelength < old / rope.high_freq_factor) return frequency;
  if (wavelength > old / rope.low_freq_factor) return frequency / rope.factor;
  const double s = (old / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  return (1 - s) * frequency / rope.factor + s * frequency;
}

}  // namespace

std::vector<double> rope_inverse_frequencies(const Rope& rope, std::int64_t head_dim) {
  std::vector<double> frequencies(static_cast<std::size_t>(head_dim / 2));
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const double plain = std::pow(rope.theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
    switch (rope.scaling) {
      case RopeScaling::none:
        frequencies[i] = plain;
        break;
      case RopeScaling::linear:
        frequencies[i] = plain / rope.factor;
        break;
      case RopeScaling::llama3:
        frequencies[i] = llama3_frequency(rope, plain);
        break;
    }
  }
  return frequencies;
}

Constants fill_constants(const ModelShape& shape, void* destination) {
  if (shape.architecture.position != PositionKind::rope) return {};
  SPIPE_CHECK(destination != nullptr, "rope tables need memory");
  const std::vector<double> frequencies = rope_inverse_frequencies(shape.architecture.rope, shape.architecture.head_dim);
  float* const cosines = static_cast<float*>(destination);
  float* const sines = reinterpret_cast<float*>(static_cast<char*>(destination) + shape.constant_bytes / 2);
  std::size_t at = 0;
  for (std::int64_t position = 0; position < shape.batch.seq_len; ++position) {
    for (const double frequency : frequencies) {
      const double angle = static_cast<double>(position) * frequency;
      cosines[at] = static_cast<float>(std::cos(angle));
      sines[at] = static_cast<float>(std::sin(angle));
      ++at;
    }
  }
  return {cosines, sines};
}

}  // namespace spipe::model
