// What norms and the search for overflows cost: they are taken where a gradient is rounded, so there is no other pass over host
// memory. Steps of one run take turns, with checks and without; each step without is held against its two neighbours.
//   build/release/bench/bench_checks
// Prints a table, then one line of JSON.
#include <fmt/core.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "random_tokens.h"
#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/base/log.h"
#include "spipe/config/config.h"
#include "spipe/exec/trainer.h"

namespace spipe::bench {
namespace {

constexpr int kWarmUp = 4;  // steps, even

struct Case {
  const char* name;
  int sequences, seq_len;
  const char* precision;
};
// Few tokens a step make the most of what goes over the parameters.
constexpr Case kCases[] = {{"fp32, 256 tokens", 4, 64, "fp32"},
                           {"fp32, 16 tokens", 1, 16, "fp32"},
                           {"bf16, 256 tokens", 4, 64, "bf16"},
                           {"bf16, 16 tokens", 1, 16, "bf16"}};

// 86 M parameters.
constexpr const char* kModel = R"({"model_type": "llama", "vocab_size": 1000, "hidden_size": 768, "num_hidden_layers": 12,
  "num_attention_heads": 12, "num_key_value_heads": 12, "intermediate_size": 2048, "max_position_embeddings": 64,
  "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": false})";

class Seconds : public exec::RunListener {
 public:
  void on_step(const exec::StepRecord& record) override { values.push_back(record.seconds); }
  std::vector<double> values;
};

struct Result {
  double with = 0, without = 0;  // median seconds
  double cost = 0;               // median over the steps without checks: mean of the neighbours over it, less 1
};

Result measure(const Case& c, int pairs, int threads, const std::filesystem::path& folder) {
  write_text_atomic(folder / "model.json", kModel);
  write_tokens(folder / "train.bin", 1000);
  const std::string dir = folder.string();
  write_text_atomic(folder / "run.yaml",
                    fmt::format("model: {{config: {0}/model.json}}\n"
                                "data: {{train: [{0}/train.bin], seq_len: {1}}}\n"
                                "batch: {{global: {2}, micro: {2}}}\n"
                                "train: {{steps: {3}, precision: {4}}}\n"
                                "optimizer: {{policy: sync, placement: cpu}}\n"
                                "device: {{threads: {5}}}\n"
                                "checkpoint: {{dir: {0}/run}}\n",
                                dir, c.seq_len, c.sequences, kWarmUp + 2 * pairs + 1, c.precision, threads));
  exec::RunOptions options;
  options.handle_signals = false;
  options.barrier_between_steps = true;  // a step's time is its own
  options.checks_every_other = true;
  Seconds seconds;
  (void)exec::train(config::load_config(folder / "run.yaml"), options, seconds);
  std::filesystem::remove_all(folder / "run");
  std::vector<double> with, without, costs;
  for (std::size_t s = kWarmUp + 1; s + 1 < seconds.values.size(); s += 2) {
    const double around = (seconds.values[s - 1] + seconds.values[s + 1]) / 2;
    with.push_back(around);
    without.push_back(seconds.values[s]);
    costs.push_back(around / seconds.values[s] - 1);
  }
  return {median(with), median(without), median(costs)};
}

int run(int argc, char** argv) {
  CLI::App app{"Measures what gradient norms and the search for overflows cost a step.", "bench_checks"};
  app.footer("Examples:\n  bench_checks\n  bench_checks --pairs 40 --threads 1");
  int pairs = 20, threads = 2;
  app.add_option("--pairs", pairs, "steps without checks, each between two with them")->check(CLI::Range(3, 1000));
  app.add_option("--threads", threads, "threads of the step")->check(CLI::Range(1, 1024));
  CLI11_PARSE(app, argc, argv);
  init_logging(LogLevel::error);
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / fmt::format("spipe-checks-{}", ::getpid());
  std::filesystem::create_directories(folder);
  nlohmann::ordered_json json;
  int code = 0;
  try {
    fmt::print("{:18} {:>12} {:>12} {:>8}\n", "step", "with, ms", "without, ms", "cost");
    double worst = 0;
    for (const Case& c : kCases) {
      const Result result = measure(c, pairs, threads, folder);
      worst = std::max(worst, result.cost);
      fmt::print("{:18} {:12.1f} {:12.1f} {:+7.2f} %\n", c.name, 1e3 * result.with, 1e3 * result.without, 1e2 * result.cost);
      std::fflush(stdout);
      json["cases"].push_back(
          {{"step", c.name}, {"with_s", result.with}, {"without_s", result.without}, {"cost", result.cost}});
    }
    json["worst_cost"] = worst;
    fmt::print("{}\n", json.dump());
  } catch (const Error& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    code = 2;
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  return code;
}

}  // namespace
}  // namespace spipe::bench

int main(int argc, char** argv) { return spipe::bench::run(argc, argv); }
