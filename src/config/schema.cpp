#include "schema.h"

#include <algorithm>

#include "group_key.h"
#include "key_makers.h"

namespace spipe::config {
namespace {

void add_model_and_data(std::vector<Key>& table) {
  table.push_back(named_also(
      path_key("model.config", SPIPE_FIELD(model.config),
               "A Hugging Face config.json, or a YAML file with the same keys (configs/models). This or model.hf is required."),
      {"model_config", "architecture"}));
  table.push_back(named_also(path_key("model.hf", SPIPE_FIELD(model.hf), "A Hugging Face folder: config.json and safetensors."),
                             {"model_name_or_path", "model_path", "pretrained_model"}));
  table.push_back(choice<Init>(
      "model.init", SPIPE_FIELD(model.init), {{"from_scratch", Init::from_scratch}, {"pretrained", Init::pretrained}}, {},
      "Random parameters, or those of model.hf. Where model.hf is given and this is not: pretrained."));
  table.push_back(text_choice("model.initialization", SPIPE_FIELD(model.initialization), {"family", "fan_in"}, {},
                              "Scale of random parameters: as the family's paper says, or by each matrix's number of inputs."));
  table.push_back(number("model.dropout", SPIPE_FIELD(model.dropout), between(0, 0.95),
                         "Dropout after the embedding and both residual projections, whatever the model's own config says."));
  table.push_back(named_also(paths("data.train", SPIPE_FIELD(data.train), false, "Token files to train on. Required."),
                             {"dataset", "train_file", "train_data", "data_path"}));
  table.push_back(named_also(paths("data.eval", SPIPE_FIELD(data.eval), true, "Token files held out for evaluation."),
                             {"valid", "validation", "eval_file", "heldout"}));
  table.push_back(named_also(integer("data.seq_len", SPIPE_FIELD(data.seq_len), between(1, kIntMax), "Tokens per sequence."),
                             {"seq_length", "sequence_length", "context_length", "block_size", "max_length"}));
  table.push_back(named_also(
      seed("data.shuffle_seed", SPIPE_FIELD(data.shuffle_seed), "Names the order of the training windows."), {"data_seed"}));
}

void add_batch_and_train(std::vector<Key>& table) {
  table.push_back(named_also(integer("batch.global", SPIPE_FIELD(batch.global), between(1, kIntMax),
                                     "Sequences per step, over all micro-batches and replicas."),
                             {"batch_size", "global_batch_size", "train_batch_size"}));
  table.push_back(named_also(integer("batch.micro", SPIPE_FIELD(batch.micro), between(1, kIntMax),
                                     "Sequences that go through the pipeline together; divides batch.global."),
                             {"micro_batch_size", "per_device_train_batch_size"}));
  table.push_back(integer("batch.sum_groups", SPIPE_FIELD(batch.sum_groups), between(1, kIntMax),
                          "Groups of consecutive micro-batches whose gradients are summed first, before the groups' sums are "
                          "(part of the numerics); parallel.data unless given."));
  table.push_back(named_also(integer("train.steps", SPIPE_FIELD(train.steps), at_least(1), "Optimizer steps. Required."),
                             {"num_steps", "max_steps", "total_steps", "iterations"}));
  table.push_back(named_also(
      choice<Precision>(
          "train.precision", SPIPE_FIELD(train.precision),
          {{"auto", Precision::automatic}, {"fp32", Precision::fp32}, {"bf16", Precision::bf16}, {"fp16", Precision::fp16}}, {},
          "Type of parameters as computed with; auto: fp32 on CPU, bf16 on CUDA."),
      {"dtype", "mixed_precision"}));
  table.push_back(seed("train.seed", SPIPE_FIELD(train.seed), "Names the initial parameters and the dropout."));
  table.push_back(named_also(number("train.grad_clip", SPIPE_FIELD(train.grad_clip), at_least(0),
                                    "Gradient norm above which gradients are scaled down; 0: never."),
                             {"max_grad_norm", "clip_grad", "gradient_clipping"}));
  table.push_back(
      named_also(switch_key("train.recompute", SPIPE_FIELD(train.recompute),
                            "Recompute activations in backward instead of keeping them; auto: when memory asks for it."),
                 {"gradient_checkpointing", "activation_checkpointing"}));
  table.push_back(switch_key("train.park", SPIPE_FIELD(train.park),
                             "Park boundaries in host memory between forward and backward; auto: when memory asks for it."));
  table.push_back(named_also(integer("train.eval_every", SPIPE_FIELD(train.eval_every), at_least(0),
                                     "Steps between evaluations (and samples); 0: only at the end."),
                             {"eval_interval", "eval_steps"}));
  table.push_back(integer("train.eval_batches", SPIPE_FIELD(train.eval_batches), at_least(0),
                          "Micro-batches per evaluation; 0: the whole held-out set."));
  table.push_back(integer("train.head_chunk", SPIPE_FIELD(train.head_chunk), between(0, kIntMax),
                          "Rows of logits computed at a time (part of the numerics); 0: chosen by vocabulary and batch."));
  table.push_back(text_choice("train.nonfinite", SPIPE_FIELD(train.nonfinite), {"stop", "skip"}, {},
                              "What a non-finite loss or gradient does to the run: stop it, or skip that step's update. "
                              "Overflows that a smaller dynamic loss scale may avoid are always skipped."));
  table.push_back(integer("train.max_skips", SPIPE_FIELD(train.max_skips), between(0, kIntMax),
                          "Skipped steps in a row after which the run stops; 0: never."));
}

constexpr double kLargestScale = 0x1p40;

// train.loss_scale: auto, dynamic or the scale itself.
Key loss_scale_key() {
  Key made = key("train.loss_scale", "auto | dynamic | number", "a power of two",
                 "Factor of the loss that backward computes with; auto: dynamic with fp16, else 1 (none).");
  made.read = [](Config& config, const Value& value) {
    LossScaleConfig& scale = config.train.loss_scale;
    scale.fixed.reset();
    scale.dynamic = value.node.kind == Node::Kind::scalar && value.node.text == "dynamic";
    if (!scale.dynamic && !is_auto(value)) scale.fixed = read_power_of_two(value, between(1, kLargestScale));
  };
  made.write = [](const Config& config) {
    const LossScaleConfig& scale = config.train.loss_scale;
    return scale.fixed ? number_text(*scale.fixed) : std::string(scale.dynamic ? "dynamic" : "auto");
  };
  return made;
}

void add_loss_scale(std::vector<Key>& table) {
  table.push_back(named_also(loss_scale_key(), {"scale_loss", "fp16_scale"}));
  table.push_back(named_also(power_of_two("train.loss_scale_initial", SPIPE_FIELD(train.loss_scale.initial),
                                          between(1, kLargestScale), "First value of a dynamic loss scale."),
                             {"initial_loss_scale", "init_scale", "initial_scale_power"}));
  table.push_back(named_also(integer("train.loss_scale_window", SPIPE_FIELD(train.loss_scale.window), between(1, kIntMax),
                                     "Steps in a row without overflow after which a dynamic loss scale grows."),
                             {"growth_interval", "scale_window"}));
  table.push_back(named_also(power_of_two("train.loss_scale_growth", SPIPE_FIELD(train.loss_scale.growth), between(1, 65536),
                                          "What a dynamic loss scale is multiplied by when it grows; 1: never."),
                             {"growth_factor"}));
  table.push_back(named_also(
      power_of_two("train.loss_scale_backoff", SPIPE_FIELD(train.loss_scale.backoff), {.low = 0, .low_open = true, .high = 0.5},
                   "What a dynamic loss scale is multiplied by when the gradient overflows."),
      {"backoff_factor"}));
  table.push_back(
      named_also(integer("train.loss_scale_hysteresis", SPIPE_FIELD(train.loss_scale.hysteresis), between(1, kIntMax),
                         "The overflow since the last growth from which on a dynamic loss scale backs off; 1: the first."),
                 {"hysteresis"}));
  table.push_back(
      named_also(power_of_two("train.loss_scale_min", SPIPE_FIELD(train.loss_scale.minimum), between(1, kLargestScale),
                              "Smallest dynamic loss scale; where it overflows too, train.nonfinite decides."),
                 {"min_loss_scale", "minimum_loss_scale"}));
  table.push_back(named_also(power_of_two("train.loss_scale_max", SPIPE_FIELD(train.loss_scale.maximum),
                                          between(1, kLargestScale), "Largest dynamic loss scale."),
                             {"max_loss_scale"}));
}

void add_spikes(std::vector<Key>& table) {
  table.push_back(named_also(
      number(
          "train.skip_spikes", SPIPE_FIELD(train.skip_spikes), at_least(0),
          "Standard deviations above the recent mean from which on a loss or gradient norm is a spike, and the step is skipped "
          "(6 is usual); 0: never."),
      {"skip_update_lossz", "skip_update_gradz", "sigma_factor", "spike_threshold"}));
  table.push_back(named_also(integer("train.spike_window", SPIPE_FIELD(train.spike_window), between(2, 65536),
                                     "Steps that a spike is measured against."),
                             {"rolling_interval_length"}));
  table.push_back(integer("train.spike_warmup", SPIPE_FIELD(train.spike_warmup), between(2, 65536),
                          "Steps that must be known before one is called a spike; at most train.spike_window."));
}

void add_optimizer(std::vector<Key>& table) {
  table.push_back(text_choice("optimizer.type", SPIPE_FIELD(optimizer.type), {"adamw", "adam", "sgd", "lion"},
                              {{"lamb", "adafactor", "muon"}, "use adamw, adam, sgd or lion"},
                              "The update rule: AdamW, Adam with L2 decay, SGD with momentum, or Lion."));
  table.push_back(named_also(number("optimizer.lr", SPIPE_FIELD(optimizer.lr), above(0), "Peak learning rate."),
                             {"learning_rate", "max_lr"}));
  table.push_back(
      named_also(two_numbers("optimizer.betas", SPIPE_FIELD(optimizer.beta1), SPIPE_FIELD(optimizer.beta2), from_to_below(0, 1),
                             "Decay of the first and second moment of AdamW and Adam, or Lion's two factors; unless given "
                             "[0.9, 0.99] for lion. SGD has none."),
                 {"beta1", "beta2", "adam_beta1", "adam_beta2"}));
  table.push_back(named_also(number("optimizer.eps", SPIPE_FIELD(optimizer.eps), above(0), "Epsilon of AdamW and Adam."),
                             {"epsilon", "adam_epsilon"}));
  table.push_back(
      named_also(number("optimizer.weight_decay", SPIPE_FIELD(optimizer.weight_decay), at_least(0),
                        "Weight decay of matrices (embeddings included), vectors have none: decoupled for adamw and lion; "
                        "added to the gradient for adam and sgd, and 0 for them unless given."),
                 {"wd"}));
  table.push_back(named_also(number("optimizer.momentum", SPIPE_FIELD(optimizer.momentum), from_to_below(0, 1),
                                    "Momentum of SGD; 0: none (the last gradient is kept all the same)."),
                             {"sgd_momentum"}));
  table.push_back(boolean("optimizer.nesterov", SPIPE_FIELD(optimizer.nesterov), "Nesterov's form of SGD's momentum."));
  table.push_back(named_also(
      text_choice("optimizer.moments", SPIPE_FIELD(optimizer.moments), {"fp32", "bf16"}, {},
                  "Type of the moments in host memory; bf16 halves them, rounded at random so that small changes add up."),
      {"moment_dtype", "state_dtype"}));
  table.push_back(text_choice("optimizer.master", SPIPE_FIELD(optimizer.master), {"fp32", "split"}, {},
                              "How bf16 compute keeps fp32 parameters: whole beside the bf16 copy, or as that copy and the 16 "
                              "bits it lacks, which saves 2 bytes a parameter and changes no bit."));
  table.push_back(groups_key());
  // "wsd" is read as wsd_linear; the first name of a value is the one printed.
  std::vector<Choice<std::string>> schedules;
  for (const char* name : {"constant", "linear", "cosine", "inverse_sqrt", "wsd_linear", "wsd_sqrt"})
    schedules.push_back({name, name});
  schedules.push_back({"wsd", "wsd_linear"});
  table.push_back(named_also(choice("optimizer.schedule.type", SPIPE_FIELD(optimizer.schedule.type), std::move(schedules), {},
                                    "Shape of the learning rate over the steps; wsd means wsd_linear."),
                             {"lr_scheduler_type", "lr_schedule", "lr_scheduler", "scheduler"}));
  table.push_back(named_also(integer("optimizer.schedule.warmup", SPIPE_FIELD(optimizer.schedule.warmup), at_least(0),
                                     "Steps of linear warm-up; at most train.steps."),
                             {"warmup_steps", "num_warmup_steps"}));
  table.push_back(named_also(number("optimizer.schedule.final", SPIPE_FIELD(optimizer.schedule.final), between(0, 1),
                                    "Last learning rate as a fraction of the peak (linear, cosine, wsd)."),
                             {"min_lr", "min_lr_ratio", "final_lr"}));
  table.push_back(named_also(integer("optimizer.schedule.decay", SPIPE_FIELD(optimizer.schedule.decay), at_least(0),
                                     "Steps of the final decay of the wsd schedules, which need it; 0 for the others."),
                             {"decay_steps"}));
  table.push_back(
      text_choice("optimizer.policy", SPIPE_FIELD(optimizer.policy), {"auto", "sync", "overlap", "deferred", "hybrid"}, {},
                  "When units are updated: with the pass at rest; as soon as a gradient is there, taken back where the "
                  "norm says so; when the norm is known, under the next forward; some this way, some that. Never "
                  "changes results."));
  table.push_back(number("optimizer.speculate", SPIPE_FIELD(optimizer.speculate), between(0, 1),
                         "With policy hybrid: fraction of the parameters whose updates do not wait for the norm."));
  table.push_back(
      text_choice("optimizer.placement", SPIPE_FIELD(optimizer.placement), {"auto", "cpu", "device", "resident"}, {},
                  "Where units are updated: by the host's cores; by the device, to which their state comes and goes; or "
                  "there, where it stays, as far as device.memory allows. Never changes results."));
}

void add_parallel_and_device(std::vector<Key>& table) {
  table.push_back(
      text_choice("parallel.schedule", SPIPE_FIELD(parallel.schedule),
                  {"auto", "streaming", "spipe", "mobius", "1f1b", "gpipe", "roundpipe", "streaming-dp"}, {},
                  "The schedule of stages over ranks; never changes results. auto: the fastest that fits, by simulation."));
  table.push_back(auto_integer("parallel.pipeline", SPIPE_FIELD(parallel.pipeline), between(1, 65536),
                               "Ranks of one pipeline; auto: the job's ranks / parallel.data."));
  table.push_back(named_also(integer("parallel.data", SPIPE_FIELD(parallel.data), between(1, 65536),
                                     "Pipelines side by side, each with its share of the micro-batches."),
                             {"data_parallel", "dp"}));
  table.push_back(auto_integer("parallel.forward_stages", SPIPE_FIELD(parallel.forward_stages), between(1, 65536),
                               "Stages of the forward pass; auto: planned from the memory budget."));
  table.push_back(auto_integer("parallel.backward_stages", SPIPE_FIELD(parallel.backward_stages), between(1, 65536),
                               "Stages of the backward pass; auto: planned from the memory budget."));
  table.push_back(
      text_choice("device.type", SPIPE_FIELD(device.type), {"auto", "cpu"}, {{"cuda"}, "use cpu or auto"}, "What computes."));
  table.push_back(named_also(
      auto_bytes("device.memory", SPIPE_FIELD(device.memory),
                 "Budget of one device: weights, gradients, activations, boundaries and workspaces; auto: no budget on CPU."),
      {"gpu_memory", "device_memory"}));
  table.push_back(auto_bytes("device.host_memory", SPIPE_FIELD(device.host_memory),
                             "Budget of this host's memory; auto: what is available within cgroup limits."));
  table.push_back(named_also(auto_integer("device.threads", SPIPE_FIELD(device.threads), between(1, 4096),
                                          "CPU threads; auto: the usable CPUs within affinity and cgroup quota."),
                             {"num_threads", "cpu_threads"}));
  table.push_back(named_also(text_choice("device.isa", SPIPE_FIELD(device.isa), {"auto", "scalar", "avx2", "avx512"}, {},
                                         "Instruction set of the CPU kernels; auto: the best this CPU has."),
                             {"cpu_isa"}));
  table.push_back(
      path_key("device.pace", SPIPE_FIELD(device.pace),
               "A hardware file (configs/hardware): the CPU device takes as long as that machine would; for measurements."));
  table.push_back(number("device.pace_jitter", SPIPE_FIELD(device.pace_jitter), between(0, 1),
                         "Compute times of a paced device vary by up to this fraction of themselves."));
  table.push_back(seed("device.pace_seed", SPIPE_FIELD(device.pace_seed), "Names the jitter of a paced device."));
  table.push_back(auto_integer("device.pace_slow_rank", SPIPE_FIELD(device.pace_slow_rank), between(0, 65535),
                               "The rank whose paced device computes device.pace_slow_factor times slower; auto: none."));
  table.push_back(number("device.pace_slow_factor", SPIPE_FIELD(device.pace_slow_factor), at_least(1),
                         "How many times slower device.pace_slow_rank computes than the others."));
}

void add_checkpoint_and_log(std::vector<Key>& table) {
  table.push_back(
      named_also(path_key("checkpoint.dir", SPIPE_FIELD(checkpoint.dir), "The run folder: checkpoints, logs, lock."),
                 {"output_dir", "out_dir", "save_dir"}));
  table.push_back(named_also(
      integer("checkpoint.every", SPIPE_FIELD(checkpoint.every), at_least(0), "Steps between checkpoints; 0: only at the end."),
      {"save_every", "save_steps", "save_interval"}));
  table.push_back(named_also(
      integer("checkpoint.keep", SPIPE_FIELD(checkpoint.keep), between(1, kIntMax), "Newest checkpoints that are kept."),
      {"save_total_limit"}));
  table.push_back(named_also(integer("log.every", SPIPE_FIELD(log.every), at_least(1), "Steps between lines of progress."),
                             {"log_interval", "logging_steps", "log_every"}));
  table.push_back(boolean("log.jsonl", SPIPE_FIELD(log.jsonl),
                          "Write metrics.jsonl into the run folder: a line every log.every steps and for every evaluation."));
  table.push_back(
      boolean("log.unit_norms", SPIPE_FIELD(log.unit_norms), "Write the gradient norm of every unit into metrics.jsonl."));
  table.push_back(boolean("log.trace", SPIPE_FIELD(log.trace), "Write a Chrome trace of the tasks into the run folder."));
  table.push_back(named_also(texts("log.samples", SPIPE_FIELD(log.samples),
                                   "Prompts that the model goes on with every train.eval_every steps and at the end: printed, "
                                   "and written into samples.jsonl of the run folder. Needs data of the byte tokenizer."),
                             {"sample_prompts", "prompts"}));
  table.push_back(integer("log.sample_tokens", SPIPE_FIELD(log.sample_tokens), between(1, 65536), "Most tokens of a sample."));
  table.push_back(number("log.sample_temperature", SPIPE_FIELD(log.sample_temperature), between(0, 100),
                         "Temperature of samples (top-p is 0.95); 0: always the likeliest token."));
  table.push_back(planned_key("log.tensorboard", "false", "use log.jsonl", "Write TensorBoard event files."));
}

std::vector<Key> make_table() {
  std::vector<Key> table;
  add_model_and_data(table);
  add_batch_and_train(table);
  add_loss_scale(table);
  add_spikes(table);
  add_optimizer(table);
  add_parallel_and_device(table);
  add_checkpoint_and_log(table);
  const Config defaults;
  for (Key& one : table) one.info.default_value = one.write(defaults);
  for (const char* required : {"model.config", "model.hf", "data.train", "train.steps"}) {
    std::ranges::find(table, required, [](const Key& one) { return one.info.path; })->info.default_value.clear();
  }
  return table;
}

}  // namespace

std::string_view Key::section() const { return std::string_view(info.path).substr(0, info.path.rfind('.')); }

std::string_view Key::last_name() const { return std::string_view(info.path).substr(info.path.rfind('.') + 1); }

const std::vector<Key>& keys() {
  static const std::vector<Key> table = make_table();
  return table;
}

const Key* find_key(std::string_view path) {
  const auto found = std::ranges::find(keys(), path, [](const Key& one) { return std::string_view(one.info.path); });
  return found == keys().end() ? nullptr : &*found;
}

bool is_section(std::string_view path) {
  return std::ranges::any_of(keys(), [&](const Key& one) {
    return one.info.path.size() > path.size() && one.info.path.starts_with(path) && one.info.path[path.size()] == '.';
  });
}

std::vector<std::string> names_in(std::string_view section) {
  std::vector<std::string> names;
  const std::string prefix = section.empty() ? "" : std::string(section) + ".";
  for (const Key& one : keys()) {
    if (!one.info.path.starts_with(prefix)) continue;
    const std::string rest = one.info.path.substr(prefix.size());
    const std::string name = rest.substr(0, rest.find('.'));
    if (names.empty() || names.back() != name) names.push_back(name);
  }
  return names;
}

const std::vector<KeyInfo>& schema() {
  static const std::vector<KeyInfo> infos = [] {
    std::vector<KeyInfo> made;
    for (const Key& one : keys()) made.push_back(one.info);
    return made;
  }();
  return infos;
}

}  // namespace spipe::config
