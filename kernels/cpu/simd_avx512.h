// simd.h as one __m512 (AVX-512 F, BW, VL, DQ).
#pragma once

namespace spipe::cpu::SPIPE_ISA {

struct Vec {
  __m512 v;
};
struct IVec {
  __m512i v;
};
struct Mask {
  __mmask16 m;
};

SPIPE_INLINE Vec set(float x) { return {_mm512_set1_ps(x)}; }
SPIPE_INLINE Vec zero() { return {_mm512_setzero_ps()}; }

SPIPE_INLINE Vec widen_bf16(__m256i x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))}; }
SPIPE_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
SPIPE_INLINE Vec load(const Bf16* p) { return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
SPIPE_INLINE Vec load(const Half* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }

SPIPE_INLINE __mmask16 tail_mask(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
SPIPE_INLINE Vec load_tail(const float* p, int n) { return {_mm512_maskz_loadu_ps(tail_mask(n), p)}; }
SPIPE_INLINE Vec load_tail(const Bf16* p, int n) { return widen_bf16(_mm256_maskz_loadu_epi16(tail_mask(n), p)); }
SPIPE_INLINE Vec load_tail(const Half* p, int n) { return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(tail_mask(n), p))}; }

// (bits + increment) >> 16, NaN to the quiet NaN of its sign.
SPIPE_INLINE __m256i round_bf16(__m512 x, __m512i increment) {
  const __m512i b = _mm512_castps_si512(x);
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(b, increment), 16);
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(0x8000));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, nan, sign, _mm512_set1_epi32(0x7fc0)));
}
SPIPE_INLINE __m256i round_even_bf16(__m512 x) {
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(_mm512_castps_si512(x), 16), _mm512_set1_epi32(1));
  return round_bf16(x, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
}
SPIPE_INLINE __m256i round_half(__m512 x) {
  const __m512i sign = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int>(0x80000000u)));
  const __m512i quiet = _mm512_or_si512(sign, _mm512_set1_epi32(0x7fc00000));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtps_ph(_mm512_mask_mov_ps(x, nan, _mm512_castsi512_ps(quiet)), _MM_FROUND_TO_NEAREST_INT);
}
// Past the caches; p is aligned to 64 bytes.
SPIPE_INLINE void store_past_caches(float* p, Vec x) { _mm512_stream_ps(p, x.v); }
SPIPE_INLINE void end_of_stores() { _mm_sfence(); }
SPIPE_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x.v); }
SPIPE_INLINE void store(Bf16* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_even_bf16(x.v)); }
SPIPE_INLINE void store(Half* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_half(x.v)); }
SPIPE_INLINE void store_half_up(Bf16* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_bf16(x.v, _mm512_set1_epi32(0x8000)));
}
SPIPE_INLINE void store_upper(Bf16* p, IVec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(x.v, 16)));
}
SPIPE_INLINE void store_tail(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, tail_mask(n), x.v); }
SPIPE_INLINE void store_tail(Bf16* p, Vec x, int n) { _mm256_mask_storeu_epi16(p, tail_mask(n), round_even_bf16(x.v)); }
SPIPE_INLINE void store_tail(Half* p, Vec x, int n) { _mm256_mask_storeu_epi16(p, tail_mask(n), round_half(x.v)); }

SPIPE_INLINE Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
SPIPE_INLINE Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
SPIPE_INLINE Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
SPIPE_INLINE Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
SPIPE_INLINE Vec sqrt(Vec a) { return {_mm512_sqrt_ps(a.v)}; }
SPIPE_INLINE Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
SPIPE_INLINE Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
SPIPE_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
SPIPE_INLINE Vec fnma(Vec a, Vec b, Vec c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }

SPIPE_INLINE Mask less(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
SPIPE_INLINE Mask less_equal(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
SPIPE_INLINE Mask equal(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
SPIPE_INLINE Mask is_nan(Vec a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
SPIPE_INLINE Mask iequal(IVec a, IVec b) { return {_mm512_cmpeq_epi32_mask(a.v, b.v)}; }
SPIPE_INLINE Mask igreater(IVec a, IVec b) { return {_mm512_cmpgt_epi32_mask(a.v, b.v)}; }
SPIPE_INLINE Mask mask_or(Mask a, Mask b) { return {static_cast<__mmask16>(a.m | b.m)}; }
SPIPE_INLINE Mask mask_and(Mask a, Mask b) { return {static_cast<__mmask16>(a.m & b.m)}; }
SPIPE_INLINE bool any(Mask m) { return m.m != 0; }
SPIPE_INLINE Vec select(Mask m, Vec a, Vec b) { return {_mm512_mask_blend_ps(m.m, b.v, a.v)}; }

SPIPE_INLINE float sum(Vec v) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v.v), _mm512_extractf32x8_ps(v.v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
SPIPE_INLINE float max_lane(Vec v) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(v.v), _mm512_extractf32x8_ps(v.v, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

SPIPE_INLINE IVec iset(std::int32_t x) { return {_mm512_set1_epi32(x)}; }
SPIPE_INLINE IVec iota() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
SPIPE_INLINE IVec to_bits(Vec x) { return {_mm512_castps_si512(x.v)}; }
SPIPE_INLINE Vec from_bits(IVec x) { return {_mm512_castsi512_ps(x.v)}; }
SPIPE_INLINE Vec to_float(IVec x) { return {_mm512_cvtepi32_ps(x.v)}; }
SPIPE_INLINE IVec iadd(IVec a, IVec b) { return {_mm512_add_epi32(a.v, b.v)}; }
SPIPE_INLINE IVec imul(IVec a, IVec b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
SPIPE_INLINE IVec isub(IVec a, IVec b) { return {_mm512_sub_epi32(a.v, b.v)}; }
SPIPE_INLINE IVec bit_and(IVec a, IVec b) { return {_mm512_and_si512(a.v, b.v)}; }
SPIPE_INLINE IVec bit_or(IVec a, IVec b) { return {_mm512_or_si512(a.v, b.v)}; }
SPIPE_INLINE IVec bit_xor(IVec a, IVec b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int kBits>
SPIPE_INLINE IVec shift_left(IVec a) {
  return {_mm512_slli_epi32(a.v, kBits)};
}
template <int kBits>
SPIPE_INLINE IVec shift_right(IVec a) {
  return {_mm512_srli_epi32(a.v, kBits)};
}
SPIPE_INLINE Vec scale_by_power(Vec p, Vec n, IVec) { return {_mm512_scalef_ps(p.v, n.v)}; }

// Transposes the 16 x 16 matrix whose rows are r[0..15]: 4 x 4 blocks inside lanes of 128 bits, then the lanes.
SPIPE_INLINE void transpose(Vec* r) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(r[i].v, r[i + 1].v);
    a[i + 1] = _mm512_unpackhi_ps(r[i].v, r[i + 1].v);
  }
  for (int i = 0; i < 16; i += 4) {  // b[i + j] lane l: column 4 l + j of rows i..i+3
    b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
  for (int j = 0; j < 4; ++j) {
    const __m512 even_top = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88), odd_top = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xdd);
    const __m512 even_low = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88);
    const __m512 odd_low = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xdd);
    r[j].v = _mm512_shuffle_f32x4(even_top, even_low, 0x88);
    r[8 + j].v = _mm512_shuffle_f32x4(even_top, even_low, 0xdd);
    r[4 + j].v = _mm512_shuffle_f32x4(odd_top, odd_low, 0x88);
    r[12 + j].v = _mm512_shuffle_f32x4(odd_top, odd_low, 0xdd);
  }
}

}  // namespace spipe::cpu::SPIPE_ISA
