// Qualifiers, built-in variables and vector types.
#pragma once

#include <cstdint>

#include "tests/emulator/machine.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __constant__
// Thread-local storage is what all emulated threads share: they run on one thread of the system.
#define __shared__ thread_local

inline constexpr const ::spipe::emulator::Index3& threadIdx = ::spipe::emulator::builtins.thread;
inline constexpr const ::spipe::emulator::Index3& blockIdx = ::spipe::emulator::builtins.block;
inline constexpr const ::spipe::emulator::Index3& blockDim = ::spipe::emulator::builtins.block_size;
inline constexpr const ::spipe::emulator::Index3& gridDim = ::spipe::emulator::builtins.grid_size;
inline constexpr int warpSize = 32;

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}  // NOLINT: as CUDA's
};

// name, element type, alignment of the pair and of the four.
#define SPIPE_VECTOR_TYPES(name, type, align2, align4)             \
  struct alignas(align2) name##2 {                                 \
    type x, y;                                                     \
  };                                                               \
  struct name##3 {                                                 \
    type x, y, z;                                                  \
  };                                                               \
  struct alignas(align4) name##4 {                                 \
    type x, y, z, w;                                               \
  };                                                               \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; } \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
SPIPE_VECTOR_TYPES(float, float, 8, 16)
SPIPE_VECTOR_TYPES(int, int, 8, 16)
SPIPE_VECTOR_TYPES(uint, unsigned, 8, 16)
SPIPE_VECTOR_TYPES(ushort, unsigned short, 4, 8)
SPIPE_VECTOR_TYPES(uchar, unsigned char, 2, 4)
#undef SPIPE_VECTOR_TYPES
struct alignas(16) double2 {
  double x, y;
};
inline double2 make_double2(double x, double y) { return {x, y}; }
