// The rules between keys; rules of one key are in the schema table.
#include <algorithm>

#include "schema.h"
#include "spipe/base/error.h"

namespace spipe::config {
namespace {

using Place = std::function<std::string(std::string_view)>;

std::string named(std::string_view key, std::int64_t value) { return std::string(key) + " " + std::to_string(value); }

void check_model(const Config& config, const Place& place) {
  const ModelConfig& model = config.model;
  if (!model.config.empty() && !model.hf.empty()) {
    throw Error("model.config and model.hf are both given", place("model.hf"), "keep one of them");
  }
  if (model.config.empty() && model.hf.empty()) {
    throw Error("'model.config' is missing", place("model.config"), "name a model file (or a folder with 'model.hf')");
  }
  if (model.init == Init::pretrained && model.hf.empty()) {
    throw Error("model.init pretrained needs model.hf", place("model.init"), "model.config holds no parameters");
  }
}

void check_batch(const Config& config, const Place& place) {
  const BatchConfig& batch = config.batch;
  const std::int64_t rest = batch.global % batch.micro;
  if (rest != 0) {
    const std::int64_t below = batch.global - rest;
    const std::string above = std::to_string(below + batch.micro);
    throw Error(named("batch.global", batch.global) + " is not a multiple of " + named("batch.micro", batch.micro),
                place("batch.global"),
                below == 0 ? "the nearest multiple is " + above
                           : "the nearest multiples are " + std::to_string(below) + " and " + above);
  }
  const std::int64_t micro_batches = batch.global / batch.micro;
  const std::string a_step = "the " + std::to_string(micro_batches) + " micro-batches of a step (" +
                             named("batch.global", batch.global) + " / " + named("batch.micro", batch.micro) + ")";
  const std::string at_most = "use at most " + std::to_string(micro_batches);
  const std::int64_t data = config.parallel.data;
  if (data > micro_batches) {
    throw Error(named("parallel.data", data) + " is more than " + a_step, place("parallel.data"), at_most);
  }
  if (batch.sum_groups > micro_batches) {
    throw Error(named("batch.sum_groups", batch.sum_groups) + " is more than " + a_step, place("batch.sum_groups"), at_most);
  }
  if (batch.sum_groups % data != 0) {
    throw Error(named("batch.sum_groups", batch.sum_groups) + " is not a multiple of " + named("parallel.data", data),
                place("batch.sum_groups"),
                "every replica takes whole groups: use " + std::to_string(data) + " or remove batch.sum_groups");
  }
}

void check_schedule(const Config& config, const Place& place) {
  const LrScheduleConfig& schedule = config.optimizer.schedule;
  const std::int64_t steps = config.train.steps;
  const bool wsd = schedule.type.starts_with("wsd");
  if (schedule.warmup > steps) {
    throw Error(named("optimizer.schedule.warmup", schedule.warmup) + " is more than " + named("train.steps", steps),
                place("optimizer.schedule.warmup"), "use at most " + std::to_string(steps));
  }
  if (wsd && schedule.decay == 0) {
    throw Error("optimizer.schedule.type " + schedule.type + " needs optimizer.schedule.decay",
                place("optimizer.schedule.type"), "give the number of steps of the final decay, at least 1");
  }
  if (!wsd && schedule.decay > 0) {
    throw Error("optimizer.schedule.decay is only for the wsd schedules, not for " + schedule.type,
                place("optimizer.schedule.decay"), "remove it or use wsd_linear or wsd_sqrt");
  }
  if (schedule.decay > steps - schedule.warmup) {
    throw Error(named("optimizer.schedule.warmup", schedule.warmup) + " and " +
                    named("optimizer.schedule.decay", schedule.decay) + " do not fit into " + named("train.steps", steps),
                place("optimizer.schedule.decay"), "use a decay of at most " + std::to_string(steps - schedule.warmup));
  }
}

// What a rule would ignore in silence is refused; the default is nobody's wish.
void check_optimizer(const Config& config, const Place& place) {
  const OptimizerConfig& optimizer = config.optimizer;
  const OptimizerConfig defaults;
  const bool sgd = optimizer.type == "sgd", adam = optimizer.type == "adamw" || optimizer.type == "adam";
  const auto refuse = [&](const char* key, bool given, const std::string& whose) {
    if (given) {
      throw Error(std::string(key) + " is " + whose + ", and optimizer.type is " + optimizer.type, place(key), "remove it");
    }
  };
  refuse("optimizer.momentum", !sgd && optimizer.momentum != defaults.momentum, "SGD's");
  refuse("optimizer.nesterov", !sgd && optimizer.nesterov, "SGD's");
  refuse("optimizer.eps", !adam && optimizer.eps != defaults.eps, "AdamW's and Adam's");
  const bool other_betas = optimizer.beta1 != defaults.beta1 || optimizer.beta2 != defaults.beta2;
  refuse("optimizer.betas", sgd && other_betas, "not SGD's");
  if (optimizer.nesterov && optimizer.momentum == 0) {
    throw Error("optimizer.nesterov needs a momentum, and optimizer.momentum is 0", place("optimizer.nesterov"), "remove it");
  }
  if (optimizer.master == "split" && config.train.precision != Precision::bf16) {
    throw Error("optimizer.master split needs train.precision bf16, whose compute copy is the upper half",
                place("optimizer.master"), "use optimizer.master fp32, or train.precision bf16");
  }
}

void check_loss_scale(const Config& config, const Place& place) {
  const LossScaleConfig& scale = config.train.loss_scale;
  const auto refuse = [&](const char* key, double value, const std::string& finding, const std::string& hint) {
    throw Error(std::string(key) + " " + number_text(value) + " " + finding, place(key), hint);
  };
  if (scale.minimum > scale.maximum) {
    refuse("train.loss_scale_min", scale.minimum, "is more than train.loss_scale_max " + number_text(scale.maximum),
           "lower the one or raise the other");
  }
  if (scale.initial < scale.minimum || scale.initial > scale.maximum) {
    refuse("train.loss_scale_initial", scale.initial, "is not between train.loss_scale_min and train.loss_scale_max",
           "use " + number_text(scale.minimum) + ".." + number_text(scale.maximum));
  }
}

void check_spikes(const Config& config, const Place& place) {
  const TrainConfig& train = config.train;
  if (train.spike_warmup > train.spike_window) {
    throw Error(
        named("train.spike_warmup", train.spike_warmup) + " is more than " + named("train.spike_window", train.spike_window),
        place("train.spike_warmup"), "no step would ever be called a spike: use at most the window");
  }
}

void check_evaluation(const Config& config, const Place& place) {
  if (!config.data.eval.empty()) return;
  const bool samples = !config.log.samples.empty();  // they come every train.eval_every steps, with or without an evaluation
  for (const auto& [key, value] : {std::pair{"train.eval_every", samples ? 0 : config.train.eval_every},
                                   std::pair{"train.eval_batches", config.train.eval_batches}}) {
    if (value > 0)
      throw Error(std::string(key) + " is given but data.eval is not", place(key), "name held-out token files in data.eval");
  }
}

// What would be ignored in silence without a paced device.
void check_pace(const Config& config, const Place& place) {
  const DeviceConfig& device = config.device;
  for (const auto& [key, given] : {std::pair{"device.pace_jitter", device.pace_jitter > 0},
                                   std::pair{"device.pace_slow_rank", device.pace_slow_rank.has_value()},
                                   std::pair{"device.pace_slow_factor", device.pace_slow_factor != 1}}) {
    if (given && device.pace.empty())
      throw Error(std::string(key) + " is given but device.pace is not", place(key), "name a hardware file in device.pace");
  }
  if (device.pace_slow_factor != 1 && !device.pace_slow_rank) {
    throw Error("device.pace_slow_factor is given but device.pace_slow_rank is not", place("device.pace_slow_factor"),
                "say which rank is slow");
  }
  if (device.pace_slow_rank && device.pace_slow_factor == 1) {
    throw Error("device.pace_slow_rank is given but device.pace_slow_factor is 1", place("device.pace_slow_rank"),
                "say how many times slower it is");
  }
}

}  // namespace

void check_rules(const Config& config, const Place& place) {
  check_model(config, place);
  if (config.data.train.empty())
    throw Error("'data.train' is missing", place("data.train"), "name the token files to train on");
  if (config.train.steps == 0) throw Error("'train.steps' is missing", place("train.steps"), "say how many steps to train");
  check_batch(config, place);
  check_schedule(config, place);
  check_optimizer(config, place);
  check_loss_scale(config, place);
  check_spikes(config, place);
  check_evaluation(config, place);
  check_pace(config, place);
}

}  // namespace spipe::config
