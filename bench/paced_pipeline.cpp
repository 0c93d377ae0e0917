// Real against simulated: four real processes with paced devices (device.pace) run plans whose steps the simulator predicts.
//   mpirun -np 4 --oversubscribe --bind-to none build/release/bench/paced_pipeline
// Prints a table, then one line of JSON. A run is void when more than 1 % of its tasks overran their modelled time, or the real
// work took more than 30 % of it.
#include <fmt/core.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/base/log.h"
#include "spipe/base/random.h"
#include "spipe/comm/world.h"
#include "spipe/data/data.h"
#include "spipe/exec/trainer.h"
#include "spipe/model/families.h"
#include "spipe/plan/simulator.h"

namespace spipe::bench {
namespace {

constexpr int kRanks = 4;
constexpr double kMostOverruns = 0.01, kMostReal = 0.3;

// A tiny llama and the machine on which its tasks take as long as wanted.
struct Case {
  std::string name;
  int layers = 12, hidden = 32, ffn = 64, vocabulary = 512, seq_len = 16, micro_batches = 8;
  double layer_forward_ms = 10;    // one layer, one micro-batch
  double fetch_over_forward = 2;   // of a layer's parameters
  double update_over_forward = 4;  // of a layer's parameters, by one rank
  std::string schedule = "spipe";
  int forward_stages = 8, backward_stages = 12;
  double jitter = 0;
  int slow_rank = -1;
  bool barrier = false;
  std::string policy = "auto", placement = "auto";
};

struct Measured {
  double real = 0, simulated = 0, bubble_real = 0, bubble_simulated = 0, overruns = 0, real_share = 0;
  [[nodiscard]] bool is_void() const { return overruns > kMostOverruns || real_share > kMostReal; }
  [[nodiscard]] double error() const { return real / simulated - 1; }
};

struct ComputeSlice {
  std::int64_t begin = 0, end = 0;
  std::uint64_t step = 0;
};

// Compute tasks of a rank, for the bubble.
class ComputeTimes : public plan::TaskObserver {
 public:
  void on_task(const plan::Task& task, std::int64_t begin, std::int64_t end, std::uint64_t step) override {
    if (task.stream == plan::StreamKind::compute) slices.push_back({begin, end, step});
  }
  std::vector<ComputeSlice> slices;  // one thread writes
};

class Recorder : public exec::RunListener {
 public:
  void on_setup(const exec::RunSetup& setup, const device::DeviceInfo&, const device::DeviceRates&, std::uint64_t) override {
    plan = setup.fit.train;
    shape = setup.shape;
    hardware = setup.hardware;
  }
  void on_step(const exec::StepRecord& record) override { seconds.push_back(record.seconds); }
  plan::Plan plan;
  model::ModelShape shape;
  plan::Hardware hardware;
  std::vector<double> seconds;
};

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values.empty() ? 0 : values[values.size() / 2];
}

void write_tokens(const std::filesystem::path& file, int vocabulary) {
  data::TokenFileWriter writer(file, static_cast<std::uint64_t>(vocabulary), 1, -1);
  std::vector<std::int32_t> tokens;
  for (std::uint64_t i = 0; i < 20000; ++i) {
    tokens.push_back(static_cast<std::int32_t>(uniform_at(make_key(1, 1), 0, i) * static_cast<float>(vocabulary)));
  }
  writer.document(tokens);
  writer.finish();
}

std::string model_json(const Case& c) {
  return fmt::format(R"({{"model_type": "llama", "vocab_size": {}, "hidden_size": {}, "num_hidden_layers": {},
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": {}, "max_position_embeddings": {},
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": false}})",
                     c.vocabulary, c.hidden, c.layers, c.ffn, c.seq_len);
}

plan::Hardware hardware_of(const Case& c, const model::ModelShape& shape, int hosts) {
  const model::ComputeUnit& layer = shape.units[1];
  const auto elements = static_cast<double>(shape.store_units[static_cast<std::size_t>(layer.store_units[0])].elements);
  const double forward = 1e-3 * c.layer_forward_ms;
  plan::Hardware h;
  h.name = c.name;
  h.hosts = hosts;
  h.ranks_per_host = kRanks / hosts;
  h.matmul_flops = layer.forward_flops / forward;
  h.h2d_bytes_per_s = h.d2h_bytes_per_s = elements * 4 / (forward * c.fetch_over_forward);
  if (c.update_over_forward > 0) {
    h.update_params_per_s_rank = elements / (forward * c.update_over_forward);
    h.update_params_per_s = h.ranks_per_host * h.update_params_per_s_rank;
  }
  if (hosts > 1) h.network_bytes_per_s = 1.5 * h.h2d_bytes_per_s;
  return h;
}

class Bench {
 public:
  Bench(comm::World& world, int steps) : world_(world), steps_(steps) {
    folder_ = std::filesystem::temp_directory_path() / fmt::format("spipe-paced-{}", world.pid_of(0));
    if (world.rank() == 0) std::filesystem::create_directories(folder_);
    world.barrier();
  }
  ~Bench() {
    std::error_code ignored;
    if (world_.rank() == 0) std::filesystem::remove_all(folder_, ignored);
  }

