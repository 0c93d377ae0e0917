// CPU AdamW against what memory can give: 28 bytes a parameter (gradient, master, m and v read; master, m and v written) beside
// a triad in the same buffers, once with ordinary stores (32 bytes an element: the destination is read too) and once with
// non-temporal ones (24). adamw_over_triad is AdamW's rate over the faster triad's, the worst over the thread counts.
// bf16_moments_speedup: parameters a second with m and v in bf16 (20 bytes a parameter) over those with fp32, likewise.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "kernels/cpu/cpu_ops.h"
#include "spipe/base/error.h"
#include "spipe/base/host.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using namespace spipe;

constexpr std::int64_t kBlock = 32768;  // doubles an item of the triad takes

void triad_plain(double* a, const double* b, const double* c, double s, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) a[i] = b[i] + s * c[i];
}
#if defined(__x86_64__)
__attribute__((target("avx2"))) void triad_plain_avx2(double* a, const double* b, const double* c, double s, std::int64_t n) {
  const __m256d factor = _mm256_set1_pd(s);
  std::int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    _mm256_storeu_pd(a + i, _mm256_add_pd(_mm256_loadu_pd(b + i), _mm256_mul_pd(factor, _mm256_loadu_pd(c + i))));
  }
  triad_plain(a + i, b + i, c + i, s, n - i);
}
__attribute__((target("avx2"))) void triad_streaming_avx2(double* a, const double* b, const double* c, double s,
                                                          std::int64_t n) {
  const __m256d factor = _mm256_set1_pd(s);
  std::int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    _mm256_stream_pd(a + i, _mm256_add_pd(_mm256_loadu_pd(b + i), _mm256_mul_pd(factor, _mm256_loadu_pd(c + i))));
  }
  triad_plain(a + i, b + i, c + i, s, n - i);
  _mm_sfence();
}
#endif

