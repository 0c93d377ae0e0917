// simd.h as two __m256 (AVX2, FMA, F16C).
#pragma once

namespace spipe::cpu::SPIPE_ISA {

struct Vec {
  __m256 lo, hi;
};
struct IVec {
  __m256i lo, hi;
};
struct Mask {
  __m256 lo, hi;
};

SPIPE_INLINE Vec set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
SPIPE_INLINE Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }

SPIPE_INLINE __m128i load_eight(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
SPIPE_INLINE __m256 widen_bf16(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
SPIPE_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
SPIPE_INLINE Vec load(const Bf16* p) { return {widen_bf16(load_eight(p)), widen_bf16(load_eight(p + 8))}; }
SPIPE_INLINE Vec load(const Half* p) { return {_mm256_cvtph_ps(load_eight(p)), _mm256_cvtph_ps(load_eight(p + 8))}; }

SPIPE_INLINE IVec tail_mask(int n) {
  const __m256i first = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_cmpgt_epi32(_mm256_set1_epi32(n), first), _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), first)};
}
SPIPE_INLINE Vec load_tail(const float* p, int n) {
  const IVec m = tail_mask(n);
  return {_mm256_maskload_ps(p, m.lo), _mm256_maskload_ps(p + 8, m.hi)};
}
template <typename T>
SPIPE_INLINE Vec load_tail(const T* p, int n) {
  T copy[16] = {};
  for (int i = 0; i < n; ++i) copy[i] = p[i];
  return load(copy);
}

SPIPE_INLINE void store_eight(void* p, __m128i x) { _mm_storeu_si128(static_cast<__m128i*>(p), x); }
// The low 16 bits of each 32-bit lane, which holds at most 16 bits.
SPIPE_INLINE __m128i pack_eight(__m256i x) {
  return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}
// (bits + increment) >> 16, NaN to the quiet NaN of its sign.
SPIPE_INLINE __m128i round_bf16(__m256 x, __m256i increment) {
  const __m256i b = _mm256_castps_si256(x);
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(b, increment), 16);
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(0x8000));
  const __m256i quiet = _mm256_or_si256(sign, _mm256_set1_epi32(0x7fc0));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return pack_eight(_mm256_blendv_epi8(rounded, quiet, nan));
}
SPIPE_INLINE __m128i round_even_bf16(__m256 x) {
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(x), 16), _mm256_set1_epi32(1));
  return round_bf16(x, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}
SPIPE_INLINE __m128i round_half(__m256 x) {
  const __m256i sign = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(static_cast<int>(0x80000000u)));
  const __m256 quiet = _mm256_castsi256_ps(_mm256_or_si256(sign, _mm256_set1_epi32(0x7fc00000)));
  return _mm256_cvtps_ph(_mm256_blendv_ps(x, quiet, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)), _MM_FROUND_TO_NEAREST_INT);
}
// Past the caches; p is aligned to 64 bytes.
SPIPE_INLINE void store_past_caches(float* p, Vec x) {
  _mm256_stream_ps(p, x.lo);
  _mm256_stream_ps(p + 8, x.hi);
}
SPIPE_INLINE void end_of_stores() { _mm_sfence(); }
SPIPE_INLINE void store(float* p, Vec x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
SPIPE_INLINE void store(Bf16* p, Vec x) {
  store_eight(p, round_even_bf16(x.lo));
  store_eight(p + 8, round_even_bf16(x.hi));
}
SPIPE_INLINE void store(Half* p, Vec x) {
  store_eight(p, round_half(x.lo));
  store_eight(p + 8, round_half(x.hi));
}
SPIPE_INLINE void store_half_up(Bf16* p, Vec x) {
  store_eight(p, round_bf16(x.lo, _mm256_set1_epi32(0x8000)));
  store_eight(p + 8, round_bf16(x.hi, _mm256_set1_epi32(0x8000)));
}
SPIPE_INLINE void store_upper(Bf16* p, IVec x) {
  store_eight(p, pack_eight(_mm256_srli_epi32(x.lo, 16)));
  store_eight(p + 8, pack_eight(_mm256_srli_epi32(x.hi, 16)));
}
SPIPE_INLINE void store_tail(float* p, Vec x, int n) {
  const IVec m = tail_mask(n);
  _mm256_maskstore_ps(p, m.lo, x.lo);
  _mm256_maskstore_ps(p + 8, m.hi, x.hi);
}
template <typename T>
SPIPE_INLINE void store_tail(T* p, Vec x, int n) {
  T copy[16];
  store(copy, x);
  for (int i = 0; i < n; ++i) p[i] = copy[i];
}

SPIPE_INLINE Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
SPIPE_INLINE Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
SPIPE_INLINE Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
SPIPE_INLINE Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
SPIPE_INLINE Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
SPIPE_INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
SPIPE_INLINE Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
SPIPE_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
SPIPE_INLINE Vec fnma(Vec a, Vec b, Vec c) { return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)}; }

