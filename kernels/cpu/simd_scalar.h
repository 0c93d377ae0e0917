// simd.h for any CPU: an array of sixteen floats. Also the definition of what each function does.
#pragma once

namespace spipe::cpu::SPIPE_ISA {

struct Vec {
  float lane[16];
};
struct IVec {
  std::int32_t lane[16];
};
struct Mask {
  bool lane[16];
};

#define SPIPE_EACH_LANE for (int i = 0; i < 16; ++i)

SPIPE_INLINE Vec set(float x) {
  Vec r;
  SPIPE_EACH_LANE r.lane[i] = x;
  return r;
}
SPIPE_INLINE Vec zero() { return set(0.0f); }

template <typename T>
SPIPE_INLINE Vec load(const T* p) {
  Vec r;
  SPIPE_EACH_LANE r.lane[i] = widen(p[i]);
  return r;
}
// Lanes n..15 are zero and their memory is not touched; 0 <= n <= 16.
template <typename T>
SPIPE_INLINE Vec load_tail(const T* p, int n) {
  Vec r = zero();
  for (int i = 0; i < n; ++i) r.lane[i] = widen(p[i]);
  return r;
}
SPIPE_INLINE void store_past_caches(float* p, Vec x) { SPIPE_EACH_LANE p[i] = x.lane[i]; }
SPIPE_INLINE void end_of_stores() {}
// The upper halves of the lanes as they are.
SPIPE_INLINE void store_upper(Bf16* p, IVec x) {
  SPIPE_EACH_LANE p[i].bits = static_cast<std::uint16_t>(static_cast<std::uint32_t>(x.lane[i]) >> 16);
}
template <typename T>
SPIPE_INLINE void store(T* p, Vec x) {
  SPIPE_EACH_LANE narrow_to(p + i, x.lane[i]);
}
template <typename T>
SPIPE_INLINE void store_tail(T* p, Vec x, int n) {
  for (int i = 0; i < n; ++i) narrow_to(p + i, x.lane[i]);
}
SPIPE_INLINE void store_half_up(Bf16* p, Vec x) { SPIPE_EACH_LANE narrow_half_up(p + i, x.lane[i]); }

SPIPE_INLINE Vec add(Vec a, Vec b) {
  SPIPE_EACH_LANE a.lane[i] += b.lane[i];
  return a;
}
SPIPE_INLINE Vec sub(Vec a, Vec b) {
  SPIPE_EACH_LANE a.lane[i] -= b.lane[i];
  return a;
}
SPIPE_INLINE Vec mul(Vec a, Vec b) {
  SPIPE_EACH_LANE a.lane[i] *= b.lane[i];
  return a;
}
SPIPE_INLINE Vec div(Vec a, Vec b) {
  SPIPE_EACH_LANE a.lane[i] /= b.lane[i];
  return a;
}
SPIPE_INLINE Vec sqrt(Vec a) {
  SPIPE_EACH_LANE a.lane[i] = __builtin_sqrtf(a.lane[i]);
  return a;
}
// Like the x86 instructions: the second operand when either is NaN.
SPIPE_INLINE Vec max(Vec a, Vec b) {
  SPIPE_EACH_LANE a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
  return a;
}
SPIPE_INLINE Vec min(Vec a, Vec b) {
  SPIPE_EACH_LANE a.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
  return a;
}
// a * b + c and c - a * b, each rounded once.
SPIPE_INLINE Vec fma(Vec a, Vec b, Vec c) {
  SPIPE_EACH_LANE a.lane[i] = __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]);
  return a;
}
SPIPE_INLINE Vec fnma(Vec a, Vec b, Vec c) {
  SPIPE_EACH_LANE a.lane[i] = __builtin_fmaf(-a.lane[i], b.lane[i], c.lane[i]);
  return a;
}

// Ordered comparisons: false when a lane is NaN; is_nan is true then.
SPIPE_INLINE Mask less(Vec a, Vec b) {
  Mask r;
  SPIPE_EACH_LANE r.lane[i] = a.lane[i] < b.lane[i];
  return r;
}
SPIPE_INLINE Mask less_equal(Vec a, Vec b) {
  Mask r;
  SPIPE_EACH_LANE r.lane[i] = a.lane[i] <= b.lane[i];
  return r;
}
SPIPE_INLINE Mask equal(Vec a, Vec b) {
  Mask r;
  SPIPE_EACH_LANE r.lane[i] = a.lane[i] == b.lane[i];
  return r;
}
SPIPE_INLINE Mask is_nan(Vec a) {
  Mask r;
  SPIPE_EACH_LANE r.lane[i] = a.lane[i] != a.lane[i];
  return r;
}
SPIPE_INLINE Mask iequal(IVec a, IVec b) {
  Mask r;
  SPIPE_EACH_LANE r.lane[i] = a.lane[i] == b.lane[i];
  return r;
}
SPIPE_INLINE Mask igreater(IVec a, IVec b) {
  Mask r;
  SPIPE_EACH_LANE r.lane[i] = a.lane[i] > b.lane[i];
  return r;
}
SPIPE_INLINE Mask mask_or(Mask a, Mask b) {
  SPIPE_EACH_LANE a.lane[i] = a.lane[i] || b.lane[i];
  return a;
}
SPIPE_INLINE Mask mask_and(Mask a, Mask b) {
  SPIPE_EACH_LANE a.lane[i] = a.lane[i] && b.lane[i];
  return a;
}
SPIPE_INLINE bool any(Mask m) {
  bool r = false;
  SPIPE_EACH_LANE r = r || m.lane[i];
  return r;
}
// m ? a : b
SPIPE_INLINE Vec select(Mask m, Vec a, Vec b) {
  SPIPE_EACH_LANE a.lane[i] = m.lane[i] ? a.lane[i] : b.lane[i];
  return a;
}

