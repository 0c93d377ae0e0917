// Everything that is decided before a run touches memory: model, shapes, plans, memory totals and the numerics block. Pure
// apart from reading the model's config, so that `spipe plan` and `--dry-run` show exactly what a run would do.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "spipe/config/config.h"
#include "spipe/device/device.h"
#include "spipe/model/shape.h"
#include "spipe/optim/loss_scaling.h"
#include "spipe/optim/optim.h"
#include "spipe/optim/spikes.h"
#include "spipe/plan/fit.h"
#include "spipe/plan/fit_ranks.h"
#include "spipe/plan/hardware.h"
#include "spipe/plan/search.h"
#include "spipe/store/store.h"

namespace spipe::exec {

// The ranks of a job as the planner sees them.
struct Job {
  int rank = 0;
  std::vector<int> host_of_rank = {0};
  std::vector<int> threads_of_rank;  // compute threads; empty: not known
  // What the host with the least can give its ranks, where it was agreed on beforehand; empty: what this host has.
  std::optional<std::uint64_t> host_memory;
  std::string host_memory_source;
  std::optional<plan::RankChoice> choice;  // what the first rank has found; empty: searched for
  // All ranks end a step before the next begins: policy sync, and measurements of published methods.
  bool barrier_between_steps = false;
  [[nodiscard]] int ranks() const { return static_cast<int>(host_of_rank.size()); }
  [[nodiscard]] int hosts() const;
  [[nodiscard]] int host() const { return host_of_rank[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] int ranks_of_host(int host) const;
};

// Host bytes of a run by purpose, of one host with all its ranks; `total` is what the start-up table promises (beside the
// program's own code and libraries).
struct HostBytes {
  std::uint64_t store = 0, arena = 0, parking = 0, mailboxes = 0, staging = 0, total = 0;
};

struct RunSetup {
  config::Config config;
  Job job;
  model::Architecture architecture;
  std::string architecture_source;  // the file it came from
  model::ModelShape shape;
  store::StoreFormat format;
  store::StoreLayout layout;  // of this host
  int micro_batches = 1;
  plan::ScheduleInput schedule_input() const;
  plan::FitResult fit;
  plan::Plan train_and_save;        // the training plan with save tasks
  std::vector<plan::Trial> trials;  // of a pipeline: what was chosen, and the runners-up
  plan::Hardware hardware;          // the rates it was chosen with
  HostBytes host;                   // of this host
  std::uint64_t parking_bytes = 0;  // of a rank
  std::uint64_t host_limit = 0;
  std::string host_limit_source;
  optim::LrSchedule lr;
  optim::Hyper hyper;
  optim::LossScaling loss_scaling;
  optim::SpikeGuard spikes;
  config::NumericsBlock numerics;
  [[nodiscard]] std::uint64_t arena_bytes() const { return fit.arena_bytes; }
  // Whether the schedule is one of several ranks (also when there is only one).
  [[nodiscard]] bool pipeline() const { return !trials.empty(); }
  // Host of every store unit; -1 for units without elements.
  [[nodiscard]] std::vector<int> host_of_unit() const;
};

// Reads the architecture a config names. Throws Error for missing or contradictory model keys.
[[nodiscard]] model::Architecture load_architecture(const config::Config& config, std::string* source);

// What the store of such a run keeps.
[[nodiscard]] store::StoreFormat store_format_of(const config::Config& config, DType compute);

// `info` and `rates` describe the device (rates only choose between plans that give the same bits). Every plan is verified.
// Throws Error (exit code 2) when a budget is too small, naming the smallest that works. Without a launcher and with `job` left
// out, the ranks that the config asks for are planned for on one host.
[[nodiscard]] RunSetup prepare_run(const config::Config& config, const device::DeviceInfo& info,
                                   const device::DeviceRates& rates, const std::optional<Job>& job = std::nullopt);

}  // namespace spipe::exec