  Measured run(const Case& c) {
    prepare(c);
    ComputeTimes times;
    Recorder recorder;
    exec::RunOptions options;
    options.handle_signals = false;
    options.observers = {&times};
    options.rates = device::DeviceRates{1e11, 1e10, 1e10, 1e9};
    options.barrier_between_steps = c.barrier;
    const exec::RunSummary summary = exec::train(config::load_config(folder_ / "run.yaml"), options, recorder, world_);
    Measured measured;
    const exec::Pacer::Account& pace = *summary.pace;
    measured.overruns = static_cast<double>(pace.overruns) / static_cast<double>(std::max<std::uint64_t>(1, pace.tasks));
    measured.real_share = pace.real_seconds / pace.paced_seconds;
    measured.bubble_real = bubble(times.slices);
    if (world_.rank() == 0) {
      measured.real = median({recorder.seconds.begin() + steps_ / 3, recorder.seconds.end() - 1});
      simulate(c, recorder, measured);
    }
    world_.barrier();
    if (world_.rank() == 0) std::filesystem::remove_all(folder_ / "run");
    return measured;
  }

 private:
  void prepare(const Case& c) {
    if (world_.rank() != 0) {
      world_.barrier();
      return;
    }
    write_text_atomic(folder_ / "model.json", model_json(c));
    write_tokens(folder_ / "train.bin", c.vocabulary);
    const model::Architecture architecture = model::architecture_from_hf(folder_ / "model.json");
    const model::ModelShape shape = model::make_shape(architecture, {1, c.seq_len, c.seq_len}, DType::f32);
    write_text_atomic(folder_ / "machine.yaml", plan::hardware_text(hardware_of(c, shape, world_.hosts())));
    const bool same = c.schedule == "mobius" || c.schedule == "1f1b";
    const std::string dir = folder_.string();
    std::string text = fmt::format(
        "model: {{config: {0}/model.json}}\n"
        "data: {{train: [{0}/train.bin], seq_len: {1}}}\n"
        "batch: {{global: {2}, micro: 1}}\n"
        "train: {{steps: {3}, precision: fp32, grad_clip: 0, head_chunk: {1}}}\n"
        "optimizer: {{policy: {8}, placement: {9}}}\n"
        "parallel: {{schedule: {4}, forward_stages: {5}, backward_stages: {6}}}\n"
        "checkpoint: {{dir: {0}/run}}\n"
        "device: {{threads: 1, pace: {0}/machine.yaml, pace_jitter: {7}, pace_seed: 7",
        dir, c.seq_len, c.micro_batches, steps_, c.schedule, same ? c.backward_stages : c.forward_stages, c.backward_stages,
        c.jitter, c.policy, c.placement);
    if (c.slow_rank >= 0) text += fmt::format(", pace_slow_rank: {}, pace_slow_factor: 1.3", c.slow_rank);
    write_text_atomic(folder_ / "run.yaml", text + "}\n");
    world_.barrier();
  }

