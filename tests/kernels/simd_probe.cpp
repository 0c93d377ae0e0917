#include "tests/kernels/simd_probe.h"

#include "kernels/cpu/simd_math.h"

namespace spipe::cpu::SPIPE_ISA {
namespace {

void exp_array(const float* x, float* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) store(y + i * kLanes, exp(load(x + i * kLanes)));
}
void log_array(const float* x, float* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) store(y + i * kLanes, log(load(x + i * kLanes)));
}
template <typename T>
void narrow(const float* x, std::uint16_t* y, int n) {
  store_n(reinterpret_cast<T*>(y), load(x), n);
}
template <typename T>
void widen_lanes(const std::uint16_t* x, float* y, int n) {
  store(y, load_n(reinterpret_cast<const T*>(x), n));
}
void half_up(const float* x, std::uint16_t* y) { store_half_up(reinterpret_cast<Bf16*>(y), load(x)); }
float sum_lanes(const float* x) { return sum(load(x)); }
float max_of_lanes(const float* x) { return max_lane(load(x)); }
void transpose_square(const float* x, float* y) {
  Vec r[kLanes];
  for (int i = 0; i < kLanes; ++i) r[i] = load(x + i * kLanes);
  transpose(r);
  for (int i = 0; i < kLanes; ++i) store(y + i * kLanes, r[i]);
}

}  // namespace

extern const SimdProbe simd_probe;
const SimdProbe simd_probe = {.exp = exp_array,
                              .log = log_array,
                              .to_bf16 = narrow<Bf16>,
                              .to_bf16_half_up = half_up,
                              .to_f16 = narrow<Half>,
                              .from_bf16 = widen_lanes<Bf16>,
                              .from_f16 = widen_lanes<Half>,
                              .sum = sum_lanes,
                              .max_lane = max_of_lanes,
                              .transpose = transpose_square};

}  // namespace spipe::cpu::SPIPE_ISA
