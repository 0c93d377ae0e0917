// Random pipelines: every plan verifies, or is refused with a reason.
#include <catch2/catch.hpp>
#include <map>

#include "pipeline_support.h"
#include "spipe/base/error.h"
#include "spipe/plan/simulator.h"

using namespace spipe;
using namespace spipe::plan;
using namespace spipe::plan::testing;

TEST_CASE("random pipelines verify or are refused with a reason") {
  const std::uint32_t seed = std::random_device{}();
  std::map<std::string, int> made, refused;
  for (std::uint32_t round = 0; round < SPIPE_PIPELINES; ++round) {
    Dice dice(seed + round);
    RandomPipeline random;
    roll(dice, random);
    INFO("seed " << seed + round << ": " << random.text());
    Plan plan;
    try {
      plan = make_schedule(random.schedule, random.input);
    } catch (const Error& error) {
      REQUIRE(!error.finding().empty());
      REQUIRE(!error.hint().empty());
      ++refused[error.where()];
      continue;
    }
    ++made[random.schedule];
    const auto violation = verify(plan, random.shape, {.device_bytes = plan.device_bytes()});
    INFO((violation ? violation->message : ""));
    REQUIRE(!violation);
    // What verifies runs to its end, here with speeds that differ from rank to rank and from task to task.
    if (round % 4 != 0) continue;
    SimulationOptions options{.jitter = 0.9, .seed = seed + round};
    for (int r = 0; r < plan.ranks; ++r) options.rank_speed.push_back(1 + dice.from(0, 3));
    const Hardware hardware{.matmul_flops = 1e9, .h2d_bytes_per_s = 1e7, .d2h_bytes_per_s = 1e7, .network_bytes_per_s = 1e7};
    REQUIRE(simulate(plan, random.shape, hardware, options).step_seconds > 0);
  }
  INFO("seed " << seed);
  for (const std::string& name : schedule_names()) CHECK(made[name] > SPIPE_PIPELINES / 20);
  for (const auto& [where, count] : refused) {
    INFO(where);
    const bool known = where == "batch.sum_groups" || where == "parallel.forward_stages" || where == "parallel.backward_stages";
    CHECK(known);
  }
  CHECK(refused.size() <= 3);
}
