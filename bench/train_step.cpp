// A whole training step of GPT-2 (124 M parameters, fp32, no dropout) on the CPU: against its floor, and against peers that
// take turns with it. The floor is the step's matmul FLOPs at the matmul rate measured here, and one pass of the update at its
// rate.
//   build/release/bench/bench_train_step --peer "python3 bench/peers/pytorch_gpt2.py"
// A peer is a command that gets --batch, --length, --threads and --steps, and ends with a line of JSON that has "name" and
// "step_seconds" (a median). Prints a table, then one line of JSON.
#include <fmt/core.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "random_tokens.h"
#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/base/host.h"
#include "spipe/base/log.h"
#include "spipe/config/config.h"
#include "spipe/exec/trainer.h"

namespace spipe::bench {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kDropped = 2;  // steps after a pause: caches are somebody else's, and one of them waited

constexpr const char* kModel = R"({"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12,
  "n_positions": 1024, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5})";

struct Shape {
  int batch = 4, length = 64, threads = 2;
};

struct Settings {
  int rounds = 5, steps = 3;
  std::vector<std::string> peers;
};

// What the command's last line says.
Json run_peer(const std::string& command, const Shape& shape, int steps) {
  const std::string line = fmt::format("{} --batch {} --length {} --threads {} --steps {}", command, shape.batch, shape.length,
                                       shape.threads, steps);
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(::popen(line.c_str(), "r"), ::pclose);
  if (!pipe) throw Error("cannot start a peer", line, "check the command");
  std::string last, current;
  for (int c = std::fgetc(pipe.get()); c != EOF; c = std::fgetc(pipe.get())) {
    if (c != '\n') {
      current += static_cast<char>(c);
    } else if (!current.empty()) {
      last = std::move(current);
      current.clear();
    }
  }
  Json json = Json::parse(last, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("name") || !json.contains("step_seconds")) {
    throw Error("a peer ended without its line of JSON", line, "run it by hand to see why");
  }
  return json;
}

// Between rounds of the run's own steps the peers have the machine. A step that has begun then runs beside a peer's first,
// which that one does not count.
class Rounds : public exec::RunListener {
 public:
  Rounds(const Shape& shape, const Settings& settings) : shape_(shape), settings_(settings) {}
  void on_setup(const exec::RunSetup& setup, const device::DeviceInfo&, const device::DeviceRates& rates,
                std::uint64_t) override {
    const double tokens = static_cast<double>(shape_.batch) * shape_.length;
    double parameters = 0;
    for (const model::StoreUnit& unit : setup.shape.store_units) parameters += static_cast<double>(unit.elements);
    flops = model::model_flops_per_token(setup.shape) * tokens;
    matmul_rate = rates.matmul_flops;
    update_seconds = parameters / rates.adam_parameters;
  }
  void on_step(const exec::StepRecord& record) override {
    if (++step_ > kDropped) sum_ += record.seconds;
    if (step_ < kDropped + settings_.steps) return;
    own.push_back(sum_ / settings_.steps);
    step_ = 0;
    sum_ = 0;
    for (const std::string& command : settings_.peers) {
      const Json json = run_peer(command, shape_, settings_.steps);
      peers[json["name"].get<std::string>()].push_back(json["step_seconds"].get<double>());
    }
  }
  [[nodiscard]] double floor() const { return flops / matmul_rate + update_seconds; }
  double flops = 0, matmul_rate = 0, update_seconds = 0;
  std::vector<double> own;
  std::map<std::string, std::vector<double>> peers;

 private:
  Shape shape_;
  const Settings& settings_;
  int step_ = 0;
  double sum_ = 0;
};

Json measure(const Shape& shape, const Settings& settings, const std::filesystem::path& folder) {
  const std::string dir = folder.string();
  write_text_atomic(folder / "run.yaml",
                    fmt::format("model: {{config: {0}/model.json}}\n"
                                "data: {{train: [{0}/train.bin], seq_len: {1}}}\n"
                                "batch: {{global: {2}, micro: {2}}}\n"
                                "train: {{steps: {3}, precision: fp32}}\n"
                                "device: {{threads: {4}}}\n"
                                "checkpoint: {{dir: {0}/run}}\n",
                                dir, shape.length, shape.batch, settings.rounds * (kDropped + settings.steps), shape.threads));
  exec::RunOptions options;
  options.handle_signals = false;
  Rounds rounds(shape, settings);
  (void)exec::train(config::load_config(folder / "run.yaml"), options, rounds);
  std::filesystem::remove_all(folder / "run");
  const double own = median(rounds.own), floor = rounds.floor();
  Json json = {{"batch", shape.batch},
               {"length", shape.length},
               {"threads", shape.threads},
               {"step_seconds", own},
               {"floor_seconds", floor},
               {"ratio", own / floor},
               {"matmul_gflops", rounds.matmul_rate * 1e-9},
               {"update_seconds", rounds.update_seconds}};
  double best = 0;
  for (const auto& [name, seconds] : rounds.peers) {
    json["peers"][name] = median(seconds);
    if (best == 0 || median(seconds) < best) best = median(seconds);
  }
  fmt::print("{:>2} x {:<5} {:>7} {:9.3f} {:9.3f} {:7.2f} ", shape.batch, shape.length, shape.threads, own, floor, own / floor);
  if (best > 0) {
    json["best_peer_over_own"] = best / own;
    fmt::print("{:9.2f}  ", best / own);
    for (const auto& [name, seconds] : rounds.peers) fmt::print(" {} {:.3f} s", name, median(seconds));
  }
  fmt::print("\n");
  std::fflush(stdout);
  return json;
}

int run(int argc, char** argv) {
  CLI::App app{"Measures a training step of GPT-2 124M on the CPU.", "bench_train_step"};
  app.footer("Examples:\n  bench_train_step\n  bench_train_step --peer \"python3 bench/peers/pytorch_gpt2.py\"");
  Settings settings;
  app.add_option("--rounds", settings.rounds, "turns of all; medians count")->check(CLI::Range(1, 1000));
  app.add_option("--steps", settings.steps, "timed steps of a turn")->check(CLI::Range(1, 1000));
  app.add_option("--peer", settings.peers, "command of a peer, any number of times");
  std::vector<int> thread_counts = {2, 1};
  app.add_option("--threads", thread_counts, "thread counts")->check(CLI::Range(1, 1024));
  CLI11_PARSE(app, argc, argv);
  init_logging(LogLevel::error);
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / fmt::format("spipe-train-step-{}", ::getpid());
  std::filesystem::create_directories(folder);
  int code = 0;
  try {
    write_text_atomic(folder / "model.json", kModel);
    write_tokens(folder / "train.bin", 50257);
    Json json = {{"bench", "train_step"}, {"cpu", cpu_model_name()}};
    fmt::print("sequences threads    step s   floor s   ratio  best peer / own\n");
    for (const auto& [batch, length] : {std::pair{4, 64}, {1, 1024}}) {
      for (const int threads : thread_counts) json["steps"].push_back(measure({batch, length, threads}, settings, folder));
    }
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
