// Sixteen float lanes on three instruction sets, with the same bits on all of them. Kernel bodies are written once over `Vec`
// and compiled three times (kernels/CMakeLists.txt): as two __m256, one __m512 or a plain array.
//
// Rules for files that include this header: everything lives in spipe::cpu::SPIPE_ISA, so that no symbol of a wide build can be
// picked by the linker for a narrow one. Hence no std:: templates and no inline functions of other headers (reading members of
// plain structs is fine); tests/kernels checks the object files.
#pragma once

#include <cstdint>

#include "spipe/base/dtype.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef SPIPE_ISA
#error "compile kernels through kernels/CMakeLists.txt, which names the instruction set"
#endif

#define SPIPE_INLINE inline __attribute__((always_inline))

namespace spipe::cpu::SPIPE_ISA {

inline constexpr int kLanes = 16;

// Storage types: bit patterns without arithmetic.
struct Bf16 {
  std::uint16_t bits;
};
struct Half {
  std::uint16_t bits;
};

// ---- one float at a time -------------------------------------------------------------------------------------------------

SPIPE_INLINE std::uint32_t bits_of(float x) { return __builtin_bit_cast(std::uint32_t, x); }
SPIPE_INLINE float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

SPIPE_INLINE float widen(float x) { return x; }
SPIPE_INLINE float widen(Bf16 x) { return float_of(static_cast<std::uint32_t>(x.bits) << 16); }
SPIPE_INLINE float widen(Half x) {
  const std::uint32_t sign = (x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity; NaNs become quiet, as the hardware's
    const std::uint32_t quiet = magnitude > 0x7c00u ? 0x400000u : 0u;
    return float_of(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13 | quiet);
  }
  if (magnitude >= 0x400u) return float_of(sign | ((magnitude << 13) + 0x38000000u));
  const float small = static_cast<float>(magnitude) * 0x1p-24f;  // zero and denormals, exact
  return float_of(sign | bits_of(small));
}

// Nearest even; a NaN becomes the quiet NaN of its sign.
SPIPE_INLINE void narrow_to(float* p, float x) { *p = x; }
SPIPE_INLINE void narrow_to(Bf16* p, float x) {
  const std::uint32_t b = bits_of(x);
  const bool nan = (b & 0x7fffffffu) > 0x7f800000u;
  const std::uint32_t rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  p->bits = static_cast<std::uint16_t>(nan ? ((b >> 16) & 0x8000u) | 0x7fc0u : rounded);
}
SPIPE_INLINE void narrow_to(Half* p, float x) {
  const std::uint32_t b = bits_of(x), sign = (b >> 16) & 0x8000u, magnitude = b & 0x7fffffffu;
  std::uint32_t out;
  if (magnitude > 0x7f800000u) {
    out = 0x7e00u;
  } else if (magnitude >= 0x47800000u) {  // 65536 and above; [65520, 65536) rounds up by carry below
    out = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {
    out = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  } else {  // denormal result: let the float adder round, its unit is 2^-24 here
    out = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  }
  p->bits = static_cast<std::uint16_t>(sign | out);
}
// bf16 by half-up: the compute copy of a master (DESIGN, canonical arithmetic).
SPIPE_INLINE void narrow_half_up(Bf16* p, float x) {
  const std::uint32_t b = bits_of(x);
  const bool nan = (b & 0x7fffffffu) > 0x7f800000u;
  p->bits = static_cast<std::uint16_t>(nan ? ((b >> 16) & 0x8000u) | 0x7fc0u : (b + 0x8000u) >> 16);
}

}  // namespace spipe::cpu::SPIPE_ISA

// Each of these defines Vec, IVec, Mask and the same set of functions (listed in simd_scalar.h).
#if defined(__AVX512F__)
#include "kernels/cpu/simd_avx512.h"
#elif defined(__AVX2__)
#include "kernels/cpu/simd_avx2.h"
#else
#include "kernels/cpu/simd_scalar.h"
#endif

namespace spipe::cpu::SPIPE_ISA {

SPIPE_INLINE Vec operator+(Vec a, Vec b) { return add(a, b); }
SPIPE_INLINE Vec operator-(Vec a, Vec b) { return sub(a, b); }
SPIPE_INLINE Vec operator*(Vec a, Vec b) { return mul(a, b); }
SPIPE_INLINE Vec operator/(Vec a, Vec b) { return div(a, b); }
SPIPE_INLINE Vec abs(Vec x) { return from_bits(bit_and(to_bits(x), iset(0x7fffffff))); }
SPIPE_INLINE Vec negate(Vec x) { return from_bits(bit_xor(to_bits(x), iset(static_cast<std::int32_t>(0x80000000u)))); }
// Lanes 0..n-1.
SPIPE_INLINE Vec load_n(const float* p, std::int64_t n) { return n >= kLanes ? load(p) : load_tail(p, static_cast<int>(n)); }
SPIPE_INLINE Vec load_n(const Bf16* p, std::int64_t n) { return n >= kLanes ? load(p) : load_tail(p, static_cast<int>(n)); }
SPIPE_INLINE Vec load_n(const Half* p, std::int64_t n) { return n >= kLanes ? load(p) : load_tail(p, static_cast<int>(n)); }
template <typename T>
SPIPE_INLINE void store_n(T* p, Vec x, std::int64_t n) {
  if (n >= kLanes) {
    store(p, x);
  } else {
    store_tail(p, x, static_cast<int>(n));
  }
}

// ---- storage types by run-time dtype ---------------------------------------------------------------------------------------

// Calls f(T{}) with the storage type of `dtype` (fp32 unless bf16 or fp16; callers checked).
template <typename F>
SPIPE_INLINE void with_storage(DType dtype, F f) {
  if (dtype == DType::bf16) {
    f(Bf16{});
  } else if (dtype == DType::f16) {
    f(Half{});
  } else {
    f(0.0f);
  }
}

}  // namespace spipe::cpu::SPIPE_ISA
