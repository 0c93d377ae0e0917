#include "src/device/cpu/cpu_rates.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

namespace spipe::device {
namespace {

// The rate of the fastest of several repetitions (others were disturbed), within `seconds` in all. The first one warms up
// caches, threads and compiled kernels and is not counted. Clamped, so that a broken clock gives a planner no zero or infinity.
template <typename Work>
double best_rate(double amount, double seconds, const Work& work) {
  using Clock = std::chrono::steady_clock;
  work();
  const auto start = Clock::now();
  double best = 1e300;
  double elapsed = 0;
  for (int repetition = 0; repetition < 3 || (elapsed < seconds && repetition < 1000); ++repetition) {
    const auto before = Clock::now();
    work();
    const auto after = Clock::now();
    best = std::min(best, std::chrono::duration<double>(after - before).count());
    elapsed = std::chrono::duration<double>(after - start).count();
    if (elapsed > 4 * seconds) {
      break;
    }
  }
  return std::clamp(amount / std::max(best, 1e-9), 1e6, 1e17);
}

double matmul_rate(Ops& ops) {
  constexpr std::int64_t kSize = 1024;
  constexpr std::size_t kElements = static_cast<std::size_t>(kSize) * kSize;
  const std::vector<float> a(kElements, 0.5F), b(kElements, 0.25F);
  std::vector<float> c(kElements, 0.0F);
  MatmulArgs args;
  args.a = ConstPtr(a.data(), DType::f32);
  args.b = ConstPtr(b.data(), DType::f32);
  args.c = Ptr{c.data(), DType::f32};
  args.m = args.n = args.k = kSize;
  args.trans_b = true;  // the form of a forward pass
  return best_rate(2.0 * kSize * kSize * kSize, 0.1, [&] { ops.matmul(nullptr, args); });
}

// One copying thread, as a copy stream is; buffers larger than most caches.
double copy_rate() {
  constexpr std::size_t kBytes = std::size_t{64} << 20;
  const std::vector<std::byte> source(kBytes, std::byte{1});
  std::vector<std::byte> destination(kBytes);
  return best_rate(static_cast<double>(kBytes), 0.06, [&] { std::memcpy(destination.data(), source.data(), kBytes); });
}

double adam_rate(Ops& host_ops) {
  constexpr std::size_t kElements = std::size_t{4} << 20;
  const std::vector<float> grad(kElements, 1e-3F);
  std::vector<float> master(kElements, 0.5F), m(kElements, 0.0F), v(kElements, 0.0F);
  std::uint32_t nonfinite = 0;
  AdamWArgs args;
  args.grad = ConstPtr(grad.data(), DType::f32);
  args.master = master.data();
  args.m = m.data();
  args.v = v.data();
  args.nonfinite_master = &nonfinite;
  args.elements = static_cast<std::int64_t>(kElements);
  args.beta1 = 0.9F;
  args.one_minus_beta1 = 0.1F;
  args.beta2 = 0.95F;
  args.one_minus_beta2 = 0.05F;
  args.eps = 1e-8F;
  args.step_size = 1e-6F;
  return best_rate(static_cast<double>(kElements), 0.06, [&] { host_ops.adamw(nullptr, args); });
}

}  // namespace

DeviceRates measure_cpu_rates(Ops& ops, Ops& host_ops) {
  DeviceRates rates;
  rates.matmul_flops = matmul_rate(ops);
  rates.h2d_bytes = rates.d2h_bytes = copy_rate();
  rates.adam_parameters = adam_rate(host_ops);
  return rates;
}

}  // namespace spipe::device
