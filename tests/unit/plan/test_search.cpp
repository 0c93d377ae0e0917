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
  const model::ModelShape shape = small_shape({.layers = 8});
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
  // With less, plans fetch later and park.
  hardware.memory_bytes = least - 1;
  trials = search_schedules(request_for(shape, hardware));
  REQUIRE(trials.front().refused.empty());
  CHECK(trials.front().device_bytes < least);
  CHECK((trials.front().input.prefetch == 0 || trials.front().input.park));
  hardware.memory_bytes = 1;
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

  // Both passes of mobius have the same stages: a number for one of them is meant for both, two numbers cannot be.
  request.schedules = {"mobius"};
  request.backward_stages.reset();
  const std::vector<Trial> both = search_schedules(request);
  REQUIRE(both.size() == 1);
  CHECK(both[0].refused.empty());
  CHECK(both[0].backward_stages == 4);
  request.backward_stages = 12;
  CHECK(search_schedules(request).front().refused.find("same stages") != std::string::npos);
}

TEST_CASE("stage counts out of range are refused by name") {
  const model::ModelShape shape = small_shape({.layers = 4});
  SearchRequest request = request_for(shape, four_devices());
  request.backward_stages = 7;
  CHECK_THROWS_WITH(search_schedules(request), Catch::Contains("parallel.backward_stages") && Catch::Contains("1 to 6"));
  request.backward_stages = 6;
  CHECK_NOTHROW(search_schedules(request));
  request.forward_stages = 0;
  CHECK_THROWS_WITH(search_schedules(request), Catch::Contains("parallel.forward_stages"));
}

TEST_CASE("a host's memory counts its share of the state, all parking of its ranks, and its mailboxes") {
  const model::ModelShape shape = small_shape({.layers = 14});
  SearchRequest request = request_for(shape, four_devices());
  request.store_bytes = 1'000'000;
  request.schedules = {"spipe"};
  request.forward_stages = 4;
  request.backward_stages = 12;
  request.hardware.memory_bytes = search_schedules(request).front().device_bytes - 1;
  const Trial trial = search_schedules(request).front();
  REQUIRE(trial.refused.empty());
  REQUIRE(trial.input.park);
  const Plan plan = make_schedule(trial.schedule, trial.input);
  REQUIRE(plan.parking_bytes > 0);
  CHECK(trial.host_bytes == 1'000'000 + 4 * plan.parking_bytes + plan.mailbox_bytes.at(0));
}
