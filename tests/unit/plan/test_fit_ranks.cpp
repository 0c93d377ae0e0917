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
  if (at == std::string::npos) FAIL("no budget is named: " << text);
  return std::stoull(text.substr(text.find('(', at) + 1));
}

std::uint64_t device_bytes(const RankFit& fit) {
  return std::max(
      {fit.train.device_bytes(), fit.train_and_save.device_bytes(), fit.evaluate ? fit.evaluate->device_bytes() : 0});
}

std::string refusal_of(const RankFitRequest& request) {
  try {
    (void)fit_ranks(request);
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kUser);
    CHECK(!error.hint().empty());
    return error.what();
  }
  return "";
}

// Of the fullest host, summed again.
std::uint64_t host_bytes(const RankFitRequest& request, const RankFit& fit) {
  std::uint64_t most = 0;
  for (int h = 0; h < fit.train.hosts(); ++h) {
    std::uint64_t bytes = 0, mailboxes = 0;
    for (std::size_t s = 0; s < fit.train.home_of_unit.size(); ++s) {
      const int home = fit.train.home_of_unit[s];
      if (home >= 0 && fit.train.host_of_rank[static_cast<std::size_t>(home)] == h) bytes += request.store_bytes_of_unit[s];
    }
    const auto ranks = static_cast<std::uint64_t>(std::ranges::count(fit.train.host_of_rank, h));
    const std::uint64_t areas = ranks * (fit.parking_bytes + (request.arena_on_host ? fit.arena_bytes : 0));
    std::vector<const Plan*> plans = {&fit.train, &fit.train_and_save};
    if (fit.evaluate) plans.push_back(&*fit.evaluate);
    for (const Plan* plan : plans) mailboxes = std::max(mailboxes, plan->mailbox_bytes.at(static_cast<std::size_t>(h)));
    std::uint64_t extra = 0;
    for (const Plan* plan : plans) extra += request.extra_host_bytes ? request.extra_host_bytes(*plan, h) : 0;
    most = std::max(most, (bytes + 4095) / 4096 * 4096 + areas + mailboxes + extra);
  }
  return most;
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

  // With neither memory enough for any plan, the host is named first: no device helps it.
  request.host_bytes = store / 4;
  request.device_bytes = 1;
  const std::string both = refusal_of(request);
  CHECK(both.find("device.host_memory") == 0);
  request.host_bytes = smallest_named(both);
  const std::string then = refusal_of(request);
  CHECK(then.find("device.memory") == 0);
  request.device_bytes = smallest_named(then);
  CHECK_NOTHROW(fit_ranks(request));
}

TEST_CASE("the choice is confirmed with its plans for saving and evaluating") {
  // Training parks its boundaries, an evaluation keeps them: what fits for training alone is not enough for both.
  int refused = 0, other = 0;
  for (std::uint32_t seed = 0; seed < 30; ++seed) {
    Dice dice(seed);
    const model::ModelShape shape = small_shape({.layers = dice.from(1, 5)});
    RankFitRequest request = request_for(shape, dice.from(1, 3));
    request.input.micro_batches = dice.from(8, 40);
    request.schedule = "spipe";
    request.evaluation = false;
    request.device_bytes = 1;
    const std::uint64_t alone = smallest_named(refusal_of(request));
    request.device_bytes = alone + static_cast<std::uint64_t>(dice.from(0, 300)) * 256;
    const RankFit training = fit_ranks(request);
    request.evaluation = true;
    INFO("seed " << seed);
    const std::string refusal = refusal_of(request);
    if (!refusal.empty()) {
      ++refused;
      CHECK(smallest_named(refusal) > request.device_bytes);
      continue;
    }
    const RankFit both = fit_ranks(request);
    CHECK(device_bytes(both) <= request.device_bytes);
    other += plan_hash(both.train) != plan_hash(training.train) ? 1 : 0;
  }
  CHECK(refused > 2);
  CHECK(other > 2);
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
  int met = 0, met_tight = 0, refused = 0, device = 0, host = 0;
  for (std::uint32_t seed = 0; seed < 80; ++seed) {
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
    if (dice.coin()) request.host_bytes = static_cast<std::uint64_t>(dice.from(500, 3000)) << 10U;
    if (dice.coin()) request.park = dice.coin();
    request.arena_on_host = dice.coin();
    request.evaluation = dice.coin();
    if (dice.coin()) {
      request.extra_host_bytes = [](const Plan& plan, int h) { return plan.tasks.size() * 8 + static_cast<std::size_t>(h); };
    }
    INFO("seed " << seed << ": " << request.schedule << " on " << ranks << " ranks");
    std::string refusal = refusal_of(request);
    if (!refusal.empty()) {
      ++refused;
      // What is named works - the host's memory perhaps only with more of the device's - and a byte less does not.
      for (int step = 0; step < 2 && refusal.find("smallest that works is") != std::string::npos; ++step) {
        const bool of_host = refusal.find("device.host_memory") == 0;
        ++(of_host ? host : device);
        std::uint64_t& budget = of_host ? request.host_bytes : request.device_bytes;
        const std::uint64_t least = smallest_named(refusal);
        budget = least - 1;
        CHECK(refusal_of(request).find(of_host ? "device.host_memory" : "device.memory") == 0);
        budget = least;
        refusal = refusal_of(request);
      }
      CHECK((refusal.empty() || refusal.find("smallest that works is") == std::string::npos));
      if (!refusal.empty()) continue;
    }
    const RankFit fit = fit_ranks(request);
    ++met;
    met_tight += request.device_bytes != 0 ? 1 : 0;
    const std::uint64_t budget = request.device_bytes == 0 ? UINT64_MAX : request.device_bytes;
    CHECK(host_bytes(request, fit) <= request.host_bytes);
    std::vector<const Plan*> plans = {&fit.train, &fit.train_and_save};
    if (fit.evaluate) plans.push_back(&*fit.evaluate);
    for (const Plan* plan : plans) {
      const auto violation = verify(*plan, shape, {.device_bytes = budget});
      INFO((violation ? violation->message : ""));
      CHECK(!violation);
      CHECK(plan->arena_bytes <= fit.arena_bytes);
      CHECK(plan->parking_bytes <= fit.parking_bytes);
      CHECK(plan->home_of_unit == fit.train.home_of_unit);
      CHECK(plan->options.park == (request.park.value_or(plan->options.park) && !plan->options.evaluate));
    }
    CHECK(fit.evaluate.has_value() == request.evaluation);
    CHECK((fit.train.options.schedule != "streaming-dp" || request.input.sum_groups % ranks == 0));
  }
  CHECK(met > 40);
  CHECK(met_tight > 15);
  CHECK(refused > 15);
  CHECK(device > 5);
  CHECK(host > 5);
}

