#include "plan_hardware.h"

#include <fmt/core.h>

#include <algorithm>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/base/units.h"
#include "spipe/exec/run_setup.h"
#include "spipe/plan/search.h"
#include "spipe/plan/timeline.h"
#include "spipe/report/report.h"
#include "spipe/store/store.h"
#include "startup_tables.h"

namespace spipe::tools {

namespace {

plan::Hardware hardware_of(const HardwareFlags& flags) {
  plan::Hardware hardware = plan::load_hardware(flags.hardware);
  if (flags.hosts > 0) hardware.hosts = flags.hosts;
  return hardware;
}

void check_schedule_name(const std::string& name) {
  const auto& names = plan::schedule_names();
  if (name == "auto" || std::find(names.begin(), names.end(), name) != names.end()) return;
  const std::string nearest = nearest_word(name, names);
  throw Error(fmt::format("unknown schedule '{}'", name), "--schedule",
              nearest.empty() ? "auto, spipe, mobius, 1f1b, gpipe, roundpipe or streaming-dp"
                              : fmt::format("did you mean '{}'?", nearest));
}

// Of the trials that only lack memory, the one that needs least of a device says why; else a schedule's rule.
[[noreturn]] void refuse(const std::vector<plan::Trial>& trials, const std::string& hardware) {
  const plan::Trial* nearest = nullptr;
  for (const plan::Trial& trial : trials) {
    if (trial.device_bytes == 0) continue;
    if (nearest == nullptr || trial.device_bytes < nearest->device_bytes) nearest = &trial;
  }
  if (nearest == nullptr) {
    throw Error(fmt::format("no schedule can run this, of {} tried: {}", trials.size(), trials.front().refused), hardware,
                "change the schedule, the stages, the replicas or batch.sum_groups");
  }
  throw Error(fmt::format("no schedule fits, of {} tried: {} {}", trials.size(), nearest->schedule, nearest->refused), hardware,
              "use more ranks or hosts (--hosts), more memory, or a smaller batch.micro or model");
}

}  // namespace

void plan_on_hardware(const config::Config& config, const HardwareFlags& flags) {
  check_schedule_name(flags.schedule);
  plan::Hardware hardware = hardware_of(flags);
  // A budget of the config counts where it is the smaller one.
  if (const auto& budget = config.device.memory) {
    hardware.memory_bytes = hardware.memory_bytes == 0 ? *budget : std::min(hardware.memory_bytes, *budget);
  }
  std::string source;
  const model::Architecture architecture = exec::load_architecture(config, &source);
  model::check_architecture(architecture, source);
  DType compute = DType::bf16;  // auto: as on a GPU
  if (config.train.precision == config::Precision::fp32) compute = DType::f32;
  if (config.train.precision == config::Precision::fp16) compute = DType::f16;
  model::BatchShape batch{config.batch.micro, config.data.seq_len, config.train.head_chunk};
  if (batch.head_chunk == 0) batch.head_chunk = model::default_head_chunk(architecture, batch.micro * batch.seq_len);
  const model::ModelShape shape = model::make_shape(architecture, batch, compute);
  const store::StoreFormat format = exec::store_format_of(config, compute);

  plan::SearchRequest request;
  request.store_bytes = store::make_store_layout(shape, format).bytes;
  request.input.shape = &shape;
  request.input.compute_dtype_size = dtype_size(format.compute);
  request.input.grad_dtype_size = dtype_size(format.grad);
  request.input.state_bytes_per_element = format.state_bytes_per_parameter();
  request.input.separate_master = format.separate_master;
  hardware.scale_updates(request.input.update_bytes().of_plain());
  request.hardware = hardware;
  request.input.ranks = hardware.ranks();
  request.input.replicas = flags.replicas;
  for (int rank = 0; rank < hardware.ranks(); ++rank) request.input.host_of_rank.push_back(rank / hardware.ranks_per_host);
  request.input.micro_batches = static_cast<int>(config.batch.global / config.batch.micro);
  request.input.sum_groups = static_cast<int>(config.batch.sum_groups);
  if (flags.schedule != "auto") request.schedules = {flags.schedule};
  if (flags.forward_stages > 0) request.forward_stages = flags.forward_stages;
  if (flags.backward_stages > 0) request.backward_stages = flags.backward_stages;

  const std::vector<plan::Trial> trials = plan::search_schedules(request);
  fmt::print("{}: {} hosts x {} ranks; {} parameters, {} micro-batches of {} x {} tokens\n", hardware.name, hardware.hosts,
             hardware.ranks_per_host, format_count(static_cast<double>(shape.parameters())), request.input.micro_batches,
             config.batch.micro, config.data.seq_len);
  if (!trials.front().refused.empty()) refuse(trials, flags.hardware);  // at least one is always tried
  const auto refused = std::count_if(trials.begin(), trials.end(), [](const plan::Trial& t) { return !t.refused.empty(); });
  fmt::print("{}{} more fit, {} were refused\n", trial_table(trials),
             trials.size() - static_cast<std::size_t>(refused) -
                 std::min(trials.size() - static_cast<std::size_t>(refused), kRunnersUp + 1),
             refused);
  const plan::Trial& best = trials.front();
  const plan::Plan plan = plan::make_schedule(best.schedule, best.input);
  const plan::Simulation simulation = plan::simulate(plan, shape, hardware);
  fmt::print("\n{}\n{}", plan::summary(plan), plan::simulation_summary(plan, simulation));
  const auto slices = plan::slices_of(plan, simulation);
  if (!flags.timeline.empty()) {
    plan::TimelineText text;
    text.title = fmt::format("{} on {}", best.schedule, hardware.name);
    text.summary = plan::simulation_summary(plan, simulation);
    write_text_atomic(flags.timeline, plan::timeline_html(slices, text));
    fmt::print("timeline: {}\n", flags.timeline);
  }
  if (!flags.trace.empty()) {
    write_text_atomic(flags.trace, plan::chrome_trace(slices));
    fmt::print("trace: {}\n", flags.trace);
  }
}

}  // namespace spipe::tools
