// Which units speculate, and where units are updated.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "spipe/base/checked.h"
#include "spipe/plan/updates.h"

namespace spipe::plan {

namespace {

// Marks units of a list in order until they hold the fraction of its elements, each where that comes nearest.
template <typename Mark>
void take_first(const model::ModelShape& shape, const std::vector<int>& list, double fraction, const Mark& mark) {
  double all = 0, taken = 0;
  for (const int s : list) all += static_cast<double>(shape.store_units[static_cast<std::size_t>(s)].elements);
  for (const int s : list) {
    const auto own = static_cast<double>(shape.store_units[static_cast<std::size_t>(s)].elements);
    if (taken + own / 2 > fraction * all) return;
    taken += own;
    mark(s);
  }
}

// The same, spread over the list.
template <typename Mark>
void take_evenly(const model::ModelShape& shape, const std::vector<int>& list, double fraction, const Mark& mark) {
  double seen = 0, taken = 0;
  for (const int s : list) {
    const auto own = static_cast<double>(shape.store_units[static_cast<std::size_t>(s)].elements);
    seen += own;
    if (taken + own / 2 > fraction * seen) continue;
    taken += own;
    mark(s);
  }
}

}  // namespace

std::vector<UpdateWay> update_ways(const model::ModelShape& shape, const UpdateSplit& split,
                                   const std::vector<int>& home_of_unit) {
  std::vector<UpdateWay> ways(shape.store_units.size());
  const auto way = [&](int s) -> UpdateWay& { return ways[static_cast<std::size_t>(s)]; };
  std::map<int, std::vector<int>> by_home;  // in the order of first need
  std::set<int> listed;
  for (const model::ComputeUnit& unit : shape.units) {
    for (const int s : unit.store_units) {
      const auto number = static_cast<std::size_t>(s);
      if (shape.store_units[number].elements == 0 || !listed.insert(s).second) continue;
      by_home[home_of_unit.empty() ? 0 : home_of_unit[number]].push_back(s);
    }
  }
  for (const auto& [home, forward] : by_home) {
    take_first(shape, forward, split.resident, [&](int s) { way(s).placement = Placement::resident; });
    // A unit's gradient is complete after the backward of the first compute unit that uses it.
    std::vector<int> rest;
    for (auto s = forward.rbegin(); s != forward.rend(); ++s) {
      if (way(*s).placement != Placement::resident) rest.push_back(*s);
    }
    take_first(shape, rest, split.speculate, [&](int s) { way(s).speculate = true; });
    take_evenly(shape, rest, split.device, [&](int s) { way(s).placement = Placement::device; });
  }
  return ways;
}

std::string split_text(const UpdateSplit& split) {
  std::string text;
  const auto add = [&](double fraction, const char* what) {
    if (fraction <= 0) return;
    if (!text.empty()) text += ", ";
    text += fmt::format("{:.0f} % {}", 100 * fraction, what);
  };
  add(split.speculate * (1 - split.resident), "speculates");
  add(split.device * (1 - split.resident), "on the device");
  add(split.resident, "resident");
  return text;
}

std::uint64_t default_piece_elements(const model::ModelShape& shape) {
  constexpr std::uint64_t kBlock = 4096, kMost = 1U << 22;
  std::uint64_t largest = 0;
  for (const model::StoreUnit& unit : shape.store_units) largest = std::max(largest, unit.elements);
  return std::clamp(round_up(largest / 8, kBlock), kBlock, kMost);
}

}  // namespace spipe::plan
