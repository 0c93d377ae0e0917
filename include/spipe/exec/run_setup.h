// Everything that is decided before a run touches memory: model, shapes, plans, memory totals and the numerics block. Pure
// apart from reading the model's config, so that `spipe plan` and `--dry-run` show exactly what a run would do.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spipe/config/config.h"
#include "spipe/device/device.h"
#include "spipe/model/shape.h"
#include "spipe/optim/optim.h"
#include "spipe/plan/fit.h"
#include "spipe/store/store.h"

namespace spipe::exec {

// Host bytes of a run by purpose; `total` is what the start-up table promises (beside the program's own code and libraries).
struct HostBytes {
  std::uint64_t store = 0, arena = 0, parking = 0, staging = 0, total = 0;
};

struct RunSetup {
  config::Config config;
  model::Architecture architecture;
  std::string architecture_source;  // the file it came from
  model::ModelShape shape;
  store::StoreFormat format;
  store::StoreLayout layout;
  int micro_batches = 1;
  plan::ScheduleInput schedule_input() const;
  plan::FitResult fit;
  plan::Plan train_and_save;  // the training plan with save tasks
  HostBytes host;
  std::uint64_t host_limit = 0;
  std::string host_limit_source;
  optim::LrSchedule lr;
  optim::AdamW hyper;
  config::NumericsBlock numerics;
  [[nodiscard]] std::uint64_t arena_bytes() const { return fit.arena_bytes; }
};

// Reads the architecture a config names. Throws Error for missing or contradictory model keys.
[[nodiscard]] model::Architecture load_architecture(const config::Config& config, std::string* source);

// `info` and `rates` describe the device (rates only choose between plans that give the same bits). Every plan is verified.
// Throws Error (exit code 2) when a budget is too small, naming the smallest that works.
[[nodiscard]] RunSetup prepare_run(const config::Config& config, const device::DeviceInfo& info,
                                   const device::DeviceRates& rates);

}  // namespace spipe::exec
