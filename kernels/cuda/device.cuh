// What the kernels share: element types, accesses of 16 bytes, sums over a warp or a block in a fixed order, and the launch.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/ops.h"
#include "spipe/base/error.h"

// Before a loop over registers: arrays that are indexed by it must not end up in local memory.
#if defined(SPIPE_CUDA_EMULATED)
#define SPIPE_UNROLL
#else
#define SPIPE_UNROLL _Pragma("unroll")
#endif

namespace spipe::cuda {

// ---- element types: storage only, arithmetic is fp32 ----------------------------------------------------------------------

struct Bf16 {
  std::uint16_t bits;
};
struct Half {
  std::uint16_t bits;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(Bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
__device__ __forceinline__ float widen(Half x) { return __half2float(__ushort_as_half(x.bits)); }

__device__ __forceinline__ bool is_nan(float x) { return (__float_as_uint(x) & 0x7fffffffU) > 0x7f800000U; }
__device__ __forceinline__ std::uint16_t quiet_bf16_nan(unsigned bits) {
  return static_cast<std::uint16_t>(((bits >> 16) & 0x8000U) | 0x7fc0U);
}
// To nearest even.
__device__ __forceinline__ void round_to(float& to, float x) { to = x; }
__device__ __forceinline__ void round_to(Bf16& to, float x) {
  const unsigned bits = __float_as_uint(x);
  to.bits = is_nan(x) ? quiet_bf16_nan(bits) : static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}
__device__ __forceinline__ void round_to(Half& to, float x) { to.bits = __half_as_ushort(__float2half_rn(x)); }
// The compute copy of a master: bf16 half up, fp16 to nearest even.
__device__ __forceinline__ void round_copy(Bf16& to, float x) {
  const unsigned bits = __float_as_uint(x);
  to.bits = is_nan(x) ? quiet_bf16_nan(bits) : static_cast<std::uint16_t>((bits + 0x8000U) >> 16);
}
__device__ __forceinline__ void round_copy(Half& to, float x) { round_to(to, x); }
template <typename T>
__device__ __forceinline__ T rounded(float x) {
  T result;
  round_to(result, x);
  return result;
}

// ---- runs of n elements (4 or 8) as fp32 ----------------------------------------------------------------------------------

template <int n>
struct Floats {
  float v[n];
};

// p is aligned to what n elements take, at most 16 bytes.
template <int n, typename T>
__device__ __forceinline__ Floats<n> load_run(const T* p) {
  Floats<n> x;
  if constexpr (sizeof(T) == 4) {
    for (int i = 0; i < n; i += 4) {
      const float4 some = *reinterpret_cast<const float4*>(p + i);
      x.v[i] = some.x;
      x.v[i + 1] = some.y;
      x.v[i + 2] = some.z;
      x.v[i + 3] = some.w;
    }
  } else {
    unsigned words[n / 2];
    if constexpr (n == 8) {
      const uint4 all = *reinterpret_cast<const uint4*>(p);
      words[0] = all.x;
      words[1] = all.y;
      words[2] = all.z;
      words[3] = all.w;
    } else {
      const uint2 all = *reinterpret_cast<const uint2*>(p);
      words[0] = all.x;
      words[1] = all.y;
    }
    for (int i = 0; i < n / 2; ++i) {
      x.v[2 * i] = widen(T{static_cast<std::uint16_t>(words[i] & 0xffffU)});
      x.v[2 * i + 1] = widen(T{static_cast<std::uint16_t>(words[i] >> 16)});
    }
  }
  return x;
}

template <int n, typename T>
__device__ __forceinline__ void store_words(T* p, const unsigned (&words)[n / 2]) {
  if constexpr (n == 8) {
    *reinterpret_cast<uint4*>(p) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
    *reinterpret_cast<uint2*>(p) = make_uint2(words[0], words[1]);
  }
}
template <int n, typename T>
__device__ __forceinline__ void store_run(T* p, const Floats<n>& x) {
  if constexpr (sizeof(T) == 4) {
    for (int i = 0; i < n; i += 4) {
      *reinterpret_cast<float4*>(p + i) = make_float4(x.v[i], x.v[i + 1], x.v[i + 2], x.v[i + 3]);
    }
  } else {
    unsigned words[n / 2];
    for (int i = 0; i < n / 2; ++i) {
      words[i] = rounded<T>(x.v[2 * i]).bits | static_cast<unsigned>(rounded<T>(x.v[2 * i + 1]).bits) << 16;
    }
    store_words<n>(p, words);
  }
}

// The same for the run that starts at element i of `count`: what lies beyond is 0, and not stored. `vector`: p + i is aligned.
template <int n, typename T>
__device__ __forceinline__ Floats<n> load_some(const T* p, std::int64_t i, std::int64_t count, bool vector) {
  if (vector && i + n <= count) return load_run<n>(p + i);
  Floats<n> x;
  for (int j = 0; j < n; ++j) x.v[j] = i + j < count ? widen(p[i + j]) : 0.0F;
  return x;
}
template <int n, typename T>
__device__ __forceinline__ void store_some(T* p, std::int64_t i, std::int64_t count, bool vector, const Floats<n>& x) {
  if (vector && i + n <= count) return store_run<n>(p + i, x);
  for (int j = 0; j < n; ++j) {
    if (i + j < count) p[i + j] = rounded<T>(x.v[j]);
  }
}

// The same with the type decided at run time: the same way in all threads, in kernels that wait for memory anyway.
template <int n>
__device__ __forceinline__ Floats<n> load_as(const void* p, DType type, std::int64_t i, std::int64_t count, bool vector) {
  if (type == DType::f32) return load_some<n>(static_cast<const float*>(p), i, count, vector);
  if (type == DType::f16) return load_some<n>(static_cast<const Half*>(p), i, count, vector);
  return load_some<n>(static_cast<const Bf16*>(p), i, count, vector);  // bf16, and 16-bit patterns as upper halves
}
template <int n>
__device__ __forceinline__ void store_as(void* p, DType type, std::int64_t i, std::int64_t count, bool vector,
                                         const Floats<n>& x) {
  if (type == DType::f32) return store_some<n>(static_cast<float*>(p), i, count, vector, x);
  if (type == DType::f16) return store_some<n>(static_cast<Half*>(p), i, count, vector, x);
  store_some<n>(static_cast<Bf16*>(p), i, count, vector, x);
}
__device__ __forceinline__ float load_one(const void* p, DType type, std::int64_t i) {
  if (type == DType::f32) return static_cast<const float*>(p)[i];
  if (type == DType::f16) return widen(static_cast<const Half*>(p)[i]);
  return widen(static_cast<const Bf16*>(p)[i]);
}
__device__ __forceinline__ void store_one(void* p, DType type, std::int64_t i, float x) {
  if (type == DType::f32) {
    static_cast<float*>(p)[i] = x;
  } else if (type == DType::f16) {
    static_cast<Half*>(p)[i] = rounded<Half>(x);
  } else {
    static_cast<Bf16*>(p)[i] = rounded<Bf16>(x);
  }
}
// x as it will be read again.
__device__ __forceinline__ float as_stored(DType type, float x) {
  return type == DType::f32 ? x : type == DType::f16 ? widen(rounded<Half>(x)) : widen(rounded<Bf16>(x));
}

// ---- sums in a fixed order ------------------------------------------------------------------------------------------------

inline constexpr unsigned kAllLanes = 0xffffffffU;

// All lanes get the sum: a butterfly, the same tree in every lane up to the order of two operands.
__device__ __forceinline__ float warp_sum(float x) {
  for (int lanes = 16; lanes > 0; lanes /= 2) x = __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, lanes));
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
  for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, lanes));
  return x;
}
// The sum over the `threads` (one-dimensional) threads of a block; all of them call it and get it.
template <int threads>
__device__ __forceinline__ float block_sum(float x) {
  static_assert(threads % 32 == 0);
  __shared__ float of_warp[threads / 32];
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  x = of_warp[0];
  for (int warp = 1; warp < threads / 32; ++warp) x = __fadd_rn(x, of_warp[warp]);
  __syncthreads();
  return x;
}

