#include "run_fit.h"

#include <fmt/core.h>

#include <algorithm>
#include <numeric>

#include "samples.h"
#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/base/host.h"
#include "spipe/exec/executor.h"
#include "spipe/plan/fit_ranks.h"
#include "spipe/plan/verifier.h"
#include "update_request.h"

namespace spipe::exec {

namespace {

constexpr double kUnmeasuredFlops = 1e11, kUnmeasuredLink = 1e10, kUnmeasuredUpdate = 5e8;
constexpr double kUnmeasuredNetwork = 1.25e9;  // 10 Gbit/s

std::optional<bool> as_optional(config::Switch value) {
  if (value == config::Switch::automatic) return std::nullopt;
  return value == config::Switch::on;
}

std::optional<int> as_optional(const std::optional<std::int64_t>& value) {
  if (!value) return std::nullopt;
  return narrow<int>(*value);
}

double known(double rate, double otherwise) { return rate > 0 ? rate : otherwise; }

// What was measured on one rank, as a machine of such ranks; or the machine that the ranks are paced to.
plan::Hardware machine_of(const RunSetup& setup, const device::DeviceRates& rates) {
  if (!setup.config.device.pace.empty()) {
    plan::Hardware paced = plan::load_hardware(setup.config.device.pace);
    paced.hosts = setup.job.hosts();
    return paced;
  }
  plan::Hardware hardware;
  hardware.name = "measured";
  hardware.hosts = setup.job.hosts();
  hardware.ranks_per_host = setup.job.ranks_of_host(0);
  hardware.matmul_flops = known(rates.matmul_flops, kUnmeasuredFlops);
  hardware.h2d_bytes_per_s = known(rates.h2d_bytes, kUnmeasuredLink);
  hardware.d2h_bytes_per_s = known(rates.d2h_bytes, kUnmeasuredLink);
  hardware.update_params_per_s_rank = known(rates.adam_parameters, kUnmeasuredUpdate);
  hardware.update_params_per_s = hardware.update_params_per_s_rank * hardware.ranks_per_host;
  // Ranks that share processors compute at their share of the rate, which was measured while the others waited.
  const auto& threads = setup.job.threads_of_rank;
  if (!threads.empty()) {
    const double wanted = std::accumulate(threads.begin(), threads.end(), 0.0) / setup.job.hosts();
    const double share = std::max(1.0, wanted / usable_cpus());
    hardware.matmul_flops /= share;
    hardware.update_params_per_s_rank /= share;
    hardware.update_params_per_s /= share;
  }
  if (setup.job.hosts() > 1) hardware.network_bytes_per_s = kUnmeasuredNetwork;
  return hardware;
}

plan::Hardware hardware_of(const RunSetup& setup, const device::DeviceRates& rates) {
  plan::Hardware hardware = machine_of(setup, rates);
  hardware.scale_updates(setup.schedule_input().update_bytes().of_plain());
  return hardware;
}

// On a CPU device updates and passes share cores, which the simulator's machine does not have: nothing is gained by moving
// updates about. A paced one is a machine of its own.
bool simulates(const config::Config& config, bool arena_on_host) { return !arena_on_host || !config.device.pace.empty(); }

void verify_or_fail(const plan::Plan& plan, const model::ModelShape& shape, const plan::Limits& limits) {
  if (const auto violation = plan::verify(plan, shape, limits)) {
    throw InternalError("verified plan", violation->message, __FILE__, __LINE__);
  }
}

}  // namespace

void fit_one_rank(RunSetup& setup, const device::DeviceRates& rates, bool arena_on_host) {
  const config::Config& config = setup.config;
  setup.layout = store::make_store_layout(setup.shape, setup.format);
  plan::FitRequest request;
  request.input = setup.schedule_input();
  request.micro_batches = setup.micro_batches;
  request.sum_groups = narrow<int>(config.batch.sum_groups);
  request.device_bytes = config.device.memory.value_or(0);
  request.host_bytes = setup.host_limit;
  request.store_bytes = setup.layout.bytes;
  request.splits = wanted_splits(config.optimizer);
  request.split_space = split_space(config.optimizer, simulates(config, arena_on_host));
  request.shadow_bytes_of_unit = shadow_bytes_of_units(setup);
  request.piece_elements = plan::default_piece_elements(setup.shape);
  request.barrier_between_steps = setup.job.barrier_between_steps;
  request.arena_on_host = arena_on_host;
  request.recompute = as_optional(config.train.recompute);
  request.park = as_optional(config.train.park);
  request.forward_stages = as_optional(config.parallel.forward_stages);
  request.backward_stages = as_optional(config.parallel.backward_stages);
  request.evaluation = !config.data.eval.empty();
  request.matmul_flops = known(rates.matmul_flops, request.matmul_flops);
  request.link_bytes = known(rates.h2d_bytes, request.link_bytes);
  setup.hardware = hardware_of(setup, rates);
  request.hardware = setup.hardware;
  const auto with_saves = [&request](const plan::Plan& train) {
    plan::ScheduleOptions options = train.options;
    options.save = true;
    return plan::schedule_streaming(request.input, options);
  };
  request.extra_host_bytes = [&](const plan::Plan& plan) {
    const std::uint64_t own = executor_host_bytes(plan, setup.shape);
    if (plan.options.evaluate) return own;
    return own + executor_host_bytes(with_saves(plan), setup.shape) + optim::NormTable::bytes(setup.shape) +
           sampling_bytes(setup, 0);
  };
  setup.fit = plan::fit(request);
  setup.train_and_save = with_saves(setup.fit.train);
  setup.layout = layout_of(setup);
  setup.fit.arena_bytes = std::max(setup.fit.arena_bytes, setup.train_and_save.arena_bytes);

  plan::Limits limits;
  limits.store_bytes = {setup.layout.bytes};
  if (request.device_bytes != 0) limits.device_bytes = request.device_bytes;
  limits.host_bytes = request.host_bytes;
  verify_or_fail(setup.fit.train, setup.shape, limits);
  verify_or_fail(setup.train_and_save, setup.shape, limits);
  if (setup.fit.evaluate) verify_or_fail(*setup.fit.evaluate, setup.shape, limits);

  setup.parking_bytes = std::max(setup.fit.train.parking_bytes, setup.train_and_save.parking_bytes);  // one area for all plans
  if (setup.fit.evaluate) setup.parking_bytes = std::max(setup.parking_bytes, setup.fit.evaluate->parking_bytes);
  setup.host.arena = arena_on_host ? setup.fit.arena_bytes + setup.fit.train.resident_bytes : 0;
}

void fit_pipeline(RunSetup& setup, const device::DeviceRates& rates, bool arena_on_host) {
  const config::Config& config = setup.config;
  if (config.train.recompute == config::Switch::off) {
    throw Error("train.recompute false is not possible on several ranks: backward stages recompute from boundaries",
                config.file.string(), "leave it out");
  }
  plan::RankFitRequest request;
  request.input.shape = &setup.shape;
  request.input.compute_dtype_size = dtype_size(setup.format.compute);
  request.input.grad_dtype_size = dtype_size(setup.format.grad);
  request.input.state_bytes_per_element = setup.format.state_bytes_per_parameter();
  request.input.ranks = setup.job.ranks();
  request.input.replicas = narrow<int>(config.parallel.data);
  request.input.host_of_rank = setup.job.host_of_rank;
  request.input.micro_batches = setup.micro_batches;
  request.input.sum_groups = narrow<int>(config.batch.sum_groups);
  request.input.barrier_between_steps = setup.job.barrier_between_steps;
  request.input.separate_master = setup.format.separate_master;
  request.input.piece_elements = plan::default_piece_elements(setup.shape);
  request.splits = wanted_splits(config.optimizer);
  request.split_space = split_space(config.optimizer, simulates(config, arena_on_host));
  request.shadow_bytes_of_unit = shadow_bytes_of_units(setup);
  setup.hardware = hardware_of(setup, rates);
  request.hardware = setup.hardware;
  request.schedule = config.parallel.schedule;
  request.forward_stages = as_optional(config.parallel.forward_stages);
  request.backward_stages = as_optional(config.parallel.backward_stages);
  request.park = as_optional(config.train.park);
  request.device_bytes = config.device.memory.value_or(0);
  request.host_bytes = setup.host_limit;
  for (const model::StoreUnit& unit : setup.shape.store_units) {
    request.store_bytes_of_unit.push_back(store::unit_state_bytes(unit, setup.format));
  }
  request.arena_on_host = arena_on_host;
  request.evaluation = !config.data.eval.empty();
  request.extra_host_bytes = [&setup](const plan::Plan& plan, int host) {
    const bool trains = !plan.options.evaluate && !plan.options.save;
    return executor_host_bytes(plan, setup.shape, host) +
           (trains ? optim::NormTable::bytes(setup.shape) + sampling_bytes(setup, host) : 0);
  };
  request.choice = setup.job.choice;
  plan::RankFit found = plan::fit_ranks(request);

  setup.fit.split = found.split;
  setup.fit.train = std::move(found.train);
  setup.fit.evaluate = std::move(found.evaluate);
  setup.fit.reason = std::move(found.reason);
  setup.fit.arena_bytes = found.arena_bytes;
  setup.train_and_save = std::move(found.train_and_save);
  setup.trials = std::move(found.trials);
  setup.parking_bytes = found.parking_bytes;
  setup.layout = layout_of(setup);
  const auto ranks = static_cast<std::uint64_t>(setup.job.ranks_of_host(setup.job.host()));
  setup.host.arena = arena_on_host ? checked_mul(found.arena_bytes + setup.fit.train.resident_bytes, ranks) : 0;
}

}  // namespace spipe::exec
