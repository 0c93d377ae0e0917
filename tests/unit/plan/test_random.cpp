// Random models and options: every plan completes and verifies.
#include <catch2/catch.hpp>
#include <random>

#include "spipe/plan/fit.h"
#include "src/plan/candidates.h"
#include "support.h"

using namespace spipe;
using namespace spipe::plan;
using namespace spipe::plan::testing;

namespace {

SmallModel random_model(Dice& dice) {
  SmallModel small;
  small.layers = dice.from(1, 9);
  small.tied = dice.coin();
  small.learned_positions = dice.coin();
  small.vocab = dice.from(50, 3000);
  small.hidden = 16 * dice.from(1, 6);
  small.ffn = 16 * dice.from(1, 12);
  small.micro = dice.from(1, 3);
  small.seq_len = dice.from(4, 40);
  return small;
}

ScheduleOptions random_options(Dice& dice, const model::ModelShape& shape) {
  ScheduleOptions options;
  options.residency = dice.from(0, 2) == 0 ? Residency::in_place : Residency::streamed;
  options.forward_cuts = dice.cuts(shape.unit_count());
  options.backward_cuts = dice.cuts(shape.unit_count());
  options.micro_batches = dice.from(1, 9);
  options.sum_groups = dice.coin() ? 1 : dice.from(1, 11);
  options.recompute = dice.coin();
  options.park = dice.coin();
  options.prefetch = dice.from(0, 3);
  options.evaluate = dice.from(0, 7) == 0;
  options.save = dice.from(0, 4) == 0;
  options.updates = dice.ways(shape);
  options.piece_elements = 4096U * static_cast<unsigned>(dice.from(1, 3));
  return options;
}

}  // namespace

TEST_CASE("random plans verify, close to the bytes that live at once") {
  const std::uint32_t seed = std::random_device{}();
  double sum = 0;
  for (std::uint32_t round = 0; round < 700; ++round) {
    Dice dice(seed + round);
    const model::ModelShape shape = small_shape(random_model(dice));
    const ScheduleInput input{.shape = &shape, .grad_dtype_size = dice.coin() ? 4U : 2U};
    const Plan plan = schedule_streaming(input, random_options(dice, shape));
    const auto violation = verify(plan, shape, {.device_bytes = plan.device_bytes(), .host_bytes = plan.parking_bytes});
    INFO("seed " << seed + round << ": " << (violation ? violation->message : "") << "\n" << dump(plan).substr(0, 400));
    REQUIRE(!violation);
    std::uint64_t live = 0;
    for (const MemoryUse& use : memory_by_kind(plan)) live += use.at_peak;
    const std::uint64_t placed = plan.arena_bytes + plan.resident_bytes;
    REQUIRE(placed >= live);
    const double ratio = static_cast<double>(placed) / static_cast<double>(live);
    sum += ratio;
    REQUIRE(ratio < 1.5);  // no placement reaches the live bytes every time; 1.20 was the worst of 6,000
  }
  INFO("seed " << seed);
  CHECK(sum / 700 < 1.01);
}

TEST_CASE("a random plan with a task or a wait taken away is refused") {
  const std::uint32_t seed = std::random_device{}();
  for (std::uint32_t round = 0; round < 150; ++round) {
    Dice dice(seed + round);
    const model::ModelShape shape = small_shape(random_model(dice));
    const Plan plan = schedule_streaming({.shape = &shape}, random_options(dice, shape));
    INFO("seed " << seed + round);
    for (int trial = 0; trial < 4; ++trial) {
      Plan broken = plan;
      const auto id = static_cast<std::uint32_t>(dice.from(0, static_cast<int>(plan.tasks.size()) - 1));
      INFO("without task " << id << " (" << task_kind_name(plan.tasks[id].kind) << ")");
      remove_task(broken, id);
      REQUIRE(verify(broken, shape));
      if (plan.tasks[id].wait_count == 0) continue;
      broken = plan;
      drop_wait(broken, id, 0);
      REQUIRE(verify(broken, shape));
    }
  }
}

TEST_CASE("the bound of a candidate never exceeds its need") {
  const std::uint32_t seed = std::random_device{}();
  for (std::uint32_t round = 0; round < 12; ++round) {
    Dice dice(seed + round);
    const model::ModelShape shape = small_shape(random_model(dice));
    FitRequest request;
    request.input.shape = &shape;
    request.sum_groups = dice.from(1, 4);
    request.micro_batches = dice.from(7, 24);
    INFO("seed " << seed + round);
    for (const Candidate& candidate : training_candidates(request)) {
      const MemoryBound bound = memory_bound(request, candidate);
      const MemoryBound need = memory_bound(emit_streaming(request.input, candidate.options), shape, 4);
      REQUIRE(bound.arena <= need.arena);
      REQUIRE(bound.parking <= need.parking);
      REQUIRE(bound.in_place == need.in_place);
    }
  }
}

TEST_CASE("random budgets are kept, and the smallest is exact") {
  const std::uint32_t seed = std::random_device{}();
  for (std::uint32_t round = 0; round < 40; ++round) {
    Dice dice(seed + round);
    const model::ModelShape shape = small_shape(random_model(dice));
    FitRequest request;
    request.input.shape = &shape;
    request.splits = {{.speculate = dice.from(0, 2) * 0.5, .device = dice.from(0, 1) * 0.5, .resident = dice.from(0, 2) * 0.3},
                      {.resident = dice.from(0, 1) * 0.3}};
    request.piece_elements = 4096;
    request.micro_batches = dice.from(1, 12);
    request.sum_groups = dice.coin() ? 1 : 2;
    request.evaluation = dice.coin();
    if (dice.from(0, 3) == 0) request.recompute = dice.coin();
    INFO("seed " << seed + round);
    const std::uint64_t smallest = smallest_budget(request);
    const FitResult free = fit(request);
    const std::uint64_t most = std::max(free.train.device_bytes(), smallest);
    for (int trial = 0; trial < 5; ++trial) {
      request.device_bytes = trial == 0 ? smallest : smallest + (most - smallest) * static_cast<std::uint64_t>(trial) / 5;
      const FitResult found = fit(request);
      const Limits limits{.device_bytes = request.device_bytes};
      REQUIRE(!verify(found.train, shape, limits));
      if (found.evaluate) REQUIRE(!verify(*found.evaluate, shape, limits));
      REQUIRE(found.evaluate.has_value() == request.evaluation);
    }
    request.device_bytes = smallest - 1;
    REQUIRE_THROWS(fit(request));
  }
}
