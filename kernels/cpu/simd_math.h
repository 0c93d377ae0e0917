// exp and log over sixteen lanes: Cody-Waite reduction and minimax polynomials with explicit fma, so that every
// instruction set gives the same bits. Relative errors (checked against double in tests/kernels): exp 1 ulp, log 2 ulp.
#pragma once

#include "kernels/cpu/simd.h"

namespace spipe::cpu::SPIPE_ISA {

inline constexpr float kLn2High = 0x1.62e430p-1f;  // float(ln 2) and what it lacks
inline constexpr float kLn2Low = -0x1.05c610p-29f;

// exp: x = n ln 2 + r, |r| <= ln 2 / 2. Overflows to infinity; below -87 the result is zero (it would be 1.6e-38 or less:
// products that underflow cost a hundred cycles, and a masked score is -inf). NaN stays.
SPIPE_INLINE Vec exp(Vec x) {
  const Vec round = set(0x1.8p23f);  // adding it leaves the nearest whole number in the low bits
  const Vec lowest = set(-87.0f);
  const Mask vanishes = less(x, lowest);
  x = min(set(89.0f), max(lowest, x));
  const Vec shifted = fma(x, set(0x1.715476p0f), round);
  const Vec n = shifted - round;
  const Vec r = fnma(n, set(kLn2Low), fnma(n, set(kLn2High), x));
  Vec q = set(1.381314098e-3f);
  q = fma(q, r, set(8.369418936e-3f));
  q = fma(q, r, set(4.166845686e-2f));
  q = fma(q, r, set(1.666651479e-1f));
  q = fma(q, r, set(4.999999305e-1f));
  const Vec p = set(1.0f) + fma(q, r * r, r);
  return select(vanishes, zero(), scale_by_power(p, n, isub(to_bits(shifted), iset(0x4b400000))));
}

// log: x = m 2^e, m in [sqrt(1/2), sqrt(2)), f = m - 1. log(0) = -inf, negative gives NaN, denormals are exact.
SPIPE_INLINE Vec log(Vec x) {
  const Mask tiny = less(x, set(0x1p-126f));
  const IVec bits = to_bits(select(tiny, x * set(0x1p25f), x));
  const IVec biased = shift_right<23>(iadd(bits, iset(0x3f800000 - 0x3f3504f3)));
  const Vec e = to_float(isub(biased, iset(127))) - select(tiny, set(25.0f), zero());
  const Vec f = from_bits(isub(bits, shift_left<23>(isub(biased, iset(127))))) - set(1.0f);
  Vec p = set(6.757599553e-2f);
  p = fma(p, f, set(-1.169432931e-1f));
  p = fma(p, f, set(1.189349585e-1f));
  p = fma(p, f, set(-1.240308357e-1f));
  p = fma(p, f, set(1.421855669e-1f));
  p = fma(p, f, set(-1.666809047e-1f));
  p = fma(p, f, set(2.000216695e-1f));
  p = fma(p, f, set(-2.500000871e-1f));
  p = fma(p, f, set(3.333331197e-1f));
  const Vec square = f * f;
  Vec rest = fma(p, square * f, e * set(kLn2Low));
  rest = fnma(set(0.5f), square, rest);
  const Vec result = fma(e, set(kLn2High), f + rest);
  const Vec infinity = set(__builtin_inff());
  const Vec special = select(equal(x, zero()), negate(infinity), select(equal(x, infinity), x, set(__builtin_nanf(""))));
  const Mask ordinary = mask_and(less(zero(), x), less(x, infinity));
  return select(ordinary, result, special);
}

SPIPE_INLINE float first_lane(Vec x) {
  float lanes[kLanes];
  store(lanes, x);
  return lanes[0];
}
SPIPE_INLINE float exp(float x) { return first_lane(exp(set(x))); }
SPIPE_INLINE float log(float x) { return first_lane(log(set(x))); }

}  // namespace spipe::cpu::SPIPE_ISA