// ---- launches (host) ------------------------------------------------------------------------------------------------------

// What a launch asks for as dynamic shared memory.
extern __shared__ __align__(16) unsigned char spipe_dynamic_shared[];

struct Shape {
  std::int64_t blocks_x = 1, blocks_y = 1, blocks_z = 1;
  unsigned threads = 256;
  std::size_t shared_bytes = 0;
};

void check_launch(cudaError_t error);

template <typename... P, typename... A>
void launch(StreamHandle* stream, const Shape& shape, void (*kernel)(P...), const A&... arguments) {
  SPIPE_CHECK(shape.blocks_x <= 0x7fffffff && shape.blocks_y <= 0xffff && shape.blocks_z <= 0xffff, "too many blocks");
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<unsigned>(shape.blocks_x), static_cast<unsigned>(shape.blocks_y), static_cast<unsigned>(shape.blocks_z));
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  constexpr std::size_t kWithoutAsking = 48 * 1024;
  if (shape.shared_bytes > kWithoutAsking) {
    check_launch(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared_bytes)));
  }
  check_launch(cudaLaunchKernelEx(&config, kernel, arguments...));
}

[[nodiscard]] inline std::int64_t blocks_of(std::int64_t n, std::int64_t block) { return (n + block - 1) / block; }
[[nodiscard]] inline bool is_storage(DType t) { return t == DType::f32 || t == DType::bf16 || t == DType::f16; }
[[nodiscard]] inline std::int64_t or_packed(std::int64_t stride, std::int64_t packed) { return stride != 0 ? stride : packed; }
// Whether accesses of 16 bytes may start at the pointer (an absent operand does not mind).
[[nodiscard]] inline bool is_aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }
template <typename... P>
[[nodiscard]] bool all_aligned(const P&... p) {
  return (is_aligned(p.data) && ...);
}

// Calls f with a value of the storage type.
template <typename F>
void with_storage(DType type, const F& f) {
  SPIPE_CHECK(is_storage(type), "fp32, bf16 or fp16");
  if (type == DType::f32) {
    f(float{});
  } else if (type == DType::bf16) {
    f(Bf16{});
  } else {
    f(Half{});
  }
}

}  // namespace spipe::cuda
