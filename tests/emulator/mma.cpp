// The products of emulated tensor cores; not instrumented, as it works on the registers of a whole warp.
#include <cuda_runtime.h>

#include "spipe/base/dtype.h"

namespace spipe::emulator {
namespace {

float widen(unsigned bits, bool bf16) {
  const auto half = static_cast<std::uint16_t>(bits);
  return bf16 ? f32_from_bf16(half) : f32_from_f16(half);
}

}  // namespace

void complete_mma(WarpData& data) {
  float a[16][16], b[16][8];
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    const auto& own = *static_cast<const MmaLane*>(data.lane[lane]);
    const unsigned g = lane / 4, t = lane % 4;
    for (unsigned half = 0; half < 2; ++half) {
      const unsigned shift = 16 * half, k = 2 * t + half;
      a[g][k] = widen(own.a[0] >> shift, own.bf16);
      a[g + 8][k] = widen(own.a[1] >> shift, own.bf16);
      a[g][k + 8] = widen(own.a[2] >> shift, own.bf16);
      a[g + 8][k + 8] = widen(own.a[3] >> shift, own.bf16);
      b[k][g] = widen(own.b[0] >> shift, own.bf16);
      b[k + 8][g] = widen(own.b[1] >> shift, own.bf16);
    }
  }
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    float* c = static_cast<const MmaLane*>(data.lane[lane])->c;
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2;
      float sum = 0;
      for (unsigned k = 0; k < 16; ++k) sum += a[row][k] * b[k][col];
      c[i] += sum;
    }
  }
}

void complete_pointers(WarpData& data) {
  for (void* to : data.lane) {
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      static_cast<PointerLane*>(to)->all[lane] = static_cast<const PointerLane*>(data.lane[lane])->own;
    }
  }
}

}  // namespace spipe::emulator
