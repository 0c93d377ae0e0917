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
template <typename T>
double finish_gradient_typed(const float* a, const float* b, T* dst, std::int64_t elements) {
  Doubles s[kParts] = {};
  for (std::int64_t i = 0; i < elements; i += kLanes) {
    const std::int64_t n = elements - i;
    Vec g = load_n(a + i, n);
    if (b != nullptr) g = g + load_n(b + i, n);
    store_n(dst + i, g, n);
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

double finish_gradient(const float* a, const float* b, void* dst, DType type, std::int64_t elements) {
  double result = 0;
  with_storage(type, [&](auto t) { result = finish_gradient_typed(a, b, static_cast<decltype(t)*>(dst), elements); });
  return result;
}

struct NoCopy {};
// Smallest magnitude that rounds to infinity.
SPIPE_INLINE float overflow_of(Bf16) { return 0x1.ffp127f; }
SPIPE_INLINE float overflow_of(Half) { return 65520.0f; }
SPIPE_INLINE void store_copy(Bf16* p, Vec x, std::int64_t n) {
  if (n >= kLanes) return store_half_up(p, x);
  Bf16 all[kLanes];
  store_half_up(all, x);
  for (std::int64_t i = 0; i < n; ++i) p[i] = all[i];
}
SPIPE_INLINE void store_copy(Half* p, Vec x, std::int64_t n) { store_n(p, x, n); }

// Out of place the caches need not hold what was written, nor read it first.
template <bool past_caches>
SPIPE_INLINE void put(float* p, Vec x, std::int64_t n) {
  if constexpr (past_caches) {
    if (n >= kLanes) return store_past_caches(p, x);
  }
  store_n(p, x, n);
}

template <bool past_caches, typename G, typename C>
bool adamw_typed(const AdamWArgs& args, std::int64_t first, std::int64_t count) {
  const G* grad = static_cast<const G*>(args.grad.data) + first;
  float* master = args.master + first;
  float* moment = args.m + first;
  float* variance = args.v + first;
  const bool in_place = args.from_master == nullptr;
  const float* old_master = in_place ? master : args.from_master + first;
  const float* old_moment = in_place ? moment : args.from_m + first;
  const float* old_variance = in_place ? variance : args.from_v + first;
  const Vec grad_scale = set(args.grad_scale), beta1 = set(args.beta1), rest1 = set(args.one_minus_beta1);
  const Vec beta2 = set(args.beta2), rest2 = set(args.one_minus_beta2), decay = set(args.decay);
  const Vec inv_sqrt_bias2 = set(args.inv_sqrt_bias2), eps = set(args.eps), step_size = set(args.step_size);
  bool overflow = false;
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const std::int64_t n = count - i;
    const Vec g = load_n(grad + i, n) * grad_scale;
    const Vec m = fma(beta1, load_n(old_moment + i, n), rest1 * g);
    const Vec v = fma(beta2, load_n(old_variance + i, n), rest2 * g * g);
    const Vec denominator = sqrt(v) * inv_sqrt_bias2 + eps;
    const Vec p = fnma(step_size, m / denominator, load_n(old_master + i, n) * decay);
    put<past_caches>(moment + i, m, n);
    put<past_caches>(variance + i, v, n);
    put<past_caches>(master + i, p, n);
    if constexpr (!__is_same(C, NoCopy)) {
      store_copy(static_cast<C*>(args.compute_copy.data) + first + i, p, n);
      const Vec magnitude = abs(p);
      if (any(mask_and(less_equal(set(overflow_of(C{})), magnitude), less(magnitude, set(__builtin_inff()))))) overflow = true;
    }
  }
  if constexpr (past_caches) end_of_stores();
  return overflow;
}

template <bool past_caches>
bool adamw_stored(const AdamWArgs& args, std::int64_t first, std::int64_t count) {
  bool overflow = false;
  with_storage(args.grad.dtype, [&](auto g) {
    using G = decltype(g);
    if (args.compute_copy.data == nullptr) {
      overflow = adamw_typed<past_caches, G, NoCopy>(args, first, count);
    } else if (args.compute_copy.dtype == DType::bf16) {
      overflow = adamw_typed<past_caches, G, Bf16>(args, first, count);
    } else {
      overflow = adamw_typed<past_caches, G, Half>(args, first, count);
    }
  });
  return overflow;
}

bool adamw(const AdamWArgs& args, std::int64_t first, std::int64_t count) {
  const auto aligned = [first](const float* p) { return reinterpret_cast<std::uintptr_t>(p + first) % 64 == 0; };
  const bool past_caches = args.from_master != nullptr && aligned(args.master) && aligned(args.m) && aligned(args.v);
  return past_caches ? adamw_stored<true>(args, first, count) : adamw_stored<false>(args, first, count);
}

}  // namespace

extern const UpdateTable update_table;
const UpdateTable update_table = {.finish_gradient = finish_gradient, .adamw = adamw};

}  // namespace spipe::cpu::SPIPE_ISA
