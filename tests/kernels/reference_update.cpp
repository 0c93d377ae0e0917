// The update rules, element by element as kernels/ops.h writes them.
#include <bit>
#include <cmath>
#include <cstdint>

#include "tests/kernels/reference_ops.h"

namespace spipe::test {
namespace {

std::uint32_t mix(std::uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352dU;
  x ^= x >> 15;
  x *= 0x846ca68bU;
  return x ^ x >> 16;
}

std::uint16_t& half_at(const Ptr& p, std::int64_t i) { return static_cast<std::uint16_t*>(p.data)[i]; }

float moment_at(const Ptr& p, std::int64_t i) {
  return p.dtype == DType::bf16 ? f32_from_bf16(half_at(p, i)) : static_cast<const float*>(p.data)[i];
}

void store_moment(const Ptr& p, std::int64_t i, float x, std::uint32_t random) {
  if (p.dtype != DType::bf16) {
    static_cast<float*>(p.data)[i] = x;
  } else {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    half_at(p, i) = static_cast<std::uint16_t>((std::isnan(x) ? bits | 0x400000U : bits + random) >> 16);
  }
}

float master_at(const UpdatePlanes& planes, std::int64_t i) {
  if (planes.master.dtype == DType::f32) return static_cast<const float*>(planes.master.data)[i];
  const auto low = static_cast<std::int16_t>(half_at(planes.master, i));
  return std::bit_cast<float>((std::uint32_t{half_at(planes.compute, i)} << 16) +
                              static_cast<std::uint32_t>(std::int32_t{low}));
}

}  // namespace

void ReferenceOps::update(StreamHandle*, const UpdateArgs& args) {
  for (std::int64_t i = 0; i < args.elements; ++i) {
    const float g = static_cast<float>(load(args.grad, i)) * args.grad_scale;
    const float old = master_at(args.from, i), old_m = moment_at(args.from.m, i);
    const float with_decay = std::fma(args.l2, old, g), decayed = old * args.decay;
    float p = 0, m = 0, v = 0;
    if (has_second_moment(args.rule)) {
      const bool decoupled = args.rule == UpdateRule::adamw;
      const float d = decoupled ? g : with_decay;
      m = std::fma(args.beta1, old_m, args.one_minus_beta1 * d);
      v = std::fma(args.beta2, moment_at(args.from.v, i), (args.one_minus_beta2 * d) * d);
      const float denom = std::sqrt(v) * args.inv_sqrt_bias2 + args.eps;
      p = std::fma(-args.step_size, m / denom, decoupled ? decayed : old);
    } else if (args.rule == UpdateRule::lion) {
      const float c = std::fma(args.beta1, old_m, args.one_minus_beta1 * g);
      const float sign = c > 0 ? 1.0F : c < 0 ? -1.0F : 0.0F;
      p = std::fma(-args.step_size, sign, decayed);
      m = std::fma(args.beta2, old_m, args.one_minus_beta2 * g);
    } else {
      m = std::fma(args.beta1, old_m, with_decay);
      p = std::fma(-args.step_size, args.rule == UpdateRule::sgd_nesterov ? std::fma(args.beta1, m, with_decay) : m, old);
    }
    const std::uint32_t random =
        mix(static_cast<std::uint32_t>(args.first_element + static_cast<std::uint64_t>(i)) ^ args.moment_key);
    store_moment(args.to.m, i, m, random & 0xffffU);
    if (has_second_moment(args.rule)) store_moment(args.to.v, i, v, random >> 16);
    if (args.to.master.dtype == DType::f32) {
      static_cast<float*>(args.to.master.data)[i] = p;
    } else {
      half_at(args.to.master, i) = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(p));
    }
    if (!args.to.compute) continue;
    const bool bf16 = args.to.compute.dtype == DType::bf16;
    std::uint16_t& copy = half_at(args.to.compute, i);
    copy = bf16 ? bf16_from_f32_half_up(p) : f16_from_f32(p);
    if (std::isfinite(p) && std::isinf(bf16 ? f32_from_bf16(copy) : f32_from_f16(copy))) *args.nonfinite_master = 1;
  }
}

}  // namespace spipe::test
