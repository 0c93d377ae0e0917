#include "spipe/plan/search.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

#include "candidates.h"
#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/base/units.h"
#include "spipe/plan/verifier.h"

namespace spipe::plan {

namespace {

constexpr int kStagesPerRank[] = {1, 2, 3, 4, 6, 8};

}  // namespace

// Seconds of a unit's pass for one micro-batch, up to a factor: FLOPs, and bytes for units without any (an embedding).
std::vector<double> stage_weights(const model::ModelShape& shape, bool backward) {
  std::vector<double> result;
  for (const model::ComputeUnit& unit : shape.units) {
    double weight = backward ? unit.forward_flops + unit.backward_flops : unit.forward_flops;
    if (weight <= 0) weight = static_cast<double>(shape.boundary_bytes);
    result.push_back(weight);
  }
  return result;
}

std::vector<int> stage_counts(const std::optional<int>& wanted, int ranks, int units) {
  if (wanted) return {std::min(*wanted, units)};
  std::set<int> counts = {units};
  for (const int per_rank : kStagesPerRank) counts.insert(std::min(per_rank * ranks, units));
  return {counts.begin(), counts.end()};
}

bool runs_both_passes_of_a_stage(const std::string& schedule) {
  return schedule == "mobius" || schedule == "1f1b" || schedule == "gpipe";
}

namespace {

Trial try_one(const SearchRequest& request, const std::string& schedule, int forward_stages, int backward_stages) {
  Trial trial;
  trial.schedule = schedule;
  trial.forward_stages = forward_stages;
  trial.backward_stages = backward_stages;
  trial.input = request.input;
  const model::ModelShape& shape = *request.input.shape;
  trial.input.backward_cuts = balanced_cuts(stage_weights(shape, true), backward_stages);
  trial.input.forward_cuts = balanced_cuts(stage_weights(shape, false), forward_stages);
  if (runs_both_passes_of_a_stage(schedule)) trial.input.forward_cuts.clear();
  try {
    const Plan plan = make_schedule(schedule, trial.input);
    trial.device_bytes = plan.device_bytes();
    const auto hosts = static_cast<std::uint64_t>(request.hardware.hosts);
    trial.host_bytes = ceil_div(request.store_bytes, hosts) + plan.parking_bytes;
    if (request.hardware.memory_bytes > 0 && trial.device_bytes > request.hardware.memory_bytes) {
      trial.refused = "needs " + format_bytes(trial.device_bytes) + " of device memory";
    } else if (request.hardware.host_bytes > 0 && trial.host_bytes > request.hardware.host_bytes) {
      trial.refused = "needs " + format_bytes(trial.host_bytes) + " of host memory";
    }
    if (!trial.refused.empty()) return trial;
    if (const auto violation = verify(plan, shape))
      throw InternalError("verified plan", violation->message, __FILE__, __LINE__);
    const Simulation simulation = simulate(plan, shape, request.hardware);
    trial.step_seconds = simulation.step_seconds;
    trial.bubble = simulation.bubble;
    trial.exposed_optimizer_seconds = simulation.exposed_optimizer_seconds;
  } catch (const Error& error) {
    trial.refused = error.finding();
  }
  return trial;
}

}  // namespace

std::vector<Trial> search_schedules(const SearchRequest& request) {
  SPIPE_CHECK(request.input.shape != nullptr, "a search is made for a model");
  const int units = request.input.shape->unit_count();
  const int ranks = std::max(1, request.input.ranks / std::max(1, request.input.replicas));
  const std::vector<int> forward = stage_counts(request.forward_stages, ranks, units);
  const std::vector<int> backward = stage_counts(request.backward_stages, ranks, units);
  std::vector<Trial> trials;
  for (const std::string& schedule : request.schedules.empty() ? schedule_names() : request.schedules) {
    const bool one_count = runs_both_passes_of_a_stage(schedule);
    for (const int b : backward) {
      if (one_count) {
        trials.push_back(try_one(request, schedule, b, b));
        continue;
      }
      for (const int f : forward) {
        if (f <= b) trials.push_back(try_one(request, schedule, f, b));
      }
    }
  }
  std::stable_sort(trials.begin(), trials.end(), [](const Trial& a, const Trial& b) {
    return std::tuple(!a.refused.empty(), a.step_seconds, a.forward_stages + a.backward_stages) <
           std::tuple(!b.refused.empty(), b.step_seconds, b.forward_stages + b.backward_stages);
  });
  return trials;
}

}  // namespace spipe::plan
