// The emulator's cuda_fp16.h: __half as a bit pattern with exact conversions.
#pragma once

#include "spipe/base/dtype.h"

struct __half {
  unsigned short bits;
};
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline float __half2float(__half x) { return ::spipe::f32_from_f16(x.bits); }
inline __half __float2half_rn(float x) { return {::spipe::f16_from_f32(x)}; }