// Sum and maximum of the lanes by one tree: lanes i and i+8, then i and i+4, i+2, i+1.
SPIPE_INLINE float sum(Vec v) {
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) v.lane[i] += v.lane[i + half];
  }
  return v.lane[0];
}
SPIPE_INLINE float max_lane(Vec v) {
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) v.lane[i] = v.lane[i] > v.lane[i + half] ? v.lane[i] : v.lane[i + half];
  }
  return v.lane[0];
}

// Integer lanes wrap around.
SPIPE_INLINE IVec iset(std::int32_t x) {
  IVec r;
  SPIPE_EACH_LANE r.lane[i] = x;
  return r;
}
SPIPE_INLINE IVec iota() {  // 0, 1, ..., 15
  IVec r;
  SPIPE_EACH_LANE r.lane[i] = i;
  return r;
}
SPIPE_INLINE IVec to_bits(Vec x) { return __builtin_bit_cast(IVec, x); }
SPIPE_INLINE Vec from_bits(IVec x) { return __builtin_bit_cast(Vec, x); }
SPIPE_INLINE Vec to_float(IVec x) {
  Vec r;
  SPIPE_EACH_LANE r.lane[i] = static_cast<float>(x.lane[i]);
  return r;
}
SPIPE_INLINE IVec iadd(IVec a, IVec b) {
  SPIPE_EACH_LANE a.lane[i] =
      static_cast<std::int32_t>(static_cast<std::uint32_t>(a.lane[i]) + static_cast<std::uint32_t>(b.lane[i]));
  return a;
}
SPIPE_INLINE IVec imul(IVec a, IVec b) {  // low halves of the products
  SPIPE_EACH_LANE a.lane[i] =
      static_cast<std::int32_t>(static_cast<std::uint32_t>(a.lane[i]) * static_cast<std::uint32_t>(b.lane[i]));
  return a;
}
SPIPE_INLINE IVec isub(IVec a, IVec b) {
  SPIPE_EACH_LANE a.lane[i] =
      static_cast<std::int32_t>(static_cast<std::uint32_t>(a.lane[i]) - static_cast<std::uint32_t>(b.lane[i]));
  return a;
}
SPIPE_INLINE IVec bit_and(IVec a, IVec b) {
  SPIPE_EACH_LANE a.lane[i] &= b.lane[i];
  return a;
}
SPIPE_INLINE IVec bit_or(IVec a, IVec b) {
  SPIPE_EACH_LANE a.lane[i] |= b.lane[i];
  return a;
}
SPIPE_INLINE IVec bit_xor(IVec a, IVec b) {
  SPIPE_EACH_LANE a.lane[i] ^= b.lane[i];
  return a;
}
template <int kBits>
SPIPE_INLINE IVec shift_left(IVec a) {
  SPIPE_EACH_LANE a.lane[i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(a.lane[i]) << kBits);
  return a;
}
template <int kBits>  // logical
SPIPE_INLINE IVec shift_right(IVec a) {
  SPIPE_EACH_LANE a.lane[i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(a.lane[i]) >> kBits);
  return a;
}
// p * 2^n for whole n in [-126, 128] given both as float and as integer; rounds once.
SPIPE_INLINE Vec scale_by_power(Vec p, Vec, IVec n) {
  SPIPE_EACH_LANE {
    const std::int32_t first = n.lane[i] >> 1, second = n.lane[i] - first;
    p.lane[i] = p.lane[i] * float_of(static_cast<std::uint32_t>(first + 127) << 23) *
                float_of(static_cast<std::uint32_t>(second + 127) << 23);
  }
  return p;
}

// Transposes the 16 x 16 matrix whose rows are r[0..15].
SPIPE_INLINE void transpose(Vec* r) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < i; ++j) {
      const float x = r[i].lane[j];
      r[i].lane[j] = r[j].lane[i];
      r[j].lane[i] = x;
    }
  }
}

#undef SPIPE_EACH_LANE

}  // namespace spipe::cpu::SPIPE_ISA
