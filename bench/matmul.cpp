// Matmuls of training steps against the CPU's FMA peak: the three forms y = x W^T (NT), dx = dy W (NN) and dW += dy^T x (TN+),
// for linear layers of several widths, over threads. The peak is measured between them with a loop of independent FMAs.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "kernels/cpu/cpu_ops.h"
#include "spipe/base/host.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using namespace spipe;

constexpr std::int64_t kPeakRounds = 2'000'000;
constexpr int kChains = 12;  // enough independent FMAs to hide their latency

#if defined(__x86_64__)
__attribute__((target("avx512f"))) float peak_avx512() {
  __m512 x[kChains];
  for (auto& v : x) v = _mm512_set1_ps(1.0f);
  const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.001f);
  for (std::int64_t i = 0; i < kPeakRounds; ++i) {
    for (auto& v : x) v = _mm512_fmadd_ps(v, a, b);
  }
  float sum = 0;
  for (const auto& v : x) sum += _mm512_cvtss_f32(v);
  return sum;
}
__attribute__((target("avx2,fma"))) float peak_avx2() {
  __m256 x[kChains];
  for (auto& v : x) v = _mm256_set1_ps(1.0f);
  const __m256 a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(0.001f);
  for (std::int64_t i = 0; i < kPeakRounds; ++i) {
    for (auto& v : x) v = _mm256_fmadd_ps(v, a, b);
  }
  float sum = 0;
  for (const auto& v : x) sum += _mm256_cvtss_f32(v);
  return sum;
}
#endif

double seconds_of(const auto& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Flops of one call of the peak loop on each thread; 0 where there is none for this instruction set.
double run_peak(ThreadPool& pool, Isa isa, std::vector<float>& sink) {
#if defined(__x86_64__)
  if (isa != Isa::scalar) {
    pool.parallel_for(pool.threads(), [&](std::int64_t item, int) {
      sink[static_cast<std::size_t>(item)] = isa == Isa::avx512 ? peak_avx512() : peak_avx2();
    });
    return 2.0 * (isa == Isa::avx512 ? 16 : 8) * kChains * static_cast<double>(kPeakRounds) * pool.threads();
  }
#endif
  (void)pool, (void)isa, (void)sink;
  return 0;
}

struct Layer {
  std::int64_t tokens, in, out;
};
constexpr Layer kLayers[] = {{256, 64, 64},    {2048, 192, 192},  {2048, 192, 512},   {512, 256, 1024}, {1024, 768, 768},
                             {256, 768, 3072}, {1024, 768, 3072}, {1024, 2048, 2048}, {256, 768, 32000}};

struct Form {
  const char* name;
  bool trans_a, trans_b, accumulate;
};
constexpr Form kForms[] = {{"NT", false, true, false}, {"NN", false, false, false}, {"TN+", true, false, true}};

MatmulArgs problem(const Layer& layer, int form) {
  const auto [tokens, in, out] = layer;
  MatmulArgs args{.trans_a = kForms[form].trans_a, .trans_b = kForms[form].trans_b, .accumulate = kForms[form].accumulate};
  const std::int64_t sizes[3][3] = {{tokens, out, in}, {tokens, in, out}, {out, in, tokens}};
  args.m = sizes[form][0], args.n = sizes[form][1], args.k = sizes[form][2];
  return args;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Matmuls against the FMA peak");
  int repeats = 7, threads_limit = usable_cpus();
  std::string isa_text = "auto";
  app.add_option("--repeats", repeats, "timed rounds; the best counts")->check(CLI::Range(1, 1000));
  app.add_option("--threads", threads_limit, "1, 2, 4, ... up to this many")->check(CLI::Range(1, 1024));
  app.add_option("--isa", isa_text, "auto, scalar, avx2 or avx512");
  CLI11_PARSE(app, argc, argv);
  const Isa isa = isa_from_name(isa_text);

  std::size_t largest = 0;
  for (const Layer& l : kLayers) {
    largest = std::max(largest, static_cast<std::size_t>(std::max({l.tokens * l.in, l.tokens * l.out, l.in * l.out})));
  }
  std::vector<float> a(largest), b(largest), c(largest);
  for (std::size_t i = 0; i < largest; ++i) a[i] = b[i] = static_cast<float>((i * 2654435761u >> 8) & 0xffff) / 65536.0f - 0.5f;

  nlohmann::json json = {{"bench", "matmul"}, {"cpu", cpu_model_name()}, {"backend", cpu_backend_text(isa)}};
  fmt::print("Matmul, fp32, {}\n", cpu_backend_text(isa));
  std::vector<int> thread_counts;
  for (int t = 1; t < threads_limit; t *= 2) thread_counts.push_back(t);
  thread_counts.push_back(threads_limit);
  for (const int threads : thread_counts) {
    ThreadPool pool(threads);
    const std::unique_ptr<Ops> ops = make_cpu_ops(pool, isa);
    std::vector<float> sink(static_cast<std::size_t>(threads));
    double peak = 0;
    const auto see_peak = [&] {
      double flops = 0;
      const double seconds = seconds_of([&] { flops = run_peak(pool, isa, sink); });
      peak = std::max(peak, flops / seconds);
    };
    struct Result {
      MatmulArgs args;
      const char* form;
      double rate;
    };
    std::vector<Result> results;
    see_peak();
    for (const Layer& layer : kLayers) {
      for (int form = 0; form < 3; ++form) {
        MatmulArgs args = problem(layer, form);
        args.a = {a.data(), DType::f32}, args.b = {b.data(), DType::f32}, args.c = {c.data(), DType::f32};
        double best = std::numeric_limits<double>::infinity();
        for (int round = 0; round <= repeats; ++round) {  // the first is a warm-up
          const double seconds = seconds_of([&] { ops->matmul(nullptr, args); });
          if (round > 0) best = std::min(best, seconds);
        }
        results.push_back({args, kForms[form].name, 2.0 * static_cast<double>(args.m * args.n * args.k) / best});
      }
      see_peak();
    }

    fmt::print("\n{} thread{}, FMA peak {:.0f} GFLOP/s\n", threads, threads > 1 ? "s" : "", peak * 1e-9);
    fmt::print("{:>4} {:>6} {:>6} {:>6} {:>9} {:>8}\n", "form", "m", "n", "k", "GFLOP/s", "of peak");
    double log_sum = 0;
    nlohmann::json rows;
    for (const Result& r : results) {
      fmt::print("{:>4} {:>6} {:>6} {:>6} {:>9.1f} {:>8}\n", r.form, r.args.m, r.args.n, r.args.k, r.rate * 1e-9,
                 peak > 0 ? fmt::format("{:.2f}", r.rate / peak) : "unknown");
      rows.push_back({{"form", r.form}, {"m", r.args.m}, {"n", r.args.n}, {"k", r.args.k}, {"gflop_s", r.rate * 1e-9}});
      log_sum += std::log(r.rate);
    }
    const double mean = std::exp(log_sum / static_cast<double>(results.size()));
    fmt::print("geometric mean {:.1f} GFLOP/s\n", mean * 1e-9);
    json["threads"].push_back(
        {{"threads", threads}, {"peak_gflop_s", peak * 1e-9}, {"mean_gflop_s", mean * 1e-9}, {"matmuls", rows}});
  }
  fmt::print("\n{}\n", json.dump());
  return 0;
}