  void simulate(const Case& c, const Recorder& recorder, Measured& measured) const {
    plan::SimulationOptions options;
    options.steps = steps_;
    options.jitter = c.jitter;
    options.seed = 7;
    if (c.slow_rank >= 0) {
      options.rank_speed.assign(kRanks, 1);
      options.rank_speed[static_cast<std::size_t>(c.slow_rank)] = 1 / 1.3;
    }
    const plan::Simulation simulation = plan::simulate(recorder.plan, recorder.shape, recorder.hardware, options);
    measured.simulated = simulation.step_seconds;
    measured.bubble_simulated = simulation.bubble;
  }

  // Idle compute between the first forward and the last backward of a step, over all ranks; the median over steps.
  double bubble(const std::vector<ComputeSlice>& own) {
    std::vector<std::vector<ComputeSlice>> steps(static_cast<std::size_t>(steps_));
    for (const auto& bytes : world_.all_gather(std::as_bytes(std::span(own)))) {
      for (std::size_t at = 0; at < bytes.size(); at += sizeof(ComputeSlice)) {
        ComputeSlice slice;
        std::memcpy(&slice, bytes.data() + at, sizeof(slice));
        steps[slice.step].push_back(slice);
      }
    }
    std::vector<double> bubbles;
    for (std::size_t s = static_cast<std::size_t>(steps_) / 3; s + 1 < steps.size(); ++s) {
      std::int64_t first = INT64_MAX, last = 0, busy = 0;
      for (const ComputeSlice& slice : steps[s]) {
        first = std::min(first, slice.begin);
        last = std::max(last, slice.end);
        busy += slice.end - slice.begin;
      }
      bubbles.push_back(1 - static_cast<double>(busy) / static_cast<double>(last - first) / kRanks);
    }
    return median(bubbles);
  }

  comm::World& world_;
  int steps_;
  std::filesystem::path folder_;
};

std::vector<Case> cases() {
  std::vector<Case> list;
  const Case shapes[] = {
      {.name = "heavy head", .layers = 12, .vocabulary = 1500},
      {.name = "wide ffn, odd M",
       .layers = 9,
       .ffn = 160,
       .vocabulary = 256,
       .micro_batches = 9,
       .fetch_over_forward = 5,
       .backward_stages = 11},
      {.name = "link and update bound",
       .layers = 14,
       .vocabulary = 900,
       .micro_batches = 5,
       .layer_forward_ms = 12,
       .fetch_over_forward = 8,
       .update_over_forward = 12},
  };
  for (const Case& shape : shapes) {
    for (const char* schedule : {"spipe", "mobius", "1f1b"}) {
      Case c = shape;
      c.schedule = schedule;
      c.jitter = 0.2;
      if (c.schedule != "spipe") c.backward_stages = 8;
      list.push_back(c);
    }
  }
  Case slow = shapes[0];
  slow.name = "slow rank";
  slow.jitter = 0.2;
  slow.slow_rank = 2;
  list.push_back(slow);
  return list;
}

// The 10B model on four V100 at 1,024 tokens: 48 layers, M = 8; a layer's forward takes 12.4 ms there, its fetch 77 ms, its
// update 0.1 s of the host's rate (0.4 s of a rank's); all of it three times as fast here.
Case regime(const char* schedule) {
  Case c{.name = "10B/1024 regime",
         .layers = 48,
         .vocabulary = 384,
         .layer_forward_ms = 4.13,
         .fetch_over_forward = 6.2,
         .update_over_forward = 32.5};
  c.schedule = schedule;
  c.barrier = true;
  const bool spipe = c.schedule == "spipe";
  if (spipe) c.policy = "overlap";
  c.forward_stages = 8;
  c.backward_stages = spipe ? 24 : 8;
  return c;
}

// Runs cases, prints a line for each, and keeps what all of them say.
class Table {
 public:
  Table(comm::World& world, int steps) : bench_(world, steps), prints_(world.rank() == 0) {
    if (!prints_) return;
    fmt::print("{:22} {:7} {:>8} {:>8} {:>9} {:>8} {:>8} {:>8} {:>7}\n", "case", "plan", "real ms", "sim ms", "error", "bubble",
               "sim", "overrun", "work");
  }
  Measured run(const Case& c) {
    const Measured m = bench_.run(c);
    worst_error = std::max(worst_error, std::abs(m.error()));
    void_runs += m.is_void() ? 1 : 0;
    if (!prints_) return m;
    fmt::print("{:22} {:7} {:8.1f} {:8.1f} {:+7.1f} % {:6.1f} % {:6.1f} % {:6.2f} % {:5.1f} %{}\n", c.name, c.schedule,
               1e3 * m.real, 1e3 * m.simulated, 100 * m.error(), 100 * m.bubble_real, 100 * m.bubble_simulated,
               100 * m.overruns, 100 * m.real_share, m.is_void() ? "  VOID" : "");
    std::fflush(stdout);
    return m;
  }
  double worst_error = 0;
  int void_runs = 0;

