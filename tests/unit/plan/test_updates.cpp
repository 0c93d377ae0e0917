// Which units speculate, which are updated by devices, and the search for how many.
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <map>

#include "spipe/plan/hardware.h"
#include "spipe/plan/update_search.h"
#include "spipe/plan/updates.h"
#include "support.h"

namespace spipe::plan {
namespace {

using testing::small_shape;

double share(const model::ModelShape& shape, const std::vector<UpdateWay>& ways, const std::vector<int>& homes, int home,
             bool (*has)(const UpdateWay&)) {
  double all = 0, taken = 0;
  for (std::size_t s = 0; s < ways.size(); ++s) {
    if (!homes.empty() && homes[s] != home) continue;
    all += static_cast<double>(shape.store_units[s].elements);
    if (has(ways[s])) taken += static_cast<double>(shape.store_units[s].elements);
  }
  return taken / all;
}

bool speculates(const UpdateWay& way) { return way.speculate; }
bool on_device(const UpdateWay& way) { return way.placement == Placement::device; }
bool stays(const UpdateWay& way) { return way.placement == Placement::resident; }

// Counts what the search asks.
struct Asked {
  int count = 0;
  std::map<std::tuple<double, double, double>, int> times;
  void note(const UpdateSplit& split) {
    ++count;
    ++times[{split.speculate, split.device, split.resident}];
  }
};

}  // namespace

TEST_CASE("fractions of a split hold at every home") {
  const model::ModelShape shape = small_shape({.layers = 48, .vocab = 32});
  std::vector<int> homes(shape.store_units.size());
  for (std::size_t s = 0; s < homes.size(); ++s) homes[s] = static_cast<int>(s * 3 / homes.size());
  const UpdateSplit split{.speculate = 0.5, .device = 0.25, .resident = 0.25};
  const auto ways = update_ways(shape, split, homes);
  for (int home = 0; home < 3; ++home) {
    INFO("home " << home);
    // Sixteen layers live at a home.
    CHECK(std::abs(share(shape, ways, homes, home, stays) - 0.25) < 0.07);
    CHECK(std::abs(share(shape, ways, homes, home, speculates) - 0.5 * 0.75) < 0.07);
    CHECK(std::abs(share(shape, ways, homes, home, on_device) - 0.25 * 0.75) < 0.07);
  }
  // Without homes the first units of the model stay and its last ones speculate, which no home of its own would give.
  const auto flat = update_ways(shape, split);
  CHECK(share(shape, flat, homes, 0, stays) > 0.7);
  CHECK(share(shape, flat, homes, 2, stays) == 0);
  CHECK(share(shape, flat, homes, 2, speculates) > 0.9);
}

TEST_CASE("residents are never speculated nor sent to a device") {
  const model::ModelShape shape = small_shape({.layers = 6});
  for (const UpdateWay& way : update_ways(shape, {.speculate = 1, .device = 1, .resident = 0.5})) {
    CHECK_FALSE((way.placement == Placement::resident && way.speculate));
  }
  const auto all = update_ways(shape, {.resident = 1});
  for (std::size_t s = 0; s < all.size(); ++s) {
    CHECK((all[s].placement == Placement::resident) == (shape.store_units[s].elements > 0));
  }
}

TEST_CASE("pieces are blocks of 4,096 elements, an eighth of the largest unit, at most 4 Mi") {
  model::ModelShape shape;
  shape.store_units.resize(2);
  const auto piece = [&](std::uint64_t elements) {
    shape.store_units[1].elements = elements;
    return default_piece_elements(shape);
  };
  CHECK(piece(100) == 4096);
  CHECK(piece(8 * 4096) == 4096);
  CHECK(piece(8 * 4096 + 8) == 8192);
  CHECK(piece(202'000'000) == 1U << 22);
}

TEST_CASE("updates with less state move fewer bytes and run as much faster") {
  const auto bytes = [](std::uint64_t compute, std::uint64_t state, bool separate) {
    return UpdateBytes{.compute = compute, .grad = compute, .state = state, .separate_master = separate};
  };
  const UpdateBytes full = bytes(4, 12, false), half = bytes(2, 12, true), split = bytes(2, 12, false);
  CHECK((full.touched() == 28 && full.slot() == 12 && full.of_plain() == 1));
  CHECK((half.touched() == 26 && half.slot() == 14 && half.of_plain() == 1));
  CHECK((split.touched() == 26 && split.slot() == 12 && split.in() == 14 && split.of_plain() == 1));
  CHECK(bytes(4, 8, false).of_plain() == 28.0 / 20);  // bf16 moments, or one in fp32
  CHECK(bytes(2, 6, false).slot() == 6);              // one bf16 moment and a split master
  CHECK(bytes(2, 6, false).of_plain() == 26.0 / 14);
  Hardware hardware;
  hardware.update_params_per_s = 8e9;
  hardware.update_params_per_s_rank = 2e9;
  hardware.scale_updates(1.5);
  CHECK((hardware.update_params_per_s == 12e9 && hardware.update_params_per_s_rank == 3e9));
}

TEST_CASE("the split search finds the lowest point of a bowl to an eighth") {
  for (const double speculate : {0.0, 0.3, 0.62, 1.0}) {
    for (const double device : {0.0, 0.4, 0.9}) {
      Asked asked;
      const UpdateSplit best = best_split({.speculate = true, .device = true}, {}, 64, [&](const UpdateSplit& split) {
        asked.note(split);
        return 1 + std::pow(split.speculate - speculate, 2) + std::pow(split.device - device, 2);
      });
      INFO("speculate " << speculate << " device " << device);
      CHECK(std::abs(best.speculate - speculate) <= 0.125);
      CHECK(std::abs(best.device - device) <= 0.125);
      CHECK(best.resident == 0);
      for (const auto& [split, times] : asked.times) CHECK(times == 1);
    }
  }
}

TEST_CASE("the split search leaves fixed fractions alone and asks no more than it may") {
  const UpdateSplit start{.speculate = 0.4, .device = 0.1};
  Asked asked;
  const UpdateSplit best = best_split({.device = true}, start, 5, [&](const UpdateSplit& split) {
    asked.note(split);
    CHECK(split.speculate == 0.4);
    return 2 - split.device;
  });
  CHECK(best.speculate == 0.4);
  CHECK(asked.count <= 5);
  CHECK(best.device > 0.1);
  asked.count = 0;
  CHECK(best_split({}, start, 5, [&](const UpdateSplit& split) {
          asked.note(split);
          return 1.0;
        }) == start);
}

TEST_CASE("more of anything must be worth it, and what does not fit is never taken") {
  const SplitSpace all{.speculate = true, .device = true, .resident = true};
  CHECK(best_split(all, {}, 64, [](const UpdateSplit& s) { return 1 - 0.001 * (s.speculate + s.resident); }) == UpdateSplit{});
  const UpdateSplit best = best_split(all, {}, 64, [](const UpdateSplit& s) {
    return s.device > 0.5 ? std::numeric_limits<double>::infinity() : 2 - s.device;
  });
  CHECK(best.device == 0.5);
  CHECK(best.speculate == 0);
}

}  // namespace spipe::plan
