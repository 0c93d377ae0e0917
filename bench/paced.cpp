#include "paced.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "random_tokens.h"
#include "spipe/base/file.h"
#include "spipe/model/families.h"

namespace spipe::bench {
namespace {

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
    split = setup.fit.split;
    schedule = setup.trials.front().schedule;
    input = setup.trials.front().input;
    input.shape = &shape;
  }
  void on_step(const exec::StepRecord& record) override { seconds.push_back(record.seconds); }
  plan::Plan plan;
  model::ModelShape shape;
  plan::Hardware hardware;
  plan::UpdateSplit split;
  std::string schedule;
  plan::PipelineInput input;
  std::vector<double> seconds;
};

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
  const double bytes = elements * static_cast<double>(dtype_size(shape.compute));
  h.h2d_bytes_per_s = h.d2h_bytes_per_s = bytes / (forward * c.fetch_over_forward);
  if (c.update_over_forward > 0) {
    h.update_params_per_s_rank = elements / (forward * c.update_over_forward);
    h.update_params_per_s = std::min<double>(h.ranks_per_host, c.ranks_that_fill) * h.update_params_per_s_rank;
  }
  if (hosts > 1) h.network_bytes_per_s = 1.5 * h.h2d_bytes_per_s;
  return h;
}

void simulate_case(const Case& c, int steps, const Recorder& recorder, Measured& measured) {
  plan::SimulationOptions options;
  options.steps = steps;
  options.jitter = c.jitter;
  options.seed = 7;
  if (c.slow_rank >= 0) {
    options.rank_speed.assign(kRanks, 1);
    options.rank_speed[static_cast<std::size_t>(c.slow_rank)] = 1 / 1.3;
  }
  const plan::Simulation simulation = plan::simulate(recorder.plan, recorder.shape, recorder.hardware, options);
  measured.simulated = simulation.step_seconds;
  measured.bubble_simulated = simulation.bubble;
  measured.device_bytes = recorder.plan.device_bytes();
  measured.split = recorder.split;
  measured.schedule = recorder.schedule;
  measured.bound = step_bound(recorder.input, recorder.hardware);
}

// Idle compute between the first forward and the last backward of a step, over all ranks; the median over steps.
double bubble_of(comm::World& world, int step_count, const std::vector<ComputeSlice>& own) {
  std::vector<std::vector<ComputeSlice>> steps(static_cast<std::size_t>(step_count));
  for (const auto& bytes : world.all_gather(std::as_bytes(std::span(own)))) {
    for (std::size_t at = 0; at < bytes.size(); at += sizeof(ComputeSlice)) {
      ComputeSlice slice;
      std::memcpy(&slice, bytes.data() + at, sizeof(slice));
      steps[slice.step].push_back(slice);
    }
  }
  std::vector<double> bubbles;
  for (std::size_t s = static_cast<std::size_t>(step_count) / 3; s + 1 < steps.size(); ++s) {
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

}  // namespace

double step_bound(const plan::PipelineInput& input, const plan::Hardware& hardware) {
  const model::ModelShape& shape = *input.shape;
  const double ranks = hardware.ranks_per_host, updates = hardware.update_params_per_s;
  double flops = 0, parameters = 0;
  for (const model::ComputeUnit& unit : shape.units) {
    const bool repeats = unit.kind == model::UnitKind::layer;
    flops += input.micro_batches * ((repeats ? 2 : 1) * unit.forward_flops + unit.backward_flops);
  }
  for (const model::StoreUnit& unit : shape.store_units) parameters += static_cast<double>(unit.elements);
  const plan::UpdateBytes bytes{.compute = input.compute_dtype_size,
                                .grad = input.grad_dtype_size,
                                .state = input.state_bytes_per_element,
                                .separate_master = input.separate_master};
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i <= 1000; ++i) {
    const double x = i / 1000.0;
    const double in = parameters * (2 * static_cast<double>(bytes.compute) + x * static_cast<double>(bytes.in()));
    const double out = parameters * (static_cast<double>(bytes.grad) + x * static_cast<double>(bytes.out()));
    const double link = std::max(in / hardware.h2d_bytes_per_s, out / hardware.d2h_bytes_per_s) / ranks;
    best = std::min(best, std::max(link, updates > 0 ? (1 - x) * parameters / updates : 0));
  }
  return std::max(best, flops / ranks / hardware.matmul_flops);
}

