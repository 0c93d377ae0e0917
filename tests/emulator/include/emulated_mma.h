// Tensor cores by fragments: what kernels/cuda/mma.cuh asks for.
#pragma once

#include <cstdint>
#include <source_location>

#include "emulated_warp.h"

namespace spipe::emulator {

struct MmaLane {
  float* c;
  const unsigned* a;
  unsigned b[2];
  bool bf16;
};
void complete_mma(WarpData& data);  // mma.cpp: fp32 sums, k ascending, then c is added

inline void mma_16x8x16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bool bf16,
                        const std::source_location& at = std::source_location::current()) {
  MmaLane own{c, a, {b0, b1}, bf16};
  Machine::instance().sync_warp("mma", 0xffffffffU, &own, complete_mma, false, at);
}

struct PointerLane {
  const void* own;
  const void* all[kWarp];
};
void complete_pointers(WarpData& data);  // every lane gets all lanes' pointers

inline void ldmatrix_x4(unsigned (&x)[4], const void* row, bool transposed,
                        const std::source_location& at = std::source_location::current()) {
  Machine& machine = Machine::instance();
  if (reinterpret_cast<std::uintptr_t>(row) % 16 != 0) machine.fault("ldmatrix", ": misaligned address of a row");
  PointerLane rows{row, {}};
  machine.sync_warp("ldmatrix", 0xffffffffU, &rows, complete_pointers, false, at);
  const unsigned g = machine.lane() / 4, t = machine.lane() % 4;
  for (unsigned tile = 0; tile < 4; ++tile) {
    if (transposed) {
      const unsigned low = static_cast<const std::uint16_t*>(rows.all[8 * tile + 2 * t])[g];
      const unsigned high = static_cast<const std::uint16_t*>(rows.all[8 * tile + 2 * t + 1])[g];
      x[tile] = low | high << 16;
    } else {
      x[tile] = static_cast<const unsigned*>(rows.all[8 * tile + g])[t];
    }
  }
}

}  // namespace spipe::emulator