TEST_CASE("one rank of a host saves all that is at home there, in order") {
  const model::ModelShape shape = small_shape({.layers = 6});
  RankFitRequest request = request_for(shape, 4, 2);
  request.schedule = "spipe";
  const Plan plan = fit_ranks(request).train_and_save;
  std::vector<int> last = {-1, -1}, saves = {0, 0};
  for (const Task& task : plan.tasks) {
    if (task.kind != TaskKind::save) continue;
    const int host = plan.host_of_rank.at(static_cast<std::size_t>(plan.home_of_unit.at(static_cast<std::size_t>(task.unit))));
    const auto h = static_cast<std::size_t>(host);
    CHECK(task.rank == 2 * host);
    CHECK(task.stream == StreamKind::io);
    CHECK(task.unit > last.at(h));
    last[h] = task.unit;
    ++saves[h];
  }
  CHECK(saves[0] > 0);
  CHECK(saves[1] > 0);
}

TEST_CASE("a host that is home of nothing learns the norm, and shares have room for what signals ask") {
  // Two stages a pass on four ranks: the second host runs all backward stages.
  bool even = false;
  for (int layers = 2; layers < 6; ++layers) {
    for (int micro_batches = 1; micro_batches <= 16; ++micro_batches) {
      const model::ModelShape shape = small_shape({.layers = layers, .learned_positions = true});
      PipelineInput input;
      input.shape = &shape;
      input.ranks = 4;
      input.host_of_rank = {0, 0, 1, 1};
      input.micro_batches = micro_batches;
      input.forward_cuts = input.backward_cuts = {0, 2};
      const Plan plan = make_schedule("spipe", input);
      for (const int home : plan.home_of_unit) REQUIRE((home == -1 || home >= 2));
      std::vector<int> norms;
      for (const Task& task : plan.tasks) {
        if (task.kind == TaskKind::norm) norms.push_back(task.rank);
      }
      CHECK(norms == std::vector{0, 2});
      std::uint64_t words = 0;
      for (const model::StoreUnit& unit : shape.store_units) {
        if (unit.elements == 0) continue;
        ++words;
        for (const model::Parameter& p : unit.parameters) words += static_cast<std::uint64_t>((p.elements() + 4095) / 4096);
      }
      words += 2 * static_cast<std::uint64_t>(micro_batches);
      std::vector<std::uint64_t> shares;
      for (const Buffer& buffer : plan.buffers) {
        if (buffer.kind != BufferKind::norm_parts) continue;
        CHECK((buffer.source == 1 && buffer.host == 0));
        shares.push_back(buffer.bytes);
      }
      CHECK(shares == std::vector{(8 * words + 8 + 255) / 256 * 256});
      even = even || 8 * words % 256 == 0;  // then the word about signals takes a page of its own
    }
  }
  CHECK(even);
}
