// What a configuration asks of the planner about updates.
#pragma once

#include <vector>

#include "spipe/exec/run_setup.h"

namespace spipe::exec {

// Ways to update the units, the wanted one first, then those that take less memory; a fit takes the first that fits.
[[nodiscard]] std::vector<plan::UpdateSplit> wanted_splits(const config::OptimizerConfig& optimizer);
// What of that the planner may change by simulating; nothing where `simulates` is false, because rates are not those of devices
// that work beside the host's cores.
[[nodiscard]] plan::SplitSpace split_space(const config::OptimizerConfig& optimizer, bool simulates);
// Whether no update may start before its step's norm, nor the next step before all updates.
[[nodiscard]] bool waits_for_updates(const config::OptimizerConfig& optimizer);
// Per store unit: bytes of a second slot.
[[nodiscard]] std::vector<std::uint64_t> shadow_bytes_of_units(const RunSetup& setup);
// The store of this host, with second slots where the plan needs them.
[[nodiscard]] store::StoreLayout layout_of(const RunSetup& setup);

}  // namespace spipe::exec
