// See ops_update.h; compiled once for each instruction set.
#include "kernels/cpu/ops_update.h"

#include "kernels/cpu/simd.h"

namespace spipe::cpu::SPIPE_ISA {
namespace {

// As many double lanes as fit a register; 16 in all.
#if defined(__AVX512F__)
constexpr int kWide = 8;
#else
constexpr int kWide = 4;
#endif
constexpr int kParts = kLanes / kWide;
using Floats = float __attribute__((vector_size(4 * kWide)));
using Doubles = double __attribute__((vector_size(8 * kWide)));

// Squares of floats are exact in double, so it does not matter whether multiply and add are fused.
template <bool checks, typename T>
double finish_gradient_typed(const float* a, const float* b, T* dst, std::int64_t elements) {
  Doubles s[kParts] = {};
  for (std::int64_t i = 0; i < elements; i += kLanes) {
    const std::int64_t n = elements - i;
    Vec g = load_n(a + i, n);
    if (b != nullptr) g = g + load_n(b + i, n);
    store_n(dst + i, g, n);
    if constexpr (!checks) continue;
    float rounded[kLanes];
    store(rounded, load_n(dst + i, n));
    for (int part = 0; part < kParts; ++part) {
      Floats some;
      __builtin_memcpy(&some, rounded + kWide * part, sizeof(some));
      const Doubles x = __builtin_convertvector(some, Doubles);
      s[part] += x * x;
    }
  }
  double lanes[kLanes];
  __builtin_memcpy(lanes, s, sizeof(lanes));
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

double finish_gradient(const float* a, const float* b, void* dst, DType type, std::int64_t elements, bool checks) {
  double result = 0;
  with_storage(type, [&](auto t) {
    auto* typed = static_cast<decltype(t)*>(dst);
    result = checks ? finish_gradient_typed<true>(a, b, typed, elements) : finish_gradient_typed<false>(a, b, typed, elements);
  });
  return result;
}

// Smallest magnitude that rounds to infinity.
SPIPE_INLINE float overflow_of(DType copy) { return copy == DType::bf16 ? 0x1.ffp127f : 65520.0f; }

SPIPE_INLINE Vec load_some(const void* p, DType type, std::int64_t at, std::int64_t n) {
  if (type == DType::f32) return load_n(static_cast<const float*>(p) + at, n);
  if (type == DType::bf16) return load_n(static_cast<const Bf16*>(p) + at, n);
  return load_n(static_cast<const Half*>(p) + at, n);
}
SPIPE_INLINE void put_copy(void* p, DType type, std::int64_t at, Vec x, std::int64_t n) {
  if (type != DType::bf16) return store_n(static_cast<Half*>(p) + at, x, n);
  Bf16* to = static_cast<Bf16*>(p) + at;
  if (n >= kLanes) return store_half_up(to, x);
  Bf16 all[kLanes];
  store_half_up(all, x);
  for (std::int64_t i = 0; i < n; ++i) to[i] = all[i];
}
SPIPE_INLINE void put_upper(void* p, std::int64_t at, IVec x, std::int64_t n) {
  Bf16* to = static_cast<Bf16*>(p) + at;
  if (n >= kLanes) return store_upper(to, x);
  Bf16 all[kLanes];
  store_upper(all, x);
  for (std::int64_t i = 0; i < n; ++i) to[i] = all[i];
}
// Out of place the caches need not hold what was written, nor read it first.
SPIPE_INLINE void put(void* p, std::int64_t at, Vec x, std::int64_t n, bool past_caches) {
  float* to = static_cast<float*>(p) + at;
  if (past_caches && n >= kLanes) return store_past_caches(to, x);
  store_n(to, x, n);
}

SPIPE_INLINE IVec constant(std::uint32_t x) { return iset(static_cast<std::int32_t>(x)); }
// A master in two halves; see UpdatePlanes.
SPIPE_INLINE Vec join(Vec upper, Vec lower) {
  const IVec unsigned_low = shift_right<16>(to_bits(lower));
  return from_bits(iadd(to_bits(upper), isub(bit_xor(unsigned_low, constant(0x8000)), constant(0x8000))));
}
SPIPE_INLINE IVec mix(IVec x) {
  x = imul(bit_xor(x, shift_right<16>(x)), constant(0x7feb352d));
  x = imul(bit_xor(x, shift_right<15>(x)), constant(0x846ca68b));
  return bit_xor(x, shift_right<16>(x));
}
SPIPE_INLINE void put_random(void* p, std::int64_t at, Vec x, IVec random, std::int64_t n) {
  const IVec bits = to_bits(x);
  const Vec up = from_bits(iadd(bits, random)), quiet = from_bits(bit_or(bits, constant(0x400000)));
  put_upper(p, at, to_bits(select(is_nan(x), quiet, up)), n);
}
SPIPE_INLINE Vec sign_of(Vec x) { return select(less(zero(), x), set(1.0f), select(less(x, zero()), set(-1.0f), zero())); }

// How gradient, parameters and moments are stored: known at compile time for the usual combinations, so that nothing is decided
// within the loop, which keeps up with memory then.
enum class Form : std::uint8_t { any, alone, copied, split };  // fp32 by itself; bf16 gradients and a bf16 copy; the same split
template <Form form, bool narrow>
struct Kinds {
  static constexpr bool known = form != Form::any;
  DType grad, moment, copy;
  bool split, copies;
  SPIPE_INLINE explicit Kinds(const UpdateArgs& a)
      : grad(known ? (form == Form::alone ? DType::f32 : DType::bf16) : a.grad.dtype),
        moment(known ? (narrow ? DType::bf16 : DType::f32) : a.to.m.dtype),
        copy(known ? DType::bf16 : a.to.compute.dtype),
        split(known ? form == Form::split : a.to.master.dtype == DType::u16),
        copies(known ? form != Form::alone : a.to.compute.data != nullptr) {}
};

template <UpdateRule rule, Form form, bool narrow>
bool update_by(const UpdateArgs& a, std::int64_t first, std::int64_t count, bool past_caches) {
  constexpr bool second = rule == UpdateRule::adamw || rule == UpdateRule::adam;
  const UpdatePlanes from = a.from, to = a.to;
  const Kinds<form, narrow> kinds(a);
  const bool rounds = kinds.moment == DType::bf16;
  const Vec grad_scale = set(a.grad_scale), beta1 = set(a.beta1), rest1 = set(a.one_minus_beta1);
  const Vec beta2 = set(a.beta2), rest2 = set(a.one_minus_beta2), decay = set(a.decay), l2 = set(a.l2);
  const Vec inv_sqrt_bias2 = set(a.inv_sqrt_bias2), eps = set(a.eps), step_size = set(a.step_size);
  const Vec too_large = set(overflow_of(kinds.copy)), infinity = set(__builtin_inff());
  bool overflow = false;
  for (std::int64_t i = first; i < first + count; i += kLanes) {
    const std::int64_t n = first + count - i;
    const Vec g = load_some(a.grad.data, kinds.grad, i, n) * grad_scale;
    const Vec old = kinds.split ? join(load_n(static_cast<const Bf16*>(from.compute.data) + i, n),
                                       load_n(static_cast<const Bf16*>(from.master.data) + i, n))
                                : load_n(static_cast<const float*>(from.master.data) + i, n);
    const Vec old_m = load_some(from.m.data, kinds.moment, i, n);
    Vec p, m, v = zero();
    if constexpr (second) {
      const Vec d = rule == UpdateRule::adam ? fma(l2, old, g) : g;
      m = fma(beta1, old_m, rest1 * d);
      v = fma(beta2, load_some(from.v.data, kinds.moment, i, n), rest2 * d * d);
      const Vec denominator = sqrt(v) * inv_sqrt_bias2 + eps;
      p = fnma(step_size, m / denominator, rule == UpdateRule::adam ? old : old * decay);
    } else if constexpr (rule == UpdateRule::lion) {
      p = fnma(step_size, sign_of(fma(beta1, old_m, rest1 * g)), old * decay);
      m = fma(beta2, old_m, rest2 * g);
    } else {
      const Vec d = fma(l2, old, g);
      m = fma(beta1, old_m, d);
      p = fnma(step_size, rule == UpdateRule::sgd_nesterov ? fma(beta1, m, d) : m, old);
    }
    if (rounds) {
      const auto number = static_cast<std::uint32_t>(a.first_element + static_cast<std::uint64_t>(i));
      const IVec random = mix(bit_xor(iadd(constant(number), iota()), constant(a.moment_key)));
      put_random(to.m.data, i, m, bit_and(random, constant(0xffff)), n);
      if constexpr (second) put_random(to.v.data, i, v, shift_right<16>(random), n);
    } else {
      put(to.m.data, i, m, n, past_caches);
      if constexpr (second) put(to.v.data, i, v, n, past_caches);
    }
    if (kinds.split) {
      put_upper(to.master.data, i, shift_left<16>(to_bits(p)), n);
    } else {
      put(to.master.data, i, p, n, past_caches);
    }
    if (kinds.copies) {
      put_copy(to.compute.data, kinds.copy, i, p, n);
      const Vec magnitude = abs(p);
      if (any(mask_and(less_equal(too_large, magnitude), less(magnitude, infinity)))) overflow = true;
    }
  }
  if (past_caches) end_of_stores();
  return overflow;
}

template <UpdateRule rule>
bool update_in_form(const UpdateArgs& a, std::int64_t first, std::int64_t count, bool past_caches) {
  const bool narrow = a.to.m.dtype == DType::bf16, halves = a.grad.dtype == DType::bf16 && a.to.compute.dtype == DType::bf16;
  if (a.to.compute.data == nullptr && a.grad.dtype == DType::f32) {
    return narrow ? update_by<rule, Form::alone, true>(a, first, count, past_caches)
                  : update_by<rule, Form::alone, false>(a, first, count, past_caches);
  }
  if (a.to.compute.data == nullptr || !halves) return update_by<rule, Form::any, false>(a, first, count, past_caches);
  if (a.to.master.dtype == DType::u16) {
    return narrow ? update_by<rule, Form::split, true>(a, first, count, past_caches)
                  : update_by<rule, Form::split, false>(a, first, count, past_caches);
  }
  return narrow ? update_by<rule, Form::copied, true>(a, first, count, past_caches)
                : update_by<rule, Form::copied, false>(a, first, count, past_caches);
}

bool update(const UpdateArgs& args, std::int64_t first, std::int64_t count) {
  const auto aligned = [first](const Ptr& p) {
    return p.dtype != DType::f32 ||
           (reinterpret_cast<std::uintptr_t>(p.data) + 4 * static_cast<std::uintptr_t>(first)) % 64 == 0;
  };
  const UpdatePlanes& to = args.to;
  const bool past_caches = args.from.master.data != to.master.data && aligned(to.master) && aligned(to.m) && aligned(to.v);
  switch (args.rule) {
    case UpdateRule::adamw:
      return update_in_form<UpdateRule::adamw>(args, first, count, past_caches);
    case UpdateRule::adam:
      return update_in_form<UpdateRule::adam>(args, first, count, past_caches);
    case UpdateRule::sgd:
      return update_in_form<UpdateRule::sgd>(args, first, count, past_caches);
    case UpdateRule::sgd_nesterov:
      return update_in_form<UpdateRule::sgd_nesterov>(args, first, count, past_caches);
    case UpdateRule::lion:
      return update_in_form<UpdateRule::lion>(args, first, count, past_caches);
  }
  return false;
}

}  // namespace

extern const UpdateTable update_table;
const UpdateTable update_table = {.finish_gradient = finish_gradient, .update = update};

}  // namespace spipe::cpu::SPIPE_ISA
