// Finds the fastest schedule that fits, or says exactly what would.
#include "spipe/plan/fit.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "candidates.h"
#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/base/units.h"
#include "spipe/plan/simulator.h"

namespace spipe::plan {

namespace {

constexpr std::uint64_t kUnlimited = UINT64_MAX;
constexpr int kMostSplits = 64;  // that are tried

struct Need {
  std::uint64_t device = kUnlimited, arena = 0, parking = 0;  // arena: with the state that stays on the device
  std::uint64_t extra = 0;                                    // of the host; known of complete plans only
};

// Of the plans that run at other times: arenas are shared, extras are not.
struct Others {
  std::uint64_t arena = 0, extra = 0;
};

Need need_of(const MemoryBound& bound) { return {bound.device(), bound.arena + bound.resident, bound.parking}; }

std::uint64_t saturated_sum(std::uint64_t a, std::uint64_t b) { return a > kUnlimited - b ? kUnlimited : a + b; }

// One kind of plan (training or evaluation) and its candidates, completed only when they have to be.
class Search {
 public:
  Search(const FitRequest& request, const std::vector<UpdateWay>& ways, std::vector<Candidate> candidates)
      : request_(request),
        store_bytes_(checked_add(request.store_bytes, shadow_bytes(ways, request.shadow_bytes_of_unit))),
        candidates_(std::move(candidates)),
        bounds_(candidates_.size()),
        plans_(candidates_.size()),
        extras_(candidates_.size()) {
    for (Candidate& candidate : candidates_) {
      candidate.options.updates = ways;
      candidate.options.piece_elements = request.piece_elements;
      candidate.options.barrier_between_steps = request.barrier_between_steps;
    }
  }

  // Bytes of host memory that a plan takes together with the others of the job.
  std::uint64_t host(const Need& need, const Others& others) const {
    const std::uint64_t arena = request_.arena_on_host ? std::max(need.arena, others.arena) : 0;
    const std::uint64_t extra = saturated_sum(need.extra, others.extra);
    return saturated_sum(saturated_sum(store_bytes_, arena), saturated_sum(need.parking, extra));
  }

  // The fastest candidate within both budgets, or -1.
  int fastest(std::uint64_t device_bytes, const Others& others) {
    for (std::size_t i = 0; i < candidates_.size(); ++i) {
      const auto fits = [&](const Need& need) {
        return need.device <= device_bytes && host(need, others) <= request_.host_bytes;
      };
      if (fits(bound(i)) && fits(need(i))) return static_cast<int>(i);
    }
    return -1;
  }

  // The candidate with the least `cost` of its need, among those whose need is `allowed`; -1 if there is none. Exact: a bound
  // never exceeds the need, so the search ends when the next bound is no better than the best plan.
  template <typename Cost, typename Allowed>
  int least(const Cost& cost, const Allowed& allowed) {
    std::vector<std::size_t> order(candidates_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    for (std::size_t i = 0; i < candidates_.size(); ++i) static_cast<void>(bound(i));
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return cost(bound(a)) < cost(bound(b)); });
    int best = -1;
    std::uint64_t best_cost = kUnlimited;
    for (const std::size_t i : order) {
      if (cost(bound(i)) >= best_cost) break;
      if (!allowed(bound(i))) continue;
      const Need whole = need(i);
      if (!allowed(whole) || cost(whole) >= best_cost) continue;
      best = static_cast<int>(i);
      best_cost = cost(whole);
    }
    return best;
  }

  [[nodiscard]] std::uint64_t store_bytes() const { return store_bytes_; }
  const Candidate& candidate(int i) const { return candidates_[static_cast<std::size_t>(i)]; }
  const Plan& plan(std::size_t i) {
    if (!plans_[i]) plans_[i] = schedule_streaming(request_.input, candidates_[i].options);
    return *plans_[i];
  }
  Need need(std::size_t i) {
    const Plan& whole = plan(i);
    if (!extras_[i]) extras_[i] = request_.extra_host_bytes ? request_.extra_host_bytes(whole) : 0;
    return {whole.device_bytes(), whole.arena_bytes + whole.resident_bytes, whole.parking_bytes, *extras_[i]};
  }
  Need bound(std::size_t i) {
    if (!bounds_[i]) bounds_[i] = need_of(memory_bound(request_, candidates_[i]));
    return *bounds_[i];
  }
  // The least device bytes that a candidate of this sort needs, before placement; for explanations.
  template <typename Sort>
  std::uint64_t least_bound(const Sort& sort) {
    std::uint64_t least = kUnlimited;
    for (std::size_t i = 0; i < candidates_.size(); ++i) {
      if (sort(candidates_[i].options)) least = std::min(least, bound(i).device);
    }
    return least;
  }

