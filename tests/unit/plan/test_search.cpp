// The first automatic choice of a schedule: everything is tried, what fits is ordered by simulated time, what does not says
// why.
#include <algorithm>
#include <catch2/catch.hpp>

#include "spipe/plan/search.h"
#include "support.h"

using namespace spipe;
using namespace spipe::plan;
using plan::testing::small_shape;

namespace {

Hardware four_devices() {
  Hardware hardware;
  hardware.name = "four";
  hardware.ranks_per_host = 4;
  hardware.matmul_flops = 1e9;
  hardware.h2d_bytes_per_s = hardware.d2h_bytes_per_s = 1e9;
  hardware.update_params_per_s = 1e8;
  return hardware;
}

SearchRequest request_for(const model::ModelShape& shape, const Hardware& hardware) {
  SearchRequest request;
  request.hardware = hardware;
  request.input.shape = &shape;
  request.input.ranks = hardware.ranks();
  request.input.micro_batches = 8;
  request.input.sum_groups = 4;
  return request;
}

}  // namespace

TEST_CASE("the search orders what fits by simulated time and keeps the refused with their reasons") {
  const model::ModelShape shape = small_shape({.layers = 14});
  const std::vector<Trial> trials = search_schedules(request_for(shape, four_devices()));
  REQUIRE(trials.size() > 20);
  REQUIRE(trials.front().refused.empty());
  bool refused = false;
  double before = 0;
  for (const Trial& trial : trials) {
    refused = refused || !trial.refused.empty();
    CHECK(refused == !trial.refused.empty());  // the refused come last
    if (refused) continue;
    CHECK(trial.step_seconds >= before);
    before = trial.step_seconds;
    CHECK(trial.device_bytes > 0);
  }
  for (const std::string& name : schedule_names()) {
    INFO(name);
    CHECK(std::any_of(trials.begin(), trials.end(), [&](const Trial& t) { return t.schedule == name; }));
  }
  // The winner's input gives the plan that was simulated.
  const Trial& best = trials.front();
  const Simulation again = simulate(make_schedule(best.schedule, best.input), shape, four_devices());
  CHECK(again.step_seconds == best.step_seconds);
}

TEST_CASE("a device too small for some plans leaves the others - one too small for all leaves none") {
  const model::ModelShape shape = small_shape({.layers = 14});
  Hardware hardware = four_devices();
  std::vector<Trial> trials = search_schedules(request_for(shape, hardware));
  std::uint64_t least = UINT64_MAX, most = 0;
  for (const Trial& trial : trials) {
    if (!trial.refused.empty()) continue;
    least = std::min(least, trial.device_bytes);
    most = std::max(most, trial.device_bytes);
  }
  REQUIRE(least < most);
  hardware.memory_bytes = least;
  trials = search_schedules(request_for(shape, hardware));
  CHECK(trials.front().refused.empty());
  CHECK(trials.front().device_bytes <= least);
  CHECK(std::any_of(trials.begin(), trials.end(),
                    [](const Trial& t) { return t.refused.find("device memory") != std::string::npos; }));
  hardware.memory_bytes = least - 1;
  CHECK_FALSE(search_schedules(request_for(shape, hardware)).front().refused.empty());
}

TEST_CASE("given stage counts and schedules are the only ones tried") {
  const model::ModelShape shape = small_shape({.layers = 14});
  SearchRequest request = request_for(shape, four_devices());
  request.schedules = {"spipe"};
  request.forward_stages = 4;
  request.backward_stages = 12;
  const std::vector<Trial> trials = search_schedules(request);
  REQUIRE(trials.size() == 1);
  CHECK(trials[0].schedule == "spipe");
  CHECK(trials[0].input.forward_cuts.size() == 4);
  CHECK(trials[0].input.backward_cuts.size() == 12);
}
