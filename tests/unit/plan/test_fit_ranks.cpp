// The fit of several ranks: plans that keep to the budgets, or a refusal that names the smallest device budget to the byte.
#include <algorithm>
#include <catch2/catch.hpp>
#include <map>

#include "spipe/base/error.h"
#include "spipe/plan/fit_ranks.h"
#include "spipe/plan/verifier.h"
#include "support.h"

using namespace spipe;
using namespace spipe::plan;
using plan::testing::Dice;
using plan::testing::small_shape;
using plan::testing::SmallModel;

namespace {

RankFitRequest request_for(const model::ModelShape& shape, int ranks, int hosts = 1) {
  RankFitRequest request;
  request.input.shape = &shape;
  request.input.ranks = ranks;
  for (int r = 0; r < ranks; ++r) request.input.host_of_rank.push_back(r * hosts / ranks);
  request.input.micro_batches = 4;
  request.hardware = {.matmul_flops = 1e9, .h2d_bytes_per_s = 1e8, .d2h_bytes_per_s = 1e8, .update_params_per_s = 1e8};
  request.hardware.hosts = hosts;
  for (const model::StoreUnit& unit : shape.store_units) request.store_bytes_of_unit.push_back(unit.elements * 16);
  request.evaluation = true;
  return request;
}

std::uint64_t smallest_named(const std::string& text) {
  const auto at = text.find("smallest that works is");
  REQUIRE(at != std::string::npos);
  return std::stoull(text.substr(text.find('(', at) + 1));
}

std::uint64_t device_bytes(const RankFit& fit) {
  return std::max(
      {fit.train.device_bytes(), fit.train_and_save.device_bytes(), fit.evaluate ? fit.evaluate->device_bytes() : 0});
}

}  // namespace

TEST_CASE("the fastest of what fits is chosen, and the runners-up follow by time") {
  const model::ModelShape shape = small_shape({.layers = 6});
  const RankFit fit = fit_ranks(request_for(shape, 4));
  REQUIRE(fit.trials.size() > 10);
  CHECK(fit.trials.front().refused.empty());
  CHECK(fit.train.options.schedule == fit.trials.front().schedule);
  CHECK(std::is_sorted(fit.trials.begin(), fit.trials.end(), [](const Trial& a, const Trial& b) {
    return std::pair(!a.refused.empty(), a.step_seconds) < std::pair(!b.refused.empty(), b.step_seconds);
  }));
  // One sum group cannot be shared by four replicas: every rank by itself is no choice here, and says why.
  const auto alone = std::ranges::find(fit.trials, "streaming-dp", &Trial::schedule);
  REQUIRE(alone != fit.trials.end());
  CHECK(alone->refused.find("sum groups") != std::string::npos);
  CHECK(fit.train_and_save.options.save);
  CHECK(fit.evaluate->options.evaluate);
  CHECK(fit.reason.find(fit.trials.front().schedule) == 0);
  // The same request, the same plan: every rank makes it by itself.
  CHECK(plan_hash(fit.train) == plan_hash(fit_ranks(request_for(shape, 4)).train));
  RankFitRequest told = request_for(shape, 4);
  told.choice = choice_of(fit.trials.front());
  const RankFit made = fit_ranks(told);
  CHECK(plan_hash(fit.train) == plan_hash(made.train));
  CHECK(plan_hash(fit.train_and_save) == plan_hash(made.train_and_save));
  CHECK(plan_hash(*fit.evaluate) == plan_hash(*made.evaluate));
}

TEST_CASE("the smallest device budget is exact to the byte, with every schedule and with auto") {
  const model::ModelShape shape = small_shape({.layers = 5, .tied = true});
  std::vector<std::string> names = schedule_names();
  names.emplace_back("auto");
  for (const std::string& name : names) {
    INFO(name);
    RankFitRequest request = request_for(shape, 2);
    request.input.sum_groups = 2;
    request.schedule = name;
    const std::uint64_t roomy = device_bytes(fit_ranks(request));
    request.device_bytes = 1;
    std::uint64_t least = 0;
    try {
      (void)fit_ranks(request);
      FAIL("a budget of one byte was accepted");
    } catch (const Error& error) {
      least = smallest_named(error.what());
    }
    CHECK(least < roomy);
    request.device_bytes = least;
    const RankFit tight = fit_ranks(request);
    CHECK(device_bytes(tight) == least);
    request.device_bytes = least - 1;
    CHECK_THROWS_WITH(fit_ranks(request), Catch::Contains("(" + std::to_string(least) + " bytes)"));
  }
}

