// Choosing a plan for budgets.
#include <catch2/catch.hpp>

#include "spipe/base/error.h"
#include "spipe/plan/fit.h"
#include "support.h"

using namespace spipe;
using namespace spipe::plan;
using namespace spipe::plan::testing;
using Catch::Matchers::Contains;

namespace {

FitRequest request_for(const model::ModelShape& shape, int micro_batches) {
  FitRequest request;
  request.input.shape = &shape;
  request.micro_batches = micro_batches;
  request.evaluation = true;
  return request;
}

std::string refusal(const FitRequest& request) {
  try {
    static_cast<void>(fit(request));
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kUser);
    return error.what();
  }
  FAIL("nothing was refused");
  return {};
}

}  // namespace

TEST_CASE("without a budget parameters are used in place") {
  const model::ModelShape shape = small_shape({});
  const FitResult result = fit(request_for(shape, 4));
  CHECK(result.train.options.residency == Residency::in_place);
  CHECK(!result.train.options.recompute);
  CHECK(result.reason == "no device budget: parameters are used in place");
  REQUIRE(result.evaluate);
  CHECK(result.arena_bytes == std::max(result.train.arena_bytes, result.evaluate->arena_bytes));
}

TEST_CASE("a small budget streams, and says why") {
  const model::ModelShape shape = small_shape({.layers = 8});
  FitRequest request = request_for(shape, 8);
  const std::uint64_t resident = fit(request).train.device_bytes();
  request.device_bytes = smallest_budget(request);
  REQUIRE(request.device_bytes < resident / 2);
  const FitResult result = fit(request);
  CHECK(result.train.options.residency == Residency::streamed);
  CHECK_THAT(result.reason, Contains("parameters in place would need"));
  CHECK_THAT(result.reason, Contains("recompute on: activations would need"));
  CHECK(plan_hash(result.train) == plan_hash(fit(request).train));
}

TEST_CASE("one byte less than the smallest budget is refused with the number that works") {
  const model::ModelShape shape = small_shape({.layers = 4, .tied = true});
  FitRequest request = request_for(shape, 20);
  const std::uint64_t smallest = smallest_budget(request);
  request.device_bytes = smallest;
  CHECK(fit(request).train.device_bytes() <= smallest);
  request.device_bytes = smallest - 1;
  const std::string message = refusal(request);
  CHECK_THAT(message, Contains("device.memory"));
  CHECK_THAT(message, Contains("the smallest that works is"));
  CHECK_THAT(message, Contains("(" + std::to_string(smallest) + " bytes)"));
  request.device_bytes = 1;
  CHECK_THAT(refusal(request), Contains("(" + std::to_string(smallest) + " bytes)"));
}

TEST_CASE("the host's budget counts store, arena, parking and what running takes, exactly") {
  const model::ModelShape shape = small_shape({.layers = 4});
  FitRequest request = request_for(shape, 8);
  const auto extra = [](const Plan& plan) { return 100 * plan.tasks.size(); };
  request.extra_host_bytes = extra;
  request.store_bytes = 1'000'000;
  request.host_bytes = 1'000'001;
  const std::string message = refusal(request);
  CHECK_THAT(message, Contains("device.host_memory"));
  const std::string mark = "smallest that works is ";
  const std::string number = message.substr(message.find('(', message.find(mark)) + 1);
  request.host_bytes = std::stoull(number);
  const FitResult result = fit(request);
  CHECK(request.store_bytes + result.arena_bytes + result.train.parking_bytes + extra(result.train) + extra(*result.evaluate) ==
        request.host_bytes);
  --request.host_bytes;
  CHECK_THAT(refusal(request), Contains(std::to_string(request.host_bytes + 1) + " bytes"));
  request.arena_on_host = false;
  CHECK_NOTHROW(fit(request));
}

TEST_CASE("wishes are kept") {
  const model::ModelShape shape = small_shape({.layers = 6});
  FitRequest request = request_for(shape, 4);
  request.recompute = true;
  CHECK(fit(request).train.options.recompute);
  CHECK_THAT(fit(request).reason, Contains("recompute on: as configured"));
  request.forward_stages = 3;
  request.backward_stages = 4;
  const FitResult staged = fit(request);
  CHECK(staged.train.options.residency == Residency::streamed);
  CHECK(staged.train.options.forward_cuts.size() == 3);
  CHECK(staged.train.options.backward_cuts.size() == 4);
  CHECK_THAT(staged.reason, Contains("streaming 3 forward and 4 backward stages: as configured"));
  request.park = true;
  CHECK(fit(request).train.options.park);
  request.park = false;
  request.forward_stages.reset();
  request.backward_stages.reset();
  request.device_bytes = smallest_budget(request);
  CHECK(!fit(request).train.options.park);
}

TEST_CASE("wishes that cannot be are refused") {
  const model::ModelShape shape = small_shape({});
  FitRequest request = request_for(shape, 4);
  request.forward_stages = 6;
  CHECK_THAT(refusal(request), Contains("parallel.forward_stages") && Contains("from 1 to 5"));
  request.forward_stages.reset();
  request.backward_stages = 0;
  CHECK_THAT(refusal(request), Contains("parallel.backward_stages"));
  request.backward_stages.reset();
  request.park = true;
  request.recompute = false;
  CHECK_THAT(refusal(request), Contains("train.park"));
}

TEST_CASE("every number of stages can be asked for") {
  const model::ModelShape shape = small_shape({.layers = 5, .vocab = 5000});
  FitRequest request = request_for(shape, 3);
  for (int backward = 1; backward <= shape.unit_count(); ++backward) {
    for (int forward = 1; forward <= shape.unit_count(); ++forward) {
      request.forward_stages = forward;
      request.backward_stages = backward;
      const FitResult result = fit(request);
      REQUIRE(static_cast<int>(result.train.options.backward_cuts.size()) == backward);
      const int before_last = result.train.options.backward_cuts.back();
      REQUIRE(static_cast<int>(result.train.options.forward_cuts.size()) == std::min(forward, before_last));
      REQUIRE(!verify(result.train, shape));
    }
  }
}