 private:
  Bench bench_;
  bool prints_;
};

// Equal units, M = 2N, updates that take no time: the bubble of the pipeline itself.
Case equal_units() {
  Case c{.name = "bubble, M = 2N",
         .layers = 48,
         .vocabulary = 64,
         .micro_batches = 2 * kRanks,
         .layer_forward_ms = 5,
         .fetch_over_forward = 1,
         .update_over_forward = 0};
  c.forward_stages = 8;
  c.backward_stages = 24;
  return c;
}

nlohmann::ordered_json measure(comm::World& world, int steps, bool quick, bool only_last) {
  Table table(world, steps);
  nlohmann::ordered_json json = {{"hosts", world.hosts()}};
  std::vector<Case> all = cases();
  if (quick) all.resize(3);
  if (only_last) all.clear();
  for (const Case& c : all) table.run(c);
  if (world.hosts() == 1) {
    json["bubble_2n"] = table.run(equal_units()).bubble_real;
    const double spipe = table.run(regime("spipe")).real;
    json["mobius_over_spipe_10b"] = table.run(regime("mobius")).real / spipe;
  }
  json["worst_error"] = table.worst_error;
  json["void_runs"] = table.void_runs;
  return json;
}

int run(int argc, char** argv) {
  CLI::App app{"Measures paced pipelines of four ranks against the simulator.", "paced_pipeline"};
  app.footer(
      "Examples:\n"
      "  mpirun -np 4 --oversubscribe --bind-to none paced_pipeline\n"
      "  SPIPE_FAKE_HOSTS=2 mpirun -np 4 --oversubscribe --bind-to none paced_pipeline    as two hosts with a network between");
  int steps = 9;
  bool quick = false, only_last = false;
  app.add_option("--steps", steps, "steps of each run")->check(CLI::Range(6, 1000));
  app.add_flag("--quick", quick, "one shape only");
  app.add_flag("--only-last", only_last, "the bubble and the 10B regime only");
  CLI11_PARSE(app, argc, argv);
  init_logging(LogLevel::error);
  comm::World world;
  const bool prints = world.rank() == 0;
  int code = 2;
  if (world.size() != kRanks || kRanks % world.hosts() != 0) {
    if (prints) fmt::print(stderr, "error: start it with mpirun -np {}\n", kRanks);
    world.finish();
    return code;
  }
  try {
    const nlohmann::ordered_json json = measure(world, steps, quick, only_last);
    if (prints) fmt::print("{}\n", json.dump());
    code = 0;
  } catch (const Error& error) {
    if (prints) fmt::print(stderr, "error: {}\n", error.what());
  }
  world.finish();
  return code;
}

}  // namespace
}  // namespace spipe::bench

int main(int argc, char** argv) { return spipe::bench::run(argc, argv); }
