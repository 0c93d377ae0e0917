#include "spipe/exec/run_setup.h"

#include <fmt/core.h>

#include <algorithm>

#include "run_fit.h"
#include "samples.h"
#include "spipe/base/checked.h"
#include "spipe/base/host.h"
#include "spipe/base/units.h"
#include "spipe/config/yaml_json.h"
#include "spipe/exec/executor.h"
#include "spipe/model/families.h"
#include "update_request.h"

namespace spipe::exec {

namespace {

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

DType compute_dtype(config::Precision precision) {
  if (precision == config::Precision::bf16) return DType::bf16;
  return precision == config::Precision::fp16 ? DType::f16 : DType::f32;
}

optim::LossScaling make_loss_scaling(const config::Config& config) {
  const config::LossScaleConfig& c = config.train.loss_scale;
  optim::LossScaling scaling;
  scaling.dynamic = c.dynamic || (!c.fixed && config.train.precision == config::Precision::fp16);
  scaling.initial = scaling.dynamic ? c.initial : c.fixed.value_or(1);
  scaling.growth = c.growth;
  scaling.backoff = c.backoff;
  scaling.minimum = c.minimum;
  scaling.maximum = c.maximum;
  scaling.window = c.window;
  scaling.hysteresis = c.hysteresis;
  return scaling;
}

UpdateRule rule_of(const config::Config& config) {
  return optim::rule_from_name(config.optimizer.type, config.optimizer.nesterov);
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

// What plans may use of a host: the configured or measured limit.
void set_host_limit(RunSetup& setup) {
  const HostMemory memory = host_memory();
  setup.host_limit = setup.job.host_memory.value_or(memory.available);
  setup.host_limit_source = setup.job.host_memory ? setup.job.host_memory_source : memory.bound;
  if (setup.config.device.host_memory && *setup.config.device.host_memory < setup.host_limit) {
    setup.host_limit = *setup.config.device.host_memory;
    setup.host_limit_source = "device.host_memory";
  }
}

// The job as given, or the one that the config asks for, all on one host.
Job job_of(const config::Config& config, const std::optional<Job>& given) {
  const std::int64_t data = config.parallel.data;
  const std::optional<std::int64_t> wanted =
      config.parallel.pipeline ? std::optional(checked_mul(*config.parallel.pipeline, data)) : std::nullopt;
  if (!given) {
    Job job;
    job.host_of_rank.assign(static_cast<std::size_t>(wanted.value_or(data)), 0);
    return job;
  }
  const std::string where = config.file.string();
  if (wanted && *wanted != given->ranks()) {
    throw Error(fmt::format("parallel.pipeline {} x parallel.data {} is {} ranks, but the job has {}",
                            *config.parallel.pipeline, data, *wanted, given->ranks()),
                where, fmt::format("start it with scripts/launch.sh {} {}, or set parallel.pipeline: auto", *wanted, where));
  }
  if (given->ranks() % data != 0) {
    throw Error(fmt::format("{} ranks cannot be divided into parallel.data {} equal pipelines", given->ranks(), data), where,
                fmt::format("start a multiple of {} ranks: scripts/launch.sh {} {}", data, data, where));
  }
  return *given;
}

void check_pace(const RunSetup& setup) {
  const config::DeviceConfig& device = setup.config.device;
  if (device.pace.empty()) return;
  if (device.pace_slow_rank && *device.pace_slow_rank >= setup.job.ranks()) {
    throw Error(fmt::format("device.pace_slow_rank is {}, but the job's ranks are 0 to {}", *device.pace_slow_rank,
                            setup.job.ranks() - 1),
                setup.config.file.string());
  }
}

void sum_host_bytes(RunSetup& setup) {
  const auto ranks = static_cast<std::uint64_t>(setup.job.ranks_of_host(setup.job.host()));
  setup.host.store = setup.layout.bytes;
  setup.host.parking = setup.parking_bytes * ranks;
  std::vector<const plan::Plan*> plans = {&setup.fit.train, &setup.train_and_save};
  if (setup.fit.evaluate) plans.push_back(&*setup.fit.evaluate);
  for (const plan::Plan* plan : plans) {
    setup.host.staging += executor_host_bytes(*plan, setup.shape, setup.job.host());
    if (plan->mailbox_bytes.empty()) continue;
    setup.host.mailboxes = std::max(setup.host.mailboxes, plan->mailbox_bytes[static_cast<std::size_t>(setup.job.host())]);
  }
  setup.host.staging += optim::NormTable::bytes(setup.shape) + sampling_bytes(setup, setup.job.host());
  setup.host.total = setup.host.store + setup.host.arena + setup.host.parking + setup.host.mailboxes + setup.host.staging;
  if (setup.host.total > setup.host_limit) {
    throw Error(fmt::format("the run needs {} ({} B) of host memory, the limit is {} ({})", format_bytes(setup.host.total),
                            setup.host.total, format_bytes(setup.host_limit), setup.host_limit_source),
                setup.config.file.string(), "use a smaller model, batch.global or device.memory, or a host with more memory");
  }
}

}  // namespace

int Job::hosts() const { return *std::max_element(host_of_rank.begin(), host_of_rank.end()) + 1; }

int Job::ranks_of_host(int of_host) const {
  return static_cast<int>(std::count(host_of_rank.begin(), host_of_rank.end(), of_host));
}

std::vector<int> RunSetup::host_of_unit() const {
  std::vector<int> hosts(shape.store_units.size(), 0);
  for (std::size_t s = 0; s < hosts.size(); ++s) {
    if (shape.store_units[s].elements == 0) {
      hosts[s] = -1;
    } else if (!fit.train.home_of_unit.empty()) {
      hosts[s] = job.host_of_rank[static_cast<std::size_t>(fit.train.home_of_unit[s])];
    }
  }
  return hosts;
}

plan::ScheduleInput RunSetup::schedule_input() const {
  plan::ScheduleInput input;
  input.shape = &shape;
  input.compute_dtype_size = dtype_size(format.compute);
  input.grad_dtype_size = dtype_size(format.grad);
  input.state_bytes_per_element = format.state_bytes_per_parameter();
  input.separate_master = format.separate_master;
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

store::StoreFormat store_format_of(const config::Config& config, DType compute) {
  const config::OptimizerConfig& o = config.optimizer;
  return optim::format_for(rule_of(config), compute, dtype_from_name(o.moments), o.master == "split");
}

RunSetup prepare_run(const config::Config& config, const device::DeviceInfo& info, const device::DeviceRates& rates,
                     const std::optional<Job>& job) {
  RunSetup setup;
  setup.config = config;
  setup.job = job_of(config, job);
  setup.architecture = load_architecture(config, &setup.architecture_source);
  setup.architecture.init = config.model.initialization == "fan_in" ? model::InitKind::fan_in : model::InitKind::family;
  setup.architecture.dropout_embedding = config.model.dropout;
  setup.architecture.dropout_attention_out = config.model.dropout;
  setup.architecture.dropout_mlp_out = config.model.dropout;
  model::check_architecture(setup.architecture, setup.architecture_source);
  model::check_sequence_length(setup.architecture, config.data.seq_len, config.file.string());

  const DType compute = compute_dtype(config.train.precision);
  model::BatchShape batch{config.batch.micro, config.data.seq_len, config.train.head_chunk};
  if (batch.head_chunk == 0) {
    batch.head_chunk = model::default_head_chunk(setup.architecture, config.batch.micro * config.data.seq_len);
  }
  setup.shape = model::make_shape(setup.architecture, batch, compute);
  std::vector<optim::ParameterGroup> groups;
  for (const config::ParameterGroupConfig& g : config.optimizer.groups) {
    groups.push_back({g.pattern, g.weight_decay, g.lr_scale, g.frozen});
  }
  optim::assign_groups(setup.shape, groups, config.file.string());
  setup.format = store_format_of(config, compute);
  setup.layout = store::make_store_layout(setup.shape, setup.format);
  setup.micro_batches = narrow<int>(config.batch.global / config.batch.micro);
  check_plan_size(setup);
  setup.lr = make_lr(config);
  setup.hyper = {config.optimizer.beta1, config.optimizer.beta2,   config.optimizer.eps, config.optimizer.weight_decay, groups,
                 rule_of(config),        config.optimizer.momentum};
  setup.loss_scaling = make_loss_scaling(config);
  setup.spikes = {config.train.skip_spikes, config.train.spike_window, config.train.spike_warmup};
  setup.numerics = make_numerics(setup, info);

  setup.job.barrier_between_steps = setup.job.barrier_between_steps || waits_for_updates(config.optimizer);

  check_pace(setup);
  check_sampling(setup);
  set_host_limit(setup);
  const bool arena_on_host = info.backend == "cpu";
  const std::string& schedule = config.parallel.schedule;
  if (schedule == "streaming" && setup.job.ranks() > 1) {
    throw Error(fmt::format("parallel.schedule streaming runs on one rank, this job has {}", setup.job.ranks()),
                config.file.string(), "use streaming-dp (every rank streams every unit for its own micro-batches), or auto");
  }
  if (setup.job.ranks() == 1 && (schedule == "auto" || schedule == "streaming")) {
    fit_one_rank(setup, rates, arena_on_host);
  } else {
    fit_pipeline(setup, rates, arena_on_host);
  }
  sum_host_bytes(setup);
  return setup;
}

}  // namespace spipe::exec
