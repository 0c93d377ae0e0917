#include "spipe/plan/fit_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>

#include "assignment.h"
#include "memory.h"
#include "rank_trials.h"
#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/base/units.h"
#include "spipe/plan/verifier.h"

namespace spipe::plan {

namespace {

constexpr std::size_t kImproved = 4;  // trials whose splits are improved: the fastest without
constexpr int kMostSplits = 64;       // tried for each

struct Need {
  std::uint64_t device = 0, host = 0;  // of the fullest rank and host
};

// What plans of one job need of each area, at different times.
struct Areas {
  std::uint64_t device = 0, arena = 0, parking = 0;
  std::vector<std::uint64_t> mailboxes, extra;  // by host; extra: of all plans together

  void add(const Plan& plan, const RankFitRequest& request) {
    add_extra(plan, request);
    device = std::max(device, plan.device_bytes());
    arena = std::max(arena, plan.arena_bytes + plan.resident_bytes);
    parking = std::max(parking, plan.parking_bytes);
    mailboxes.resize(plan.mailbox_bytes.size(), 0);
    for (std::size_t h = 0; h < mailboxes.size(); ++h) mailboxes[h] = std::max(mailboxes[h], plan.mailbox_bytes[h]);
  }
  void add_extra(const Plan& plan, const RankFitRequest& request) {
    extra.resize(static_cast<std::size_t>(plan.hosts()), 0);
    if (!request.extra_host_bytes) return;
    for (std::size_t h = 0; h < extra.size(); ++h) extra[h] += request.extra_host_bytes(plan, static_cast<int>(h));
  }
};

// A trial with one use of memory that does not fit, or not yet known to.
struct Variant {
  std::string schedule;
  PipelineInput input;
  Need at_least;
};

struct Plans {
  Plan train, save;
  std::optional<Plan> evaluate;
  [[nodiscard]] std::vector<const Plan*> all() const {
    std::vector<const Plan*> list = {&train, &save};
    if (evaluate) list.push_back(&*evaluate);
    return list;
  }
};

class RankFitter {
 public:
  explicit RankFitter(const RankFitRequest& request) : request_(request) {}
  RankFit run();

 private:
  // A trial and the first of its uses of memory that is not known to be too much: less memory of one split, then the next
  // split.
  struct Contender {
    Trial trial;
    std::size_t thrift = 0;
    std::optional<Trial> plain;  // before its split was improved
  };
  [[nodiscard]] Plans search();
  [[nodiscard]] Plans take(const RankChoice& choice);
  void settle(Contender& contender);
  void improve(Contender& contender) const;
  [[nodiscard]] std::optional<Plans> confirm(Contender& contender);
  [[nodiscard]] Plans make_plans(const std::string& schedule, const PipelineInput& training) const;
  [[nodiscard]] Need need_of(const Plans& plans) const;
  [[nodiscard]] Need need_of(const Plan& training) const;
  [[nodiscard]] Need bound_of(const Plan& emitted) const;
  [[nodiscard]] std::vector<std::uint64_t> store_bytes(const Plan& training) const;
  [[nodiscard]] std::uint64_t host_bytes(const Plan& training, const Areas& areas) const;
  [[nodiscard]] bool fits_device(const Need& need) const {
    return request_.device_bytes == 0 || need.device <= request_.device_bytes;
  }
  [[nodiscard]] bool fits_host(const Need& need) const { return need.host <= request_.host_bytes; }
  [[nodiscard]] bool fits(const Need& need) const { return fits_device(need) && fits_host(need); }
  bool refused(Trial& trial, const Need& need);
  template <typename Cost, typename Allowed>
  [[nodiscard]] std::uint64_t least(const Cost& cost, const Allowed& allowed) const;
  [[noreturn]] void refuse() const;
  void verify_all(const Plans& plans) const;

