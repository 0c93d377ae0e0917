// The vector layer: exp and log against double, half types against base/dtype.h, lane trees, on every instruction set.
#include <bit>
#include <catch2/catch.hpp>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "kernels/cpu/cpu_ops.h"
#include "spipe/base/dtype.h"
#include "tests/kernels/simd_probe.h"

namespace spipe::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Named {
  Isa isa;
  const SimdProbe* probe;
};
std::vector<Named> probes() {
  std::vector<Named> result;
  for (const Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512}) {
    if (isa <= best_isa()) result.push_back({isa, &SPIPE_TABLE(isa, simd_probe)});
  }
  return result;
}

// Every 4099th float: all exponents, both signs, denormals, infinities; NaNs are tested by name.
std::vector<float> sample() {
  std::vector<float> x;
  for (std::uint64_t bits = 0; bits <= 0xffffffffu; bits += 4099) {
    const float value = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    if (!std::isnan(value)) x.push_back(value);
  }
  for (const float special : {0.0f, -0.0f, 1.0f, -1.0f, kInfinity, -kInfinity, 88.7f, 88.8f, -87.4f, -103.9f, -104.1f, 65504.0f,
                              65519.9f, 65520.0f, 0x1p-24f, 0x1p-25f, 0x1.8p-25f, 0x1.fffffep127f}) {
    x.push_back(special);
  }
  x.resize(x.size() / 16 * 16);
  return x;
}

// |actual - expected| in units of the last place of the expected float.
double ulps(float actual, double expected) {
  const float rounded = static_cast<float>(expected);
  if (std::isnan(expected) || std::isinf(rounded)) {
    return std::isnan(expected) == std::isnan(actual) && (std::isnan(expected) || actual == rounded) ? 0 : 1e9;
  }
  const double unit = static_cast<double>(std::nextafter(std::abs(rounded), kInfinity)) - std::abs(rounded);
  return std::abs(actual - expected) / unit;
}

using ArrayFunction = void (*SimdProbe::*)(const float*, float*, std::int64_t);

void check_function(ArrayFunction function, double (*reference)(double), double allowed) {
  const std::vector<float> x = sample();
  std::vector<std::vector<float>> results;
  for (const Named& p : probes()) {
    INFO(isa_name(p.isa));
    std::vector<float>& y = results.emplace_back(x.size());
    (p.probe->*function)(x.data(), y.data(), static_cast<std::int64_t>(x.size() / 16));
    double worst = 0;
    std::size_t differing = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      worst = std::max(worst, ulps(y[i], reference(x[i])));
      const bool both_nan = std::isnan(y[i]) && std::isnan(results[0][i]);
      if (!both_nan && std::bit_cast<std::uint32_t>(y[i]) != std::bit_cast<std::uint32_t>(results[0][i])) ++differing;
    }
    CHECK(worst <= allowed);
    CHECK(differing == 0);
    std::vector<float> nan(16, std::numeric_limits<float>::quiet_NaN());
    (p.probe->*function)(nan.data(), nan.data(), 1);
    CHECK(std::isnan(nan[7]));
  }
}

}  // namespace

TEST_CASE("exp is within one unit of the last place, and zero below -87, with the same bits on every instruction set") {
  check_function(
      &SimdProbe::exp, [](double x) { return x < -87 ? 0 : std::exp(x); }, 1.0);
}
TEST_CASE("log is within two units of the last place, with the same bits on every instruction set") {
  check_function(
      &SimdProbe::log, [](double x) { return std::log(x); }, 2.0);
}

TEST_CASE("half stores and loads are those of base/dtype.h, also for a part of the lanes") {
  std::vector<float> x = sample();
  for (int i = 0; i < 16; ++i) x.push_back(std::bit_cast<float>(0x7f800001u + (static_cast<std::uint32_t>(i) << 19)));  // NaNs
  for (int i = 0; i < 16; ++i) x.push_back(std::bit_cast<float>(0xff800001u + (static_cast<std::uint32_t>(i) << 19)));
  for (const Named& p : probes()) {
    INFO(isa_name(p.isa));
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < x.size(); i += 16) {
      const int n = 1 + static_cast<int>(i / 16 % 16);
      std::uint16_t bf16[16] = {}, half_up[16] = {}, f16[16] = {};
      p.probe->to_bf16(&x[i], bf16, n);
      p.probe->to_bf16_half_up(&x[i], half_up);
      p.probe->to_f16(&x[i], f16, n);
      for (int j = 0; j < 16; ++j) {
        const float value = x[i + static_cast<std::size_t>(j)];
        wrong += bf16[j] != (j < n ? bf16_from_f32(value) : 0);
        wrong += half_up[j] != bf16_from_f32_half_up(value);
        wrong += f16[j] != (j < n ? f16_from_f32(value) : 0);
      }
    }
    CHECK(wrong == 0);
    for (std::uint32_t first = 0; first < 0x10000; first += 16) {
      const int n = 1 + static_cast<int>(first / 16 % 16);
      std::uint16_t bits[16];
      for (std::uint32_t j = 0; j < 16; ++j) bits[j] = static_cast<std::uint16_t>(first + j);
      float bf16[16], f16[16];
      p.probe->from_bf16(bits, bf16, n);
      p.probe->from_f16(bits, f16, n);
      for (int j = 0; j < 16; ++j) {
        const float a = j < n ? f32_from_bf16(bits[j]) : 0, b = j < n ? f32_from_f16(bits[j]) : 0;
        wrong +=
            std::isnan(a) ? !std::isnan(bf16[j]) : std::bit_cast<std::uint32_t>(a) != std::bit_cast<std::uint32_t>(bf16[j]);
        wrong += std::isnan(b) ? !std::isnan(f16[j]) : std::bit_cast<std::uint32_t>(b) != std::bit_cast<std::uint32_t>(f16[j]);
      }
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("lanes are summed in one tree, and a square is transposed") {
  std::vector<float> x(256), y(256);
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = std::ldexp(1.0f + static_cast<float>(i) / 1000, static_cast<int>(i * 7 % 40) - 20);
  for (const Named& p : probes()) {
    INFO(isa_name(p.isa));
    for (std::size_t row = 0; row < 16; ++row) {
      float tree[16];
      float top = x[row * 16];
      for (std::size_t i = 0; i < 16; ++i) tree[i] = x[row * 16 + i], top = std::max(top, tree[i]);
      for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) tree[i] += tree[i + half];
      }
      CHECK(p.probe->sum(&x[row * 16]) == tree[0]);
      CHECK(p.probe->max_lane(&x[row * 16]) == top);
    }
    p.probe->transpose(x.data(), y.data());
    bool transposed = true;
    for (std::size_t i = 0; i < 256; ++i) transposed = transposed && y[i] == x[i % 16 * 16 + i / 16];
    CHECK(transposed);
  }
}

}  // namespace spipe::cpu
