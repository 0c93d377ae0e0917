#include "spipe/exec/run_setup.h"

#include <fmt/core.h>

#include <algorithm>
#include <span>

#include "spipe/base/checked.h"
#include "spipe/base/file.h"
#include "spipe/base/host.h"
#include "spipe/base/units.h"
#include "spipe/base/version.h"
#include "spipe/config/yaml_json.h"
#include "spipe/exec/executor.h"
#include "spipe/model/families.h"
#include "spipe/plan/verifier.h"

namespace spipe::exec {

namespace {

std::optional<bool> as_optional(config::Switch value) {
  if (value == config::Switch::automatic) return std::nullopt;
  return value == config::Switch::on;
}

std::optional<int> as_optional(const std::optional<std::int64_t>& value) {
  if (!value) return std::nullopt;
  return narrow<int>(*value);
}

void verify_or_fail(const plan::Plan& plan, const model::ModelShape& shape, const plan::Limits& limits) {
  if (const auto violation = plan::verify(plan, shape, limits)) {
    throw InternalError("verified plan", violation->message, __FILE__, __LINE__);
  }
}

optim::LrSchedule make_lr(const config::Config& config) {
  const config::OptimizerConfig& o = config.optimizer;
  optim::LrSchedule lr;
  lr.kind = optim::schedule_kind_from_name(o.schedule.type);
  lr.lr = o.lr;
  lr.final = o.schedule.final;
  lr.warmup = o.schedule.warmup;
  lr.total = config.train.steps;
  lr.decay = o.schedule.decay;
  return lr;
}

config::NumericsBlock make_numerics(const RunSetup& setup, const device::DeviceInfo& info) {
  const config::Config& c = setup.config;
  const model::Architecture& a = setup.architecture;
  config::NumericsBlock block;
  const auto add = [&block](std::string key, std::string value) {
    block.values.emplace_back(std::move(key), std::move(value));
  };
  const std::string model_text = model::hf_config_text(a, "float32");
  add("model", hash_text(hash64(std::as_bytes(std::span(model_text.data(), model_text.size())))));
  add("data.seq_len", fmt::format("{}", c.data.seq_len));
  add("data.shuffle_seed", fmt::format("{}", c.data.shuffle_seed));
  add("batch.global", fmt::format("{}", c.batch.global));
  add("batch.micro", fmt::format("{}", c.batch.micro));
  add("batch.sum_groups", fmt::format("{}", c.batch.sum_groups));
  add("dtype.compute", std::string(dtype_name(setup.shape.compute)));
  add("dtype.gradient", std::string(dtype_name(setup.format.grad)));
  add("dtype.master", "fp32");
  add("dtype.moments", std::string(dtype_name(setup.format.moment)));
  add("train.head_chunk", fmt::format("{}", setup.shape.batch.head_chunk));
  add("train.seed", fmt::format("{}", c.train.seed));
  add("train.grad_clip", fmt::format("{:.17g}", c.train.grad_clip));
  add("train.nonfinite", c.train.nonfinite);
  add("train.steps", fmt::format("{}", c.train.steps));
  add("dropout", fmt::format("{:.17g} {:.17g} {:.17g}", a.dropout_embedding, a.dropout_attention_out, a.dropout_mlp_out));
  add("optimizer.type", c.optimizer.type);
  add("optimizer.lr", fmt::format("{:.17g}", c.optimizer.lr));
  add("optimizer.betas", fmt::format("{:.17g} {:.17g}", c.optimizer.beta1, c.optimizer.beta2));
  add("optimizer.eps", fmt::format("{:.17g}", c.optimizer.eps));
  add("optimizer.weight_decay", fmt::format("{:.17g}", c.optimizer.weight_decay));
  add("optimizer.schedule", fmt::format("{} warmup {} final {:.17g} decay {}", c.optimizer.schedule.type,
                                        c.optimizer.schedule.warmup, c.optimizer.schedule.final, c.optimizer.schedule.decay));
  add("backend", info.backend);
  const auto comma = info.arithmetic.find(", ");
  add("instruction_set", info.arithmetic.substr(0, comma));
  add("libraries", comma == std::string::npos ? "" : info.arithmetic.substr(comma + 2));
  return block;
}

// A plan has a few tasks for every unit and micro-batch; beyond some millions it is not worth making.
void check_plan_size(const RunSetup& setup) {
  constexpr std::uint64_t kMostVisits = 1'000'000;
  const auto units = static_cast<std::uint64_t>(setup.shape.unit_count());
  const std::uint64_t visits = checked_mul(units, static_cast<std::uint64_t>(setup.micro_batches));
  if (visits <= kMostVisits) return;
  throw Error(fmt::format("a step of {} micro-batches through {} units is too large to plan ({} visits, at most {})",
                          setup.micro_batches, units, visits, kMostVisits),
              setup.config.file.string(), "raise batch.micro or lower batch.global");
}

// What fit() may use of the host: the configured or measured limit less what every run needs beside plans.
std::uint64_t host_limit(RunSetup& setup) {
  const HostMemory memory = host_memory();
  setup.host_limit = memory.available;
  setup.host_limit_source = memory.bound;
  if (setup.config.device.host_memory && *setup.config.device.host_memory < setup.host_limit) {
    setup.host_limit = *setup.config.device.host_memory;
    setup.host_limit_source = "device.host_memory";
  }
  return setup.host_limit;
}

}  // namespace

plan::ScheduleInput RunSetup::schedule_input() const {
  plan::ScheduleInput input;
  input.shape = &shape;
  input.compute_dtype_size = dtype_size(format.compute);
  input.grad_dtype_size = dtype_size(format.grad);
  input.state_bytes_per_element = 2 * dtype_size(format.moment) + 4;
  return input;
}

model::Architecture load_architecture(const config::Config& config, std::string* source) {
  const config::ModelConfig& m = config.model;
  if (!m.hf.empty()) {
    *source = (m.hf / "config.json").string();
    return model::architecture_from_hf(m.hf / "config.json");
  }
  *source = m.config.string();
  const std::string extension = m.config.extension().string();
  if (extension == ".yaml" || extension == ".yml") {
    return model::architecture_from_hf_text(config::yaml_to_json_text(m.config), *source);
  }
  return model::architecture_from_hf(m.config);
}

RunSetup prepare_run(const config::Config& config, const device::DeviceInfo& info, const device::DeviceRates& rates) {
  RunSetup setup;
  setup.config = config;
  setup.architecture = load_architecture(config, &setup.architecture_source);
  setup.architecture.init = config.model.initialization == "fan_in" ? model::InitKind::fan_in : model::InitKind::family;
  setup.architecture.dropout_embedding = config.model.dropout;
  setup.architecture.dropout_attention_out = config.model.dropout;
  setup.architecture.dropout_mlp_out = config.model.dropout;
  model::check_architecture(setup.architecture, setup.architecture_source);
  model::check_sequence_length(setup.architecture, config.data.seq_len, config.file.string());

  const DType compute = config.train.precision == config::Precision::bf16 ? DType::bf16 : DType::f32;
  model::BatchShape batch{config.batch.micro, config.data.seq_len, config.train.head_chunk};
  if (batch.head_chunk == 0) {
    batch.head_chunk = model::default_head_chunk(setup.architecture, config.batch.micro * config.data.seq_len);
  }
  setup.shape = model::make_shape(setup.architecture, batch, compute);
  setup.format = store::store_format(compute);
  setup.layout = store::make_store_layout(setup.shape, setup.format);
  setup.micro_batches = narrow<int>(config.batch.global / config.batch.micro);
  check_plan_size(setup);
  setup.lr = make_lr(config);
  setup.hyper = {config.optimizer.beta1, config.optimizer.beta2, config.optimizer.eps, config.optimizer.weight_decay};
  setup.numerics = make_numerics(setup, info);

  plan::FitRequest request;
  request.input = setup.schedule_input();
  request.micro_batches = setup.micro_batches;
  request.sum_groups = narrow<int>(config.batch.sum_groups);
  request.device_bytes = config.device.memory.value_or(0);
  request.host_bytes = host_limit(setup);
  request.store_bytes = setup.layout.bytes;
  request.arena_on_host = info.backend == "cpu";
  request.recompute = as_optional(config.train.recompute);
  request.park = as_optional(config.train.park);
  request.forward_stages = as_optional(config.parallel.forward_stages);
  request.backward_stages = as_optional(config.parallel.backward_stages);
  request.evaluation = !config.data.eval.empty();
  if (rates.matmul_flops > 0) request.matmul_flops = rates.matmul_flops;
  if (rates.h2d_bytes > 0) request.link_bytes = rates.h2d_bytes;
  setup.fit = plan::fit(request);

  plan::ScheduleOptions with_save = setup.fit.train.options;
  with_save.save = true;
  setup.train_and_save = plan::schedule_streaming(request.input, with_save);
  setup.fit.arena_bytes = std::max(setup.fit.arena_bytes, setup.train_and_save.arena_bytes);

  plan::Limits limits;
  limits.store_bytes = setup.layout.bytes;
  if (request.device_bytes != 0) limits.device_bytes = request.device_bytes;
  limits.host_bytes = request.host_bytes;
  verify_or_fail(setup.fit.train, setup.shape, limits);
  verify_or_fail(setup.train_and_save, setup.shape, limits);
  if (setup.fit.evaluate) verify_or_fail(*setup.fit.evaluate, setup.shape, limits);

  setup.host.store = setup.layout.bytes;
  setup.host.arena = request.arena_on_host ? setup.fit.arena_bytes : 0;
  setup.host.parking = std::max(setup.fit.train.parking_bytes, setup.train_and_save.parking_bytes);  // one area for all plans
  const auto add_staging = [&setup](const plan::Plan& p) { setup.host.staging += executor_host_bytes(p, setup.shape); };
  add_staging(setup.fit.train);
  add_staging(setup.train_and_save);
  if (setup.fit.evaluate) {
    add_staging(*setup.fit.evaluate);
    setup.host.parking = std::max(setup.host.parking, setup.fit.evaluate->parking_bytes);
  }
  setup.host.total = setup.host.store + setup.host.arena + setup.host.parking + setup.host.staging;
  if (setup.host.total > setup.host_limit) {
    throw Error(fmt::format("the run needs {} ({} B) of host memory, the limit is {} ({})", format_bytes(setup.host.total),
                            setup.host.total, format_bytes(setup.host_limit), setup.host_limit_source),
                config.file.string(), "use a smaller model, batch.global or device.memory, or a host with more memory");
  }
  return setup;
}

}  // namespace spipe::exec
