#include "spipe/plan/fit_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "candidates.h"
#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/base/units.h"
#include "spipe/plan/verifier.h"

namespace spipe::plan {

namespace {

// Ways to use memory, the fastest first: what a plan keeps on the device to have it early.
struct Thrift {
  int prefetch = 1;
  bool park = false;
};
constexpr Thrift kThrifts[] = {{1, false}, {1, true}, {0, false}, {0, true}};

class RankFitter {
 public:
  explicit RankFitter(const RankFitRequest& request) : request_(request) {}
  RankFit run();

 private:
  struct Plans {
    Plan train, save;
    std::optional<Plan> evaluate;
    [[nodiscard]] std::vector<const Plan*> all() const {
      std::vector<const Plan*> list = {&train, &save};
      if (evaluate) list.push_back(&*evaluate);
      return list;
    }
  };
  void search();
  void take(const RankChoice& choice);
  [[nodiscard]] std::vector<std::string> schedules() const;
  void try_stages(const std::string& schedule, int forward, int backward);
  bool try_thrift(Trial& trial, const Thrift& thrift);
  [[nodiscard]] Plans make_plans(const Trial& trial) const;
  [[nodiscard]] std::uint64_t host_bytes(const Plans& plans) const;
  [[noreturn]] void refuse() const;
  void verify_all(const Plans& plans) const;

