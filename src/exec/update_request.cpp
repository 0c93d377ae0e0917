#include "update_request.h"

#include <algorithm>

namespace spipe::exec {

namespace {

constexpr double kLess[] = {1, 0.75, 0.5, 0.25, 0};  // of what was wanted

}  // namespace

bool waits_for_updates(const config::OptimizerConfig& optimizer) { return optimizer.policy == "sync"; }

std::vector<plan::UpdateSplit> wanted_splits(const config::OptimizerConfig& optimizer) {
  const double speculate = optimizer.policy == "overlap" ? 1 : optimizer.policy == "hybrid" ? optimizer.speculate : 0;
  const bool on_device = optimizer.placement == "device", resident = optimizer.placement == "resident";
  std::vector<plan::UpdateSplit> splits;
  for (const double stays : kLess) {
    if (!resident && stays < 1) break;
    for (const double part : kLess) {
      const plan::UpdateSplit split{
          .speculate = speculate * part, .device = on_device ? 1.0 : 0.0, .resident = resident ? stays : 0.0};
      if (std::find(splits.begin(), splits.end(), split) == splits.end()) splits.push_back(split);
    }
  }
  return splits;
}

plan::SplitSpace split_space(const config::OptimizerConfig& optimizer, bool simulates) {
  const bool places = simulates && optimizer.placement == "auto";
  return {.speculate = simulates && optimizer.policy == "auto", .device = places, .resident = places};
}

std::vector<std::uint64_t> shadow_bytes_of_units(const RunSetup& setup) {
  std::vector<std::uint64_t> bytes;
  for (const model::StoreUnit& unit : setup.shape.store_units) bytes.push_back(store::unit_shadow_bytes(unit, setup.format));
  return bytes;
}

store::StoreLayout layout_of(const RunSetup& setup) {
  std::vector<bool> here, second_slots;
  const std::vector<int> hosts = setup.host_of_unit();
  for (std::size_t s = 0; s < hosts.size(); ++s) {
    here.push_back(!setup.pipeline() || hosts[s] == setup.job.host());
    second_slots.push_back(setup.fit.train.options.way(static_cast<int>(s)).slots() == 2);
  }
  return store::make_store_layout(setup.shape, setup.format, here, second_slots);
}

}  // namespace spipe::exec