PacedBench::PacedBench(comm::World& world, int steps) : world_(world), steps_(steps) {
  folder_ = std::filesystem::temp_directory_path() / fmt::format("spipe-paced-{}", world.pid_of(0));
  if (world.rank() == 0) std::filesystem::create_directories(folder_);
  world.barrier();
}
PacedBench::~PacedBench() {
  std::error_code ignored;
  if (world_.rank() == 0) std::filesystem::remove_all(folder_, ignored);
}

Measured PacedBench::run(const Case& c) {
  if (world_.rank() == 0) write_files(c);
  world_.barrier();
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
  measured.bubble_real = bubble_of(world_, steps_, times.slices);
  if (world_.rank() == 0) {
    measured.real = median({recorder.seconds.begin() + steps_ / 3, recorder.seconds.end() - 1});
    simulate_case(c, steps_, recorder, measured);
  }
  world_.barrier();
  if (world_.rank() == 0) std::filesystem::remove_all(folder_ / "run");
  return measured;
}

Measured PacedBench::predict(const Case& c) {
  write_files(c);
  exec::Job job;
  job.host_of_rank.assign(kRanks, 0);
  job.barrier_between_steps = c.barrier;
  device::DeviceInfo device;
  device.backend = "cpu";
  Recorder recorder;
  recorder.on_setup(exec::prepare_run(config::load_config(folder_ / "run.yaml"), device, {}, job), device, {}, 0);
  Measured measured;
  simulate_case(c, steps_, recorder, measured);
  return measured;
}

void PacedBench::write_files(const Case& c) {
  write_text_atomic(folder_ / "model.json", model_json(c));
  write_tokens(folder_ / "train.bin", c.vocabulary);
  const model::Architecture architecture = model::architecture_from_hf(folder_ / "model.json");
  const DType compute = c.precision == "fp32" ? DType::f32 : DType::bf16;
  const model::ModelShape shape = model::make_shape(architecture, {1, c.seq_len, c.seq_len}, compute);
  write_text_atomic(folder_ / "machine.yaml", plan::hardware_text(hardware_of(c, shape, world_.hosts())));
  const bool same = c.schedule == "mobius" || c.schedule == "1f1b";
  const std::string dir = folder_.string();
  std::string text = fmt::format(
      "model: {{config: {0}/model.json}}\n"
      "data: {{train: [{0}/train.bin], seq_len: {1}}}\n"
      "batch: {{global: {2}, micro: 1}}\n"
      "train: {{steps: {3}, precision: {4}, grad_clip: 0, head_chunk: {1}}}\n"
      "optimizer: {{policy: {5}, placement: {6}}}\n"
      "checkpoint: {{dir: {0}/run}}\n"
      "parallel: {{schedule: {7}",
      dir, c.seq_len, c.micro_batches, steps_, c.precision, c.policy, c.placement, c.schedule);
  if (c.backward_stages > 0) {
    text += fmt::format(", forward_stages: {}, backward_stages: {}", same ? c.backward_stages : c.forward_stages,
                        c.backward_stages);
  }
  text += fmt::format("}}\ndevice: {{threads: 1, pace: {}/machine.yaml, pace_jitter: {}, pace_seed: 7", dir, c.jitter);
  if (c.device_bytes > 0) text += fmt::format(", memory: {}", c.device_bytes);
  if (c.slow_rank >= 0) text += fmt::format(", pace_slow_rank: {}, pace_slow_factor: 1.3", c.slow_rank);
  write_text_atomic(folder_ / "run.yaml", text + "}\n");
}

}  // namespace spipe::bench
