#include "rank_trials.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <tuple>

#include "assignment.h"
#include "candidates.h"
#include "spipe/base/checked.h"

namespace spipe::plan {

namespace {

constexpr int kStagesPerRank[] = {1, 2, 3, 4, 6, 8};

// Seconds of a unit's pass for one micro-batch, up to a factor: FLOPs, and bytes for units without any (an embedding).
std::vector<double> pass_weights(const model::ModelShape& shape, bool backward) {
  std::vector<double> weights;
  for (const model::ComputeUnit& unit : shape.units) {
    const double flops = backward ? unit.forward_flops + unit.backward_flops : unit.forward_flops;
    weights.push_back(flops > 0 ? flops : static_cast<double>(shape.boundary_bytes));
  }
  return weights;
}

std::vector<int> stage_counts(const std::optional<int>& wanted, int ranks, int units) {
  if (wanted) return {*wanted};
  std::set<int> counts = {units};
  for (const int per_rank : kStagesPerRank) counts.insert(std::min(per_rank * ranks, units));
  return {counts.begin(), counts.end()};
}

void check_wanted(const std::optional<int>& stages, int units, const char* key) {
  if (!stages || (*stages >= 1 && *stages <= units)) return;
  throw Error(fmt::format("{} stages for a model of {} units (embedding, layers, head)", *stages, units), key,
              fmt::format("give a number from 1 to {}, or leave it out", units));
}

// Cuts of a trial whose stage counts are set. Forward stages end where the last backward stage, or the head, begins: it may
// have fewer of them, and two trials may be the same.
void cut(Trial& trial, const Schedule& schedule) {
  const model::ModelShape& shape = *trial.input.shape;
  trial.input.backward_cuts = balanced_cuts(pass_weights(shape, true), trial.backward_stages);
  trial.input.forward_cuts.clear();
  if (!schedule.same_cuts) trial.input.forward_cuts = balanced_cuts(pass_weights(shape, false), trial.forward_stages);
  const std::vector<int> forward = resolve(schedule, trial.input).forward_cuts;
  trial.forward_stages = static_cast<int>(forward.size());
  if (!schedule.same_cuts) trial.input.forward_cuts = forward;
}

class Lister {
 public:
  Lister(const PipelineInput& input, const std::optional<int>& forward, const std::optional<int>& backward)
      : input_(input), wanted_forward_(forward), wanted_backward_(backward) {}

  void add_schedule(const Schedule& schedule) {
    const int units = input_.shape->unit_count();
    const int ranks = schedule.replicate ? 1 : std::max(1, input_.ranks / std::max(1, input_.replicas));
    if (schedule.same_cuts) {
      for (const int both : stage_counts(wanted_backward_ ? wanted_backward_ : wanted_forward_, ranks, units)) {
        add(schedule, wanted_forward_.value_or(both), both);
      }
      return;
    }
    for (const int backward : stage_counts(wanted_backward_, ranks, units)) {
      for (const int forward : stage_counts(wanted_forward_, ranks, units)) {
        // More forward stages than backward ones only fetch more often; if somebody asks for them, they are made.
        if (forward <= backward || wanted_forward_ || wanted_backward_) add(schedule, forward, backward);
      }
    }
  }
  TrialList take() { return std::move(list_); }

 private:
  void add(const Schedule& schedule, int forward, int backward) {
    Trial trial;
    trial.schedule = schedule.name;
    trial.forward_stages = forward;
    trial.backward_stages = backward;
    trial.input = input_;
    try {
      if (schedule.same_cuts && forward != backward) {
        throw Error(fmt::format("{} runs both passes over the same stages, but {} forward and {} backward stages are asked for",
                                schedule.name, forward, backward),
                    "parallel.forward_stages", "leave it out, or choose the schedule spipe or roundpipe");
      }
      cut(trial, schedule);
    } catch (const Error& error) {
      trial.refused = error.finding();
      if (!list_.rule) list_.rule = error;
    }
    const auto what = [](const Trial& t) {
      return std::tie(t.schedule, t.forward_stages, t.backward_stages, t.input.forward_cuts, t.input.backward_cuts, t.refused);
    };
    const bool known =
        std::any_of(list_.trials.begin(), list_.trials.end(), [&](const Trial& other) { return what(other) == what(trial); });
    if (!known) list_.trials.push_back(std::move(trial));
  }

  const PipelineInput& input_;
  const std::optional<int>&wanted_forward_, &wanted_backward_;
  TrialList list_;
};

}  // namespace

TrialList list_trials(const PipelineInput& input, const std::vector<std::string>& schedules,
                      const std::optional<int>& forward_stages, const std::optional<int>& backward_stages) {
  SPIPE_CHECK(input.shape != nullptr, "trials are made for a model");
  check_wanted(forward_stages, input.shape->unit_count(), "parallel.forward_stages");
  check_wanted(backward_stages, input.shape->unit_count(), "parallel.backward_stages");
  Lister lister(input, forward_stages, backward_stages);
  for (const std::string& name : schedules) lister.add_schedule(schedule_named(name));
  return lister.take();
}

bool faster(const Trial& a, const Trial& b) {
  return std::tuple(!a.refused.empty(), a.step_seconds, a.forward_stages + a.backward_stages) <
         std::tuple(!b.refused.empty(), b.step_seconds, b.forward_stages + b.backward_stages);
}

}  // namespace spipe::plan
