// Inside of prepare_run: from shapes and budgets to plans, and the numerics block.
#pragma once

#include "spipe/exec/run_setup.h"

namespace spipe::exec {

// Both fill the plans, the store's layout, the arena and the parking area of a setup whose shape, job and host limit are known.
void fit_one_rank(RunSetup& setup, const device::DeviceRates& rates, bool arena_on_host);
void fit_pipeline(RunSetup& setup, const device::DeviceRates& rates, bool arena_on_host);

[[nodiscard]] config::NumericsBlock make_numerics(const RunSetup& setup, const device::DeviceInfo& info);

}  // namespace spipe::exec