SPIPE_INLINE Mask less(Vec a, Vec b) { return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)}; }
SPIPE_INLINE Mask less_equal(Vec a, Vec b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LE_OQ)};
}
SPIPE_INLINE Mask equal(Vec a, Vec b) { return {_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ)}; }
SPIPE_INLINE Mask is_nan(Vec a) { return {_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q)}; }
SPIPE_INLINE Mask iequal(IVec a, IVec b) {
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(a.lo, b.lo)), _mm256_castsi256_ps(_mm256_cmpeq_epi32(a.hi, b.hi))};
}
SPIPE_INLINE Mask igreater(IVec a, IVec b) {
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(a.lo, b.lo)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(a.hi, b.hi))};
}
SPIPE_INLINE Mask mask_or(Mask a, Mask b) { return {_mm256_or_ps(a.lo, b.lo), _mm256_or_ps(a.hi, b.hi)}; }
SPIPE_INLINE Mask mask_and(Mask a, Mask b) { return {_mm256_and_ps(a.lo, b.lo), _mm256_and_ps(a.hi, b.hi)}; }
SPIPE_INLINE bool any(Mask m) { return _mm256_movemask_ps(_mm256_or_ps(m.lo, m.hi)) != 0; }
SPIPE_INLINE Vec select(Mask m, Vec a, Vec b) {
  return {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
}

SPIPE_INLINE float sum(Vec v) {
  const __m256 eight = _mm256_add_ps(v.lo, v.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
SPIPE_INLINE float max_lane(Vec v) {
  const __m256 eight = _mm256_max_ps(v.lo, v.hi);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

SPIPE_INLINE IVec iset(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
SPIPE_INLINE IVec iota() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
SPIPE_INLINE IVec to_bits(Vec x) { return {_mm256_castps_si256(x.lo), _mm256_castps_si256(x.hi)}; }
SPIPE_INLINE Vec from_bits(IVec x) { return {_mm256_castsi256_ps(x.lo), _mm256_castsi256_ps(x.hi)}; }
SPIPE_INLINE Vec to_float(IVec x) { return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }
SPIPE_INLINE IVec iadd(IVec a, IVec b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
SPIPE_INLINE IVec imul(IVec a, IVec b) { return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)}; }
SPIPE_INLINE IVec isub(IVec a, IVec b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
SPIPE_INLINE IVec bit_and(IVec a, IVec b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
SPIPE_INLINE IVec bit_or(IVec a, IVec b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
SPIPE_INLINE IVec bit_xor(IVec a, IVec b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
template <int kBits>
SPIPE_INLINE IVec shift_left(IVec a) {
  return {_mm256_slli_epi32(a.lo, kBits), _mm256_slli_epi32(a.hi, kBits)};
}
template <int kBits>
SPIPE_INLINE IVec shift_right(IVec a) {
  return {_mm256_srli_epi32(a.lo, kBits), _mm256_srli_epi32(a.hi, kBits)};
}
SPIPE_INLINE __m256 scale_by_power(__m256 p, __m256i n) {
  const __m256i first = _mm256_srai_epi32(n, 1), second = _mm256_sub_epi32(n, first), bias = _mm256_set1_epi32(127);
  const __m256 a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(first, bias), 23));
  const __m256 b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(second, bias), 23));
  return _mm256_mul_ps(_mm256_mul_ps(p, a), b);
}
SPIPE_INLINE Vec scale_by_power(Vec p, Vec, IVec n) { return {scale_by_power(p.lo, n.lo), scale_by_power(p.hi, n.hi)}; }

// Transposes the 8 x 8 matrix whose rows are r[0..7].
SPIPE_INLINE void transpose_eight(__m256* r) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
}
// Transposes the 16 x 16 matrix whose rows are r[0..15], by quarters.
SPIPE_INLINE void transpose(Vec* r) {
  __m256 top_left[8], top_right[8], low_left[8], low_right[8];
  for (int i = 0; i < 8; ++i) {
    top_left[i] = r[i].lo;
    top_right[i] = r[i].hi;
    low_left[i] = r[i + 8].lo;
    low_right[i] = r[i + 8].hi;
  }
  transpose_eight(top_left);
  transpose_eight(top_right);
  transpose_eight(low_left);
  transpose_eight(low_right);
  for (int i = 0; i < 8; ++i) {
    r[i] = {top_left[i], low_left[i]};
    r[i + 8] = {top_right[i], low_right[i]};
  }
}

}  // namespace spipe::cpu::SPIPE_ISA
