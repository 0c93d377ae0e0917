// Large plans complete and verify in seconds.
#include <catch2/catch.hpp>
#include <chrono>

#include "spipe/plan/fit.h"
#include "support.h"

using namespace spipe;
using namespace spipe::plan;
using namespace spipe::plan::testing;

namespace {

template <typename Work>
double seconds_of(const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

TEST_CASE("a plan of a million tasks completes and verifies") {
  const model::ModelShape shape = small_shape({.layers = 250, .tied = true});
  ScheduleOptions options = streamed(shape, 5, 5, 1000, true);
  options.park = true;
  Plan plan;
  const double planning = seconds_of([&] { plan = schedule_streaming({.shape = &shape}, options); });
  REQUIRE(plan.tasks.size() > 1'000'000);
  const double verifying = seconds_of([&] { REQUIRE(!verify(plan, shape)); });
  WARN(plan.tasks.size() << " tasks: planned in " << planning << " s, verified in " << verifying << " s");
  CHECK(planning < 60);
  CHECK(verifying < 60);
}

TEST_CASE("a hundred layers and 64 micro-batches are fitted to a tight budget") {
  const model::ModelShape shape = small_shape({.layers = 100});
  FitRequest request;
  request.input.shape = &shape;
  request.micro_batches = 64;
  request.evaluation = true;
  request.device_bytes = smallest_budget(request);
  FitResult result;
  const double time = seconds_of([&] { result = fit(request); });
  WARN("fitted in " << time << " s");
  CHECK(time < 30);
  CHECK(!verify(result.train, shape, {.device_bytes = request.device_bytes}));
}