  const RankFitRequest& request_;
  std::vector<Trial> trials_;
  std::optional<Error> rule_;                // the first of a schedule that something broke
  std::uint64_t least_device_ = UINT64_MAX;  // of trials that fit into the host
  std::uint64_t least_host_ = UINT64_MAX;    // of trials that fit into the device
};

std::vector<std::string> RankFitter::schedules() const {
  return request_.schedule == "auto" ? schedule_names() : std::vector<std::string>{request_.schedule};
}

RankFitter::Plans RankFitter::make_plans(const Trial& trial) const {
  Plans plans;
  plans.train = make_schedule(trial.schedule, trial.input);
  PipelineInput input = trial.input;
  input.save = true;
  plans.save = make_schedule(trial.schedule, input);
  SPIPE_CHECK(plans.save.home_of_unit == plans.train.home_of_unit, "a save moves no unit");
  if (!request_.evaluation) return plans;
  input = trial.input;
  input.evaluate = true;
  plans.evaluate = make_schedule(trial.schedule, input);
  SPIPE_CHECK(plans.evaluate->home_of_unit == plans.train.home_of_unit, "an evaluation moves no unit");
  return plans;
}

// Of the fullest host.
std::uint64_t RankFitter::host_bytes(const Plans& plans) const {
  std::vector<std::uint64_t> bytes(static_cast<std::size_t>(plans.train.hosts()), 0);
  for (std::size_t s = 0; s < plans.train.home_of_unit.size(); ++s) {
    const int home = plans.train.home_of_unit[s];
    if (home < 0) continue;
    auto& host = bytes[static_cast<std::size_t>(plans.train.host_of_rank[static_cast<std::size_t>(home)])];
    host = checked_add(host, request_.store_bytes_of_unit[s]);
  }
  std::uint64_t arena = 0, parking = 0;
  std::vector<std::uint64_t> mailboxes(bytes.size(), 0);
  for (const Plan* plan : plans.all()) {
    arena = std::max(arena, plan->arena_bytes);
    parking = std::max(parking, plan->parking_bytes);
    for (std::size_t h = 0; h < mailboxes.size(); ++h) mailboxes[h] = std::max(mailboxes[h], plan->mailbox_bytes[h]);
  }
  for (const int host : plans.train.host_of_rank) {
    bytes[static_cast<std::size_t>(host)] += parking + (request_.arena_on_host ? arena : 0);
  }
  for (std::size_t h = 0; h < bytes.size(); ++h) bytes[h] = checked_add(round_up(bytes[h], 4096), mailboxes[h]);
  return *std::max_element(bytes.begin(), bytes.end());
}

bool RankFitter::try_thrift(Trial& trial, const Thrift& thrift) {
  trial.input.prefetch = thrift.prefetch;
  trial.input.park = thrift.park;
  const Plans plans = make_plans(trial);
  // Forward stages end where the last backward stage, or the head, begins.
  trial.forward_stages = static_cast<int>(plans.train.options.forward_cuts.size());
  trial.device_bytes = 0;
  for (const Plan* plan : plans.all()) trial.device_bytes = std::max(trial.device_bytes, plan->device_bytes());
  trial.host_bytes = host_bytes(plans);
  const bool device_fits = request_.device_bytes == 0 || trial.device_bytes <= request_.device_bytes;
  const bool host_fits = trial.host_bytes <= request_.host_bytes;
  if (host_fits) least_device_ = std::min(least_device_, trial.device_bytes);
  if (device_fits) least_host_ = std::min(least_host_, trial.host_bytes);
  if (!device_fits) {
    trial.refused = fmt::format("needs {} of device memory", format_bytes(trial.device_bytes));
  } else if (!host_fits) {
    trial.refused = fmt::format("needs {} of host memory", format_bytes(trial.host_bytes));
  } else {
    trial.refused.clear();
    const Simulation simulation = simulate(plans.train, *request_.input.shape, request_.hardware);
    trial.step_seconds = simulation.step_seconds;
    trial.bubble = simulation.bubble;
    trial.exposed_optimizer_seconds = simulation.exposed_optimizer_seconds;
  }
  return trial.refused.empty();
}

void RankFitter::try_stages(const std::string& schedule, int forward, int backward) {
  const model::ModelShape& shape = *request_.input.shape;
  Trial trial;
  trial.schedule = schedule;
  trial.forward_stages = forward;
  trial.backward_stages = backward;
  trial.input = request_.input;
  trial.input.backward_cuts = balanced_cuts(stage_weights(shape, true), backward);
  trial.input.forward_cuts = balanced_cuts(stage_weights(shape, false), forward);
  if (runs_both_passes_of_a_stage(schedule)) trial.input.forward_cuts.clear();
  if (runs_both_passes_of_a_stage(schedule) && forward != backward) {
    throw Error(fmt::format("{} runs both passes over the same stages, but {} forward and {} backward stages are asked for",
                            schedule, forward, backward),
                "parallel.forward_stages", "leave it out, or choose the schedule spipe or roundpipe");
  }
  try {
    for (const Thrift& thrift : kThrifts) {
      if (request_.park && thrift.park != *request_.park) continue;
      if (try_thrift(trial, thrift)) break;
    }
  } catch (const Error& error) {
    trial.refused = error.finding();
    if (!rule_) rule_ = error;
  }
  const bool known = std::any_of(trials_.begin(), trials_.end(), [&](const Trial& other) {
    return std::tie(other.schedule, other.forward_stages, other.backward_stages) ==
           std::tie(trial.schedule, trial.forward_stages, trial.backward_stages);
  });
  if (!known) trials_.push_back(std::move(trial));
}

void RankFitter::verify_all(const Plans& plans) const {
  if (request_.input.early_updates) return;  // not allowed, only measured
  for (const Plan* plan : plans.all()) {
    if (const auto violation = verify(*plan, *request_.input.shape)) {
      throw InternalError("verified plan", violation->message, __FILE__, __LINE__);
    }
  }
}

void RankFitter::refuse() const {
  if (least_device_ != UINT64_MAX && request_.device_bytes != 0 && least_device_ > request_.device_bytes) {
    throw Error(
        fmt::format("device.memory {} ({} bytes) is too small; the smallest that works is {} ({} bytes)",
                    format_bytes(request_.device_bytes), request_.device_bytes, format_bytes(least_device_), least_device_),
        {}, "raise device.memory to that, use more ranks, or make batch.micro, data.seq_len or the model smaller");
  }
  if (least_host_ != UINT64_MAX) {
    throw Error(fmt::format("device.host_memory {} ({} bytes) is too small; the smallest that works is {} ({} bytes)",
                            format_bytes(request_.host_bytes), request_.host_bytes, format_bytes(least_host_), least_host_),
                {}, "free host memory, raise device.host_memory, use more hosts, or train a smaller model");
  }
  // A rule of the schedule; of the one that was asked for, it is the user's business.
  if (rule_ && request_.schedule != "auto") throw Error(*rule_);
  const std::string why = trials_.empty() ? "there is nothing to try" : trials_.front().refused;
  throw Error(fmt::format("no schedule can run this on {} ranks: {}", request_.input.ranks, why), "parallel.schedule",
              "change parallel.data, batch.sum_groups, the stages, or the number of ranks");
}

void RankFitter::search() {
  const int units = request_.input.shape->unit_count();
  const int ranks = std::max(1, request_.input.ranks / std::max(1, request_.input.replicas));
  for (const std::string& schedule : schedules()) {
    for (const int backward : stage_counts(request_.backward_stages, ranks, units)) {
      if (runs_both_passes_of_a_stage(schedule)) {
        const int forward = request_.schedule == "auto" ? backward : request_.forward_stages.value_or(backward);
        try_stages(schedule, request_.backward_stages ? forward : backward, backward);
        continue;
      }
      for (const int forward : stage_counts(request_.forward_stages, ranks, units)) {
        // More forward stages than backward ones only fetch more often; if somebody asks for them, they are made.
        if (forward <= backward || request_.forward_stages) try_stages(schedule, forward, backward);
      }
    }
  }
  std::stable_sort(trials_.begin(), trials_.end(), [](const Trial& a, const Trial& b) {
    return std::tuple(!a.refused.empty(), a.step_seconds, a.forward_stages + a.backward_stages) <
           std::tuple(!b.refused.empty(), b.step_seconds, b.forward_stages + b.backward_stages);
  });
  if (trials_.empty() || !trials_.front().refused.empty()) refuse();
}

void RankFitter::take(const RankChoice& choice) {
  Trial trial;
  trial.schedule = choice.schedule;
  trial.input = request_.input;
  trial.input.forward_cuts = choice.forward_cuts;
  trial.input.backward_cuts = choice.backward_cuts;
  trial.input.prefetch = choice.prefetch;
  trial.input.park = choice.park;
  trial.forward_stages = static_cast<int>(choice.forward_cuts.size());
  trial.backward_stages = static_cast<int>(choice.backward_cuts.size());
  trials_.push_back(std::move(trial));
}

RankFit RankFitter::run() {
  SPIPE_CHECK(request_.store_bytes_of_unit.size() == request_.input.shape->store_units.size(), "every unit has its state");
  if (request_.choice) {
    take(*request_.choice);
  } else {
    search();
  }
  Plans plans = make_plans(trials_.front());
  if (!request_.choice) verify_all(plans);
  RankFit fit;
  for (const Plan* plan : plans.all()) {
    fit.arena_bytes = std::max(fit.arena_bytes, plan->arena_bytes);
    fit.parking_bytes = std::max(fit.parking_bytes, plan->parking_bytes);
  }
  const auto fitting = std::count_if(trials_.begin(), trials_.end(), [](const Trial& t) { return t.refused.empty(); });
  const Trial& best = trials_.front();
  fit.reason =
      fmt::format("{} with {} forward and {} backward stages: the fastest of {} that fit, {} were refused", best.schedule,
                  best.forward_stages, best.backward_stages, fitting, static_cast<std::ptrdiff_t>(trials_.size()) - fitting);
  fit.train = std::move(plans.train);
  fit.train_and_save = std::move(plans.save);
  fit.evaluate = std::move(plans.evaluate);
  fit.trials = std::move(trials_);
  return fit;
}

}  // namespace

RankFit fit_ranks(const RankFitRequest& request) { return RankFitter(request).run(); }

RankChoice choice_of(const Trial& trial) {
  const PipelineInput& input = trial.input;
  return {trial.schedule, input.forward_cuts, input.backward_cuts, input.prefetch, input.park};
}

}  // namespace spipe::plan