TEST_CASE("the host's budget counts its store, its ranks' arenas and parking, and its mailboxes") {
  const model::ModelShape shape = small_shape({.layers = 5});
  RankFitRequest request = request_for(shape, 4, 2);
  request.schedule = "spipe";
  request.host_bytes = 1;
  std::uint64_t least = 0;
  try {
    (void)fit_ranks(request);
    FAIL("a host of one byte was accepted");
  } catch (const Error& error) {
    least = smallest_named(error.what());
  }
  std::uint64_t store = 0;
  for (const std::uint64_t bytes : request.store_bytes_of_unit) store += bytes;
  CHECK(least > store / 2);
  CHECK(least < 4 * store);
  request.host_bytes = least;
  CHECK_NOTHROW(fit_ranks(request));
  request.host_bytes = least - 1;
  CHECK_THROWS_AS(fit_ranks(request), Error);
  request.arena_on_host = false;  // a GPU's memory is its own
  CHECK_NOTHROW(fit_ranks(request));
}

TEST_CASE("what a schedule cannot do is the user's business when it was asked for by name") {
  const model::ModelShape shape = small_shape({.layers = 6});
  RankFitRequest request = request_for(shape, 2);
  request.schedule = "gpipe";
  request.backward_stages = 4;
  CHECK_THROWS_WITH(fit_ranks(request), Catch::Contains("gpipe has 1 stage on a rank"));
  request.schedule = "mobius";
  request.forward_stages = 2;
  CHECK_THROWS_WITH(fit_ranks(request), Catch::Contains("runs both passes over the same stages"));
  request = request_for(shape, 3);
  request.schedule = "streaming-dp";
  CHECK_THROWS_WITH(fit_ranks(request), Catch::Contains("cannot share 1 sum groups") && Catch::Contains("a multiple of 3"));
}

TEST_CASE("random requests are met within their budgets, or refused with a reason") {
  int met = 0, refused = 0;
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    Dice dice(seed);
    const SmallModel small{.layers = dice.from(1, 6), .tied = dice.coin(), .learned_positions = dice.coin()};
    const model::ModelShape shape = small_shape(small);
    const int ranks = dice.from(1, 4);
    RankFitRequest request = request_for(shape, ranks, dice.from(1, std::min(2, ranks)));
    request.input.micro_batches = dice.from(1, 9);
    request.input.sum_groups = dice.from(1, std::min(4, request.input.micro_batches));
    if (ranks % 2 == 0 && dice.coin()) request.input.replicas = 2;
    const auto& names = schedule_names();
    if (dice.coin()) request.schedule = names[static_cast<std::size_t>(dice.from(0, static_cast<int>(names.size()) - 1))];
    if (dice.coin()) request.backward_stages = dice.from(1, shape.unit_count());
    if (dice.coin()) request.device_bytes = static_cast<std::uint64_t>(dice.from(60, 600)) << 10U;
    request.evaluation = dice.coin();
    INFO("seed " << seed << ": " << request.schedule << " on " << ranks << " ranks");
    try {
      const RankFit fit = fit_ranks(request);
      ++met;
      const std::uint64_t budget = request.device_bytes == 0 ? UINT64_MAX : request.device_bytes;
      for (const Plan* plan : {&fit.train, &fit.train_and_save}) {
        const auto violation = verify(*plan, shape, {.device_bytes = budget});
        INFO((violation ? violation->message : ""));
        CHECK(!violation);
        CHECK(plan->arena_bytes <= fit.arena_bytes);
        CHECK(plan->parking_bytes <= fit.parking_bytes);
      }
      CHECK(fit.evaluate.has_value() == request.evaluation);
    } catch (const Error& error) {
      ++refused;
      CHECK(!error.finding().empty());
      CHECK(!error.hint().empty());
    }
  }
  CHECK(met > 15);
  CHECK(refused > 5);
}