  const RankFitRequest& request_;
  std::vector<Trial> trials_;
  std::vector<Variant> too_large_;
  std::optional<Error> rule_;  // the first of a schedule that something broke
};

void note(const Simulation& simulation, Trial& trial) {
  trial.step_seconds = simulation.step_seconds;
  trial.bubble = simulation.bubble;
  trial.exposed_optimizer_seconds = simulation.exposed_optimizer_seconds;
}

// The plain split is left out: a plan without anything special says nothing of it.
void set_split(Trial& trial, const UpdateSplit& split) {
  trial.split = split;
  trial.input.updates.clear();
  if (split == UpdateSplit{}) return;
  trial.input.updates = update_ways(*trial.input.shape, split, unit_homes(trial.schedule, trial.input));
}

Plans RankFitter::make_plans(const std::string& schedule, const PipelineInput& training) const {
  Plans plans;
  plans.train = make_schedule(schedule, training);
  PipelineInput input = training;
  input.save = true;
  plans.save = make_schedule(schedule, input);
  SPIPE_CHECK(plans.save.home_of_unit == plans.train.home_of_unit, "a save moves no unit");
  if (!request_.evaluation) return plans;
  input = training;
  input.evaluate = true;
  plans.evaluate = make_schedule(schedule, input);
  SPIPE_CHECK(plans.evaluate->home_of_unit == plans.train.home_of_unit, "an evaluation moves no unit");
  return plans;
}

// Of every host: state of the units at home there, with their second slots.
std::vector<std::uint64_t> RankFitter::store_bytes(const Plan& training) const {
  std::vector<std::uint64_t> bytes(static_cast<std::size_t>(training.hosts()), 0);
  for (std::size_t s = 0; s < training.home_of_unit.size(); ++s) {
    const int home = training.home_of_unit[s];
    if (home < 0) continue;
    const int number = static_cast<int>(s);
    const bool shadow = training.options.way(number).slots() == 2 && !request_.shadow_bytes_of_unit.empty();
    auto& host = bytes[static_cast<std::size_t>(training.host_of_rank[static_cast<std::size_t>(home)])];
    host = checked_add(host, request_.store_bytes_of_unit[s] + (shadow ? request_.shadow_bytes_of_unit[s] : 0));
  }
  for (std::uint64_t& host : bytes) host = round_up(host, 4096);  // as the store's layout is
  return bytes;
}

// Of the fullest host.
std::uint64_t RankFitter::host_bytes(const Plan& training, const Areas& areas) const {
  std::vector<std::uint64_t> bytes = store_bytes(training);
  for (std::size_t h = 0; h < bytes.size(); ++h) {
    if (!areas.mailboxes.empty()) bytes[h] = checked_add(bytes[h], areas.mailboxes[h]);
    if (!areas.extra.empty()) bytes[h] = checked_add(bytes[h], areas.extra[h]);
  }
  for (const int host : training.host_of_rank) {
    bytes[static_cast<std::size_t>(host)] += areas.parking + (request_.arena_on_host ? areas.arena : 0);
  }
  return *std::max_element(bytes.begin(), bytes.end());
}

Need RankFitter::need_of(const Plans& plans) const {
  Areas areas;
  for (const Plan* plan : plans.all()) areas.add(*plan, request_);
  return {areas.device, host_bytes(plans.train, areas)};
}

// Of the training plan alone; all plans together need no less.
Need RankFitter::need_of(const Plan& training) const {
  Areas areas;
  areas.add(training, request_);
  return {areas.device, host_bytes(training, areas)};
}

// Of a training plan before placement, which costs most of the time that a plan takes; the placed one needs no less.
Need RankFitter::bound_of(const Plan& emitted) const {
  const MemoryBound bound = memory_bound(emitted, *request_.input.shape, request_.input.grad_dtype_size);
  const Areas areas{.device = bound.device(), .arena = bound.arena + bound.resident, .parking = bound.parking, .mailboxes = {}};
  return {areas.device, host_bytes(emitted, areas)};
}

// Notes it when a trial, as it uses memory now, cannot fit.
bool RankFitter::refused(Trial& trial, const Need& need) {
  trial.device_bytes = need.device;
  trial.host_bytes = need.host;
  trial.refused.clear();
  if (!fits_device(need)) {
    trial.refused = fmt::format("needs {} of device memory", format_bytes(need.device));
  } else if (!fits_host(need)) {
    trial.refused = fmt::format("needs {} of host memory", format_bytes(need.host));
  }
  if (trial.refused.empty()) return false;
  too_large_.push_back({trial.schedule, trial.input, need});
  return true;
}

// Goes on to the first use of memory with which training fits; its step is simulated.
void RankFitter::settle(Contender& contender) {
  Trial& trial = contender.trial;
  const model::ModelShape& shape = *request_.input.shape;
  for (; contender.thrift < std::size(kThrifts) * request_.splits.size(); ++contender.thrift) {
    const Thrift& thrift = kThrifts[contender.thrift % std::size(kThrifts)];
    if (request_.park && thrift.park != *request_.park) continue;
    trial.input.prefetch = thrift.prefetch;
    trial.input.park = thrift.park;
    set_split(trial, request_.splits[contender.thrift / std::size(kThrifts)]);
    Plan plan = emit_pipeline(schedule_named(trial.schedule), trial.input);
    if (refused(trial, bound_of(plan))) continue;
    complete(plan, shape, request_.input.grad_dtype_size);
    if (refused(trial, need_of(plan))) continue;
    note(simulate(plan, shape, request_.hardware), trial);
    return;
  }
}

// Lets more units speculate, or moves updates, where the simulator says that this makes a step faster.
void RankFitter::improve(Contender& contender) const {
  const model::ModelShape& shape = *request_.input.shape;
  const Trial plain = contender.trial;
  const auto attempt = [&](const UpdateSplit& split) -> std::optional<Trial> {
    Trial trial = plain;
    set_split(trial, split);
    Plan plan = emit_pipeline(schedule_named(trial.schedule), trial.input);
    if (!fits(bound_of(plan))) return std::nullopt;
    complete(plan, shape, request_.input.grad_dtype_size);
    const Need need = need_of(plan);
    if (!fits(need)) return std::nullopt;
    trial.device_bytes = need.device;
    trial.host_bytes = need.host;
    note(simulate(plan, shape, request_.hardware), trial);
    return trial;
  };
  const UpdateSplit best = best_split(request_.split_space, plain.split, kMostSplits, [&](const UpdateSplit& split) {
    const auto trial = attempt(split);
    return trial ? trial->step_seconds : std::numeric_limits<double>::infinity();
  });
  if (best == plain.split) return;
  contender.plain = plain;
  contender.trial = *attempt(best);
}

// All plans of the job, if they fit together.
std::optional<Plans> RankFitter::confirm(Contender& contender) {
  Trial& trial = contender.trial;
  Plans plans = make_plans(trial.schedule, trial.input);
  if (!refused(trial, need_of(plans))) return plans;
  if (contender.plain) {
    trial = *contender.plain;
    contender.plain.reset();
    return std::nullopt;
  }
  ++contender.thrift;
  settle(contender);
  return std::nullopt;
}

void RankFitter::verify_all(const Plans& plans) const {
  Limits limits{.host_bytes = request_.host_bytes, .store_bytes = store_bytes(plans.train)};
  if (request_.device_bytes != 0) limits.device_bytes = request_.device_bytes;
  for (const Plan* plan : plans.all()) {
    if (const auto violation = verify(*plan, *request_.input.shape, limits)) {
      throw InternalError("verified plan", violation->message, __FILE__, __LINE__);
    }
  }
}

// The least `cost` of the complete needs that are `allowed`; UINT64_MAX if there is none. Exact: no variant needs less than is
// known of it, so the search ends when the next can be no better than the best.
template <typename Cost, typename Allowed>
std::uint64_t RankFitter::least(const Cost& cost, const Allowed& allowed) const {
  std::vector<const Variant*> order;
  for (const Variant& variant : too_large_) order.push_back(&variant);
  std::stable_sort(order.begin(), order.end(),
                   [&](const Variant* a, const Variant* b) { return cost(a->at_least) < cost(b->at_least); });
  std::uint64_t best = UINT64_MAX;
  for (const Variant* variant : order) {
    if (cost(variant->at_least) >= best) break;
    if (!allowed(variant->at_least)) continue;
    const Need need = need_of(make_plans(variant->schedule, variant->input));
    if (allowed(need)) best = std::min(best, cost(need));
  }
  return best;
}

void RankFitter::refuse() const {
  const auto device = [](const Need& need) { return need.device; };
  const auto host = [](const Need& need) { return need.host; };
  const std::uint64_t least_device = least(device, [&](const Need& need) { return fits_host(need); });
  if (least_device != UINT64_MAX) {
    throw Error(
        fmt::format("device.memory {} ({} bytes) is too small; the smallest that works is {} ({} bytes)",
                    format_bytes(request_.device_bytes), request_.device_bytes, format_bytes(least_device), least_device),
        {}, "raise device.memory to that, use more ranks, or make batch.micro, data.seq_len or the model smaller");
  }
  // The host is too small with the device as it is; or whatever the device has.
  std::uint64_t least_host = least(host, [&](const Need& need) { return fits_device(need); });
  if (least_host == UINT64_MAX) least_host = least(host, [](const Need&) { return true; });
  if (least_host != UINT64_MAX) {
    throw Error(fmt::format("device.host_memory {} ({} bytes) is too small; the smallest that works is {} ({} bytes)",
                            format_bytes(request_.host_bytes), request_.host_bytes, format_bytes(least_host), least_host),
                {}, "free host memory, raise device.host_memory, use more hosts, or train a smaller model");
  }
  // A rule of the schedule; of the one that was asked for, it is the user's business.
  if (rule_ && request_.schedule != "auto") throw Error(*rule_);
  const std::string why = trials_.empty() ? "there is nothing to try" : trials_.front().refused;
  throw Error(fmt::format("no schedule can run this on {} ranks: {}", request_.input.ranks, why), "parallel.schedule",
              "change parallel.data, batch.sum_groups, the stages, or the number of ranks");
}

Plans RankFitter::search() {
  const std::vector<std::string> schedules = request_.schedule == "auto" ? schedule_names() : std::vector{request_.schedule};
  TrialList list = list_trials(request_.input, schedules, request_.forward_stages, request_.backward_stages);
  rule_ = std::move(list.rule);
  std::vector<Contender> contenders;
  for (Trial& trial : list.trials) {
    contenders.push_back({std::move(trial)});
    if (contenders.back().trial.refused.empty()) settle(contenders.back());
  }
  if (request_.split_space.is_free()) {
    std::stable_sort(contenders.begin(), contenders.end(),
                     [](const Contender& a, const Contender& b) { return faster(a.trial, b.trial); });
    for (std::size_t i = 0; i < std::min(kImproved, contenders.size()); ++i) {
      if (contenders[i].trial.refused.empty()) improve(contenders[i]);
    }
  }
  // The fastest whose other plans fit as well. They are made only of those that come first.
  std::optional<Plans> plans;
  while (!plans) {
    const auto best = std::min_element(contenders.begin(), contenders.end(),
                                       [](const Contender& a, const Contender& b) { return faster(a.trial, b.trial); });
    if (best == contenders.end() || !best->trial.refused.empty()) break;
    plans = confirm(*best);
  }
  for (Contender& contender : contenders) trials_.push_back(std::move(contender.trial));
  std::stable_sort(trials_.begin(), trials_.end(), faster);
  if (!plans) refuse();
  return std::move(*plans);
}

Plans RankFitter::take(const RankChoice& choice) {
  Trial trial;
  trial.schedule = choice.schedule;
  trial.input = request_.input;
  trial.input.forward_cuts = choice.forward_cuts;
  trial.input.backward_cuts = choice.backward_cuts;
  trial.input.prefetch = choice.prefetch;
  trial.input.park = choice.park;
  set_split(trial, choice.updates);
  trial.forward_stages = static_cast<int>(choice.forward_cuts.size());
  trial.backward_stages = static_cast<int>(choice.backward_cuts.size());
  trials_.push_back(std::move(trial));
  return make_plans(trials_.front().schedule, trials_.front().input);
}

RankFit RankFitter::run() {
  SPIPE_CHECK(request_.store_bytes_of_unit.size() == request_.input.shape->store_units.size(), "every unit has its state");
  Plans plans = request_.choice ? take(*request_.choice) : search();
  if (!request_.choice) verify_all(plans);
  RankFit fit;
  fit.split = trials_.front().split;
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
  return {trial.schedule, input.forward_cuts, input.backward_cuts, input.prefetch, input.park, trial.split};
}

}  // namespace spipe::plan