 private:
  const FitRequest& request_;
  const std::uint64_t store_bytes_;
  std::vector<Candidate> candidates_;
  std::vector<std::optional<Need>> bounds_;
  std::vector<std::optional<Plan>> plans_;
  std::vector<std::optional<std::uint64_t>> extras_;
};

void check_request(const FitRequest& request) {
  SPIPE_CHECK(request.input.shape != nullptr, "a plan is fitted to a model");
  const int units = request.input.shape->unit_count();
  const auto check_stages = [&](const std::optional<int>& stages, const char* key) {
    if (!stages || (*stages >= 1 && *stages <= units)) return;
    throw Error(fmt::format("{} stages for a model of {} units (embedding, layers, head)", *stages, units), key,
                fmt::format("give a number from 1 to {}, or leave it out", units));
  };
  check_stages(request.forward_stages, "parallel.forward_stages");
  check_stages(request.backward_stages, "parallel.backward_stages");
  if (request.park.value_or(false) && !request.recompute.value_or(true)) {
    throw Error("train.park is on and train.recompute is off, but only boundaries that are recomputed from can be parked",
                "train.park", "set train.recompute to true or auto, or train.park to auto");
  }
}

// What training and evaluation together find.
class Fit {
 public:
  Fit(const FitRequest& request, const UpdateSplit& split)
      : request_(request),
        split_(split),
        // The plain split is left out of the options: a plan without anything special says nothing of it.
        ways_(split == UpdateSplit{} ? std::vector<UpdateWay>{} : update_ways(*request.input.shape, split)),
        train_(request, ways_, training_candidates(request)),
        evaluate_(request, ways_, request.evaluation ? evaluation_candidates(request) : std::vector<Candidate>{}) {}

  // Nothing when nothing fits; refuse() then says what would.
  std::optional<FitResult> run() {
    const std::uint64_t budget = this->budget();
    int evaluation = -1;
    if (request_.evaluation) {
      evaluation = evaluate_.fastest(budget, {});
      if (evaluation < 0) return std::nullopt;
    }
    int training = train_.fastest(budget, others(evaluation));
    if (training < 0 && request_.evaluation) {
      // A slower evaluation with a smaller arena may leave the host enough.
      evaluation = smallest_evaluation(budget);
      training = train_.fastest(budget, others(evaluation));
    }
    if (training < 0) {
      // Bounds pass over candidates quickly; that nothing fits is decided by complete plans.
      const Found found = smallest_within_host();
      if (found.training < 0 || found.device > budget) return std::nullopt;
      training = found.training;
    }
    FitResult result;
    result.split = split_;
    result.train = train_.plan(static_cast<std::size_t>(training));
    if (evaluation >= 0) result.evaluate = evaluate_.plan(static_cast<std::size_t>(evaluation));
    result.arena_bytes = std::max(result.train.arena_bytes, result.evaluate ? result.evaluate->arena_bytes : 0);
    result.reason = reason(train_.candidate(training).options, budget);
    return result;
  }

  // Device bytes below which nothing fits within the host's budget; the most there is when nothing ever does.
  std::uint64_t smallest() { return smallest_within_host().device; }

  [[noreturn]] void refuse() {
    const std::uint64_t budget = this->budget();
    const Found found = smallest_within_host();
    if (found.training < 0) refuse_host(budget);
    throw Error(fmt::format("device.memory {} ({} bytes) is too small; the smallest that works is {} ({} bytes)",
                            format_bytes(budget), budget, format_bytes(found.device), found.device),
                {}, "raise device.memory to that, or make batch.micro, data.seq_len or the model smaller");
  }

