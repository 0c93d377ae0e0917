// run.json from what a run was set up with.
#pragma once

#include "spipe/device/device.h"
#include "spipe/exec/run_setup.h"
#include "spipe/report/run_facts.h"

namespace spipe::tools {

[[nodiscard]] report::RunFacts run_facts(const exec::RunSetup& setup, const device::DeviceInfo& info,
                                         const device::DeviceRates& rates, std::uint64_t resume_step);

}  // namespace spipe::tools