double seconds_of(const auto& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Buffers {
  explicit Buffers(std::int64_t count) : elements(count) {
    for (auto& buffer : data) {
      const std::size_t bytes = (static_cast<std::size_t>(count) * sizeof(float) + 4095) / 4096 * 4096;
      buffer.reset(static_cast<float*>(std::aligned_alloc(4096, bytes)));
      SPIPE_CHECK(buffer != nullptr, "no memory for the buffers");
    }
  }
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::int64_t elements;
  std::unique_ptr<float, Free> data[4];  // gradient, master, m, v
};

// Parameters and moments of a step somewhere in a training run; the triads leave other numbers in three of the buffers.
void fill(Buffers& buffers, ThreadPool& pool, bool bf16_moments) {
  pool.parallel_for((buffers.elements + kBlock - 1) / kBlock, [&](std::int64_t item, int) {
    for (std::int64_t i = item * kBlock; i < std::min(buffers.elements, (item + 1) * kBlock); ++i) {
      const float x = static_cast<float>((i * 2654435761LL >> 8) & 0xffff) / 65536.0F - 0.5F;
      buffers.data[0].get()[i] = 1e-3F * x;
      buffers.data[1].get()[i] = 0.04F * x;
      if (bf16_moments) {
        reinterpret_cast<std::uint16_t*>(buffers.data[2].get())[i] = bf16_from_f32(1e-4F * x);
        reinterpret_cast<std::uint16_t*>(buffers.data[3].get())[i] = bf16_from_f32(1e-7F);
      } else {
        buffers.data[2].get()[i] = 1e-4F * x;
        buffers.data[3].get()[i] = 1e-7F;
      }
    }
  });
}

struct Rates {  // bytes a second
  double adamw = 0, adamw_bf16 = 0, triad = 0, triad_streaming = 0;
  [[nodiscard]] double ratio() const { return adamw / std::max(triad, triad_streaming); }
  [[nodiscard]] double speedup() const { return (adamw_bf16 / 20) / (adamw / 28); }
};

Rates measure(Buffers& buffers, int threads, int repeats) {
  ThreadPool pool(threads);
  const std::unique_ptr<Ops> ops = make_cpu_ops(pool);
  const std::int64_t doubles = buffers.elements / 2;
  auto* a = reinterpret_cast<double*>(buffers.data[1].get());
  const auto* b = reinterpret_cast<double*>(buffers.data[2].get());
  const auto* c = reinterpret_cast<double*>(buffers.data[3].get());
  const auto triad = [&](auto* kernel) {
    pool.parallel_for((doubles + kBlock - 1) / kBlock, [&](std::int64_t item, int) {
      const std::int64_t first = item * kBlock;
      kernel(a + first, b + first, c + first, 1e-3, std::min(kBlock, doubles - first));
    });
  };
  std::uint32_t overflow = 0;
  const AdamWArgs args{.grad = {buffers.data[0].get(), DType::f32},
                       .master = buffers.data[1].get(),
                       .m = buffers.data[2].get(),
                       .v = buffers.data[3].get(),
                       .nonfinite_master = &overflow,
                       .elements = buffers.elements,
                       .beta1 = 0.9F,
                       .one_minus_beta1 = 0.1F,
                       .beta2 = 0.95F,
                       .one_minus_beta2 = 0.05F,
                       .decay = 1 - 3e-5F,
                       .eps = 1e-8F,
                       .step_size = 3e-4F};
  const UpdatePlanes planes{.master = {buffers.data[1].get(), DType::f32},
                            .m = {buffers.data[2].get(), DType::bf16},
                            .v = {buffers.data[3].get(), DType::bf16}};
  const UpdateArgs narrow{.grad = args.grad,
                          .from = planes,
                          .to = planes,
                          .nonfinite_master = &overflow,
                          .elements = buffers.elements,
                          .moment_key = 12345,
                          .beta1 = args.beta1,
                          .one_minus_beta1 = args.one_minus_beta1,
                          .beta2 = args.beta2,
                          .one_minus_beta2 = args.one_minus_beta2,
                          .decay = args.decay,
                          .eps = args.eps,
                          .step_size = args.step_size};
  double best_plain = std::numeric_limits<double>::infinity(), best_streaming = best_plain, best_adamw = best_plain,
         best_narrow = best_plain;
  for (int round = 0; round <= repeats;
       ++round) {  // interleaved, so that a slow moment hits all of them; the first is a warm-up
    fill(buffers, pool, true);
    const double bf16 = seconds_of([&] { ops->update(nullptr, narrow); });
    fill(buffers, pool, false);
    const double adamw = seconds_of([&] { ops->adamw(nullptr, args); });
    double plain = std::numeric_limits<double>::infinity(), streaming = plain;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
      plain = seconds_of([&] { triad(triad_plain_avx2); });
      streaming = seconds_of([&] { triad(triad_streaming_avx2); });
    }
#endif
    if (std::isinf(plain)) plain = seconds_of([&] { triad(triad_plain); });
    if (round == 0) continue;
    best_adamw = std::min(best_adamw, adamw);
    best_narrow = std::min(best_narrow, bf16);
    best_plain = std::min(best_plain, plain);
    best_streaming = std::min(best_streaming, streaming);
  }
  return {.adamw = 28.0 * static_cast<double>(buffers.elements) / best_adamw,
          .adamw_bf16 = 20.0 * static_cast<double>(buffers.elements) / best_narrow,
          .triad = 32.0 * static_cast<double>(doubles) / best_plain,
          .triad_streaming = 24.0 * static_cast<double>(doubles) / best_streaming};
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("AdamW against a triad");
  std::int64_t elements = 100'000'000;
  int repeats = 7;
  app.add_option("--elements", elements, "parameters (16 bytes each)")
      ->check(CLI::Range(std::int64_t{2}, std::int64_t{1} << 34));
  app.add_option("--repeats", repeats, "timed rounds; the best counts")->check(CLI::Range(1, 1000));
  CLI11_PARSE(app, argc, argv);

  Buffers buffers(elements);
  nlohmann::json json = {{"bench", "adamw"}, {"elements", elements}, {"cpu", cpu_model_name()}, {"isa", isa_name(best_isa())}};
  double worst = std::numeric_limits<double>::infinity(), least_speedup = worst;
  fmt::print("AdamW, {} parameters, fp32, {}\n\n", elements, isa_name(best_isa()));
  fmt::print("{:>7} {:>12} {:>12} {:>16} {:>12} {:>12} {:>9}\n", "threads", "AdamW GB/s", "triad GB/s", "triad NT GB/s",
             "AdamW/triad", "bf16 GB/s", "speed-up");
  for (const int threads : {1, 2}) {
    const Rates rates = measure(buffers, threads, repeats);
    fmt::print("{:>7} {:>12.1f} {:>12.1f} {:>16.1f} {:>12.2f} {:>12.1f} {:>9.2f}\n", threads, rates.adamw * 1e-9,
               rates.triad * 1e-9, rates.triad_streaming * 1e-9, rates.ratio(), rates.adamw_bf16 * 1e-9, rates.speedup());
    json["threads"].push_back({{"threads", threads},
                               {"adamw_gb_s", rates.adamw * 1e-9},
                               {"adamw_ms", 28e3 * static_cast<double>(elements) / rates.adamw},
                               {"triad_gb_s", rates.triad * 1e-9},
                               {"triad_nt_gb_s", rates.triad_streaming * 1e-9},
                               {"adamw_over_triad", rates.ratio()},
                               {"adamw_bf16_moments_gb_s", rates.adamw_bf16 * 1e-9},
                               {"bf16_moments_speedup", rates.speedup()}});
    worst = std::min(worst, rates.ratio());
    least_speedup = std::min(least_speedup, rates.speedup());
  }
  json["adamw_over_triad"] = worst;
  json["bf16_moments_speedup"] = least_speedup;
  fmt::print("\n{}\n", json.dump());
  return 0;
}