 private:
  struct Found {
    int training = -1;
    std::uint64_t device = kUnlimited;
  };

  [[nodiscard]] std::uint64_t budget() const { return request_.device_bytes == 0 ? kUnlimited : request_.device_bytes; }
  // What an evaluation leaves less for the training beside it.
  Others others(int evaluation) {
    if (evaluation < 0) return {};
    const Need need = evaluate_.need(static_cast<std::size_t>(evaluation));
    return {need.arena, need.extra};
  }
  // The evaluation that takes least of the host.
  int smallest_evaluation(std::uint64_t device_bytes) {
    const bool on_host = request_.arena_on_host;
    return evaluate_.least([&](const Need& need) { return saturated_sum(on_host ? need.arena : 0, need.extra); },
                           [&](const Need& need) { return need.device <= device_bytes; });
  }
  Found smallest_within_host() {
    Found found;
    std::uint64_t evaluation_device = 0;
    if (request_.evaluation) {
      const int evaluation = evaluate_.least([](const Need& need) { return need.device; },
                                             [&](const Need& need) { return evaluate_.host(need, {}) <= request_.host_bytes; });
      if (evaluation < 0) return found;
      evaluation_device = evaluate_.plan(static_cast<std::size_t>(evaluation)).device_bytes();
    }
    // A device as large as training needs leaves the choice of the evaluation; the one that takes least of the host decides.
    found.training = train_.least([](const Need& need) { return need.device; },
                                  [&](const Need& need) {
                                    const std::uint64_t device = std::max(need.device, evaluation_device);
                                    const int evaluation = request_.evaluation ? smallest_evaluation(device) : -1;
                                    return train_.host(need, others(evaluation)) <= request_.host_bytes;
                                  });
    if (found.training >= 0) {
      const std::uint64_t device = train_.plan(static_cast<std::size_t>(found.training)).device_bytes();
      found.device = std::max(device, evaluation_device);
    }
    return found;
  }

  // The host is too small whatever the device has; or, with the given device memory, for all plans that fit there.
  [[noreturn]] void refuse_host(std::uint64_t budget) {
    std::uint64_t smallest = kUnlimited;
    for (const std::uint64_t device : {budget, kUnlimited}) {
      const int evaluation = request_.evaluation ? smallest_evaluation(device) : -1;
      if (request_.evaluation && evaluation < 0) continue;
      const Others beside = others(evaluation);
      const int training = train_.least([&](const Need& need) { return train_.host(need, beside); },
                                        [&](const Need& need) { return need.device <= device; });
      if (training < 0) continue;
      smallest = train_.host(train_.need(static_cast<std::size_t>(training)), beside);
      break;
    }
    throw Error(fmt::format("device.host_memory {} ({} bytes) is too small; the smallest that works is {} ({} bytes: store {}, "
                            "the rest for {})",
                            format_bytes(request_.host_bytes), request_.host_bytes, format_bytes(smallest), smallest,
                            format_bytes(train_.store_bytes()),
                            request_.arena_on_host ? "arena, parking and staging" : "parking and staging"),
                {}, "free host memory, raise device.host_memory, or train a smaller model");
  }

  // Why the plan is no simpler: each setting that was forced, with what the least plan without it would have needed.
  std::string reason(const ScheduleOptions& chosen, std::uint64_t budget) {
    std::string text;
    const auto add = [&](const std::string& setting, bool wished, const char* what, const auto& otherwise) {
      if (!text.empty()) text += "; ";
      const std::uint64_t would_need = train_.least_bound(otherwise);
      if (wished) {
        text += setting + ": as configured";
      } else if (would_need == kUnlimited) {
        text += setting + ": follows from the configuration";
      } else if (would_need > budget) {
        text += fmt::format("{}: {} would need {} of {}", setting, what, format_bytes(would_need), format_bytes(budget));
      } else if (request_.host_bytes != kUnlimited) {
        text += fmt::format("{}: best for host memory of {}", setting, format_bytes(request_.host_bytes));
      } else {
        text += setting + ": fastest by the cost model";
      }
    };
    const bool streamed = chosen.residency == Residency::streamed;
    if (streamed) {
      add(fmt::format("streaming {} forward and {} backward stages", chosen.forward_cuts.size(), chosen.backward_cuts.size()),
          request_.forward_stages || request_.backward_stages || request_.park.value_or(false), "parameters in place",
          [&](const ScheduleOptions& other) {
            return other.residency == Residency::in_place && other.recompute == chosen.recompute;
          });
    }
    if (chosen.recompute) {
      add("recompute on", request_.recompute.has_value(), "activations",
          [&](const ScheduleOptions& other) { return other.residency == chosen.residency && !other.recompute; });
    }
    const auto like_chosen = [&](const ScheduleOptions& other) {
      return other.residency == chosen.residency && other.recompute == chosen.recompute &&
             other.backward_cuts == chosen.backward_cuts && other.forward_cuts == chosen.forward_cuts;
    };
    if (chosen.park) {
      add("parking on", request_.park.has_value(), "kept boundaries",
          [&](const ScheduleOptions& other) { return like_chosen(other) && other.prefetch == chosen.prefetch && !other.park; });
    }
    if (streamed && chosen.prefetch == 0) {
      add("no prefetch", false, "a stage fetched ahead",
          [&](const ScheduleOptions& other) { return like_chosen(other) && other.prefetch > 0 && other.park == chosen.park; });
    }
    if (!text.empty()) return text;
    return budget == kUnlimited ? "no device budget: parameters are used in place"
                                : "everything fits: parameters are used in place";
  }

  const FitRequest& request_;
  const UpdateSplit split_;
  const std::vector<UpdateWay> ways_;
  Search train_, evaluate_;
};

// The split that takes the least of the device.
struct Smallest {
  UpdateSplit split;
  std::uint64_t device = kUnlimited;
};

Smallest smallest(const FitRequest& request) {
  SPIPE_CHECK(!request.splits.empty(), "a fit has a split to try");
  Smallest best{.split = request.splits.back()};
  for (const UpdateSplit& split : request.splits) {
    const std::uint64_t device = Fit(request, split).smallest();
    if (device < best.device) best = {split, device};
  }
  return best;
}

}  // namespace

std::uint64_t shadow_bytes(const std::vector<UpdateWay>& ways, const std::vector<std::uint64_t>& of_unit) {
  std::uint64_t bytes = 0;
  for (std::size_t s = 0; s < ways.size() && s < of_unit.size(); ++s) {
    if (ways[s].slots() == 2) bytes = checked_add(bytes, of_unit[s]);
  }
  return bytes;
}

namespace {

// The same plan with the split that the simulator finds fastest.
FitResult improve(const FitRequest& request, FitResult plain) {
  FitRequest narrow = request;
  const ScheduleOptions& chosen = plain.train.options;
  narrow.recompute = chosen.recompute;
  narrow.park = chosen.park;
  if (chosen.residency == Residency::streamed) {
    narrow.forward_stages = static_cast<int>(chosen.forward_cuts.size());
    narrow.backward_stages = static_cast<int>(chosen.backward_cuts.size());
  }
  const UpdateSplit best = best_split(request.split_space, plain.split, kMostSplits, [&](const UpdateSplit& split) {
    const auto found = Fit(narrow, split).run();
    if (!found) return std::numeric_limits<double>::infinity();
    return simulate(found->train, *request.input.shape, request.hardware).step_seconds;
  });
  if (best == plain.split) return plain;
  FitResult result = std::move(*Fit(narrow, best).run());
  result.reason = std::move(plain.reason);
  return result;
}

}  // namespace

FitResult fit(const FitRequest& request) {
  check_request(request);
  for (const UpdateSplit& split : request.splits) {
    auto result = Fit(request, split).run();
    if (!result) continue;
    return request.split_space.is_free() ? improve(request, std::move(*result)) : std::move(*result);
  }
  Fit(request, smallest(request).split).refuse();
}

std::uint64_t smallest_budget(const FitRequest& request) {
  check_request(request);
  const Smallest found = smallest(request);
  if (found.device == kUnlimited) Fit(request, found.split).refuse();
  return found.device;
}

}  // namespace spipe::plan
