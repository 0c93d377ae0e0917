// Enumerates schedules for a model and estimates their step times.
#include "candidates.h"

#include <algorithm>
#include <numeric>

#include "spipe/base/checked.h"

namespace spipe::plan {

namespace {

using model::ComputeUnit;
using model::ModelShape;
using model::UnitKind;

constexpr double kSecondsPerTask = 2e-5;  // enqueueing and waking

const ComputeUnit& unit_of(const ModelShape& shape, int u) { return shape.units[static_cast<std::size_t>(u)]; }

std::uint64_t parameter_elements(const ModelShape& shape, int u) {
  std::uint64_t elements = 0;
  for (const int s : unit_of(shape, u).store_units) elements += shape.store_units[static_cast<std::size_t>(s)].elements;
  return elements;
}

// Every number of stages up to eight, then steps of about a fifth, and the finest.
std::vector<int> stage_counts(int most) {
  std::vector<int> counts;
  for (int n = 1; n < most; n += std::max(1, n / 5)) counts.push_back(n);
  counts.push_back(most);
  return counts;
}

struct Cuts {
  std::vector<int> forward, backward;
};

std::vector<int> forward_cuts(const FitRequest& request, int end, int stages) {
  const ModelShape& shape = *request.input.shape;
  std::vector<double> weights;
  weights.reserve(static_cast<std::size_t>(end));
  for (int u = 0; u < end; ++u) weights.push_back(static_cast<double>(parameter_elements(shape, u)));
  return balanced_cuts(weights, stages);
}

std::vector<int> backward_cuts(const FitRequest& request, int stages, bool in_place) {
  const ModelShape& shape = *request.input.shape;
  std::vector<double> weights;
  for (int u = 0; u < shape.unit_count(); ++u) {
    const auto elements = static_cast<double>(in_place ? 0 : parameter_elements(shape, u));
    const double bytes_per_element = static_cast<double>(request.input.compute_dtype_size) + 4;
    weights.push_back(elements * bytes_per_element + static_cast<double>(unit_of(shape, u).saved.bytes));
  }
  return balanced_cuts(weights, stages);
}

// Times of one pass over one stage.
struct PassTime {
  double compute = 0, h2d = 0, d2h = 0;
};

class Estimate {
 public:
  Estimate(const FitRequest& request, const ScheduleOptions& options)
      : request_(request), shape_(*request.input.shape), options_(options) {}

  double seconds() {
    const int units = shape_.unit_count();
    const int fused_from = options_.evaluate ? units : options_.backward_cuts.back();
    for_each_stage(options_.forward_cuts, fused_from, false, [&](int begin, int end) { forward(begin, end); });
    if (!options_.evaluate) {
      for_each_stage(options_.backward_cuts, units, true, [&](int begin, int end) { backward(begin, end); });
    }
    if (options_.residency == Residency::in_place) {
      double compute = 0;
      for (const PassTime& pass : passes_) compute += pass.compute;
      return compute;
    }
    // The next fetch and the last offload run beside a stage; without prefetch nothing does.
    double total = passes_.front().h2d;
    for (std::size_t p = 0; p < passes_.size(); ++p) {
      const double fetch = p + 1 < passes_.size() ? passes_[p + 1].h2d : 0, offload = p > 0 ? passes_[p - 1].d2h : 0;
      const double compute = passes_[p].compute;
      total += options_.prefetch > 0 ? std::max({compute, fetch, offload}) : compute + fetch + offload;
    }
    return total + passes_.back().d2h;
  }

 private:
  template <typename Visit>
  void for_each_stage(const std::vector<int>& cuts, int end, bool descending, const Visit& visit) {
    const int count = static_cast<int>(cuts.size());
    for (int i = 0; i < count; ++i) {
      const auto stage = static_cast<std::size_t>(descending ? count - 1 - i : i);
      visit(cuts[stage], stage + 1 < cuts.size() ? cuts[stage + 1] : end);
    }
  }
  double compute_seconds(double flops, int tasks) const {
    return static_cast<double>(options_.micro_batches) * (flops / request_.matmul_flops + tasks * kSecondsPerTask);
  }
  double link_seconds(std::uint64_t bytes) const { return static_cast<double>(bytes) / request_.link_bytes; }
  std::uint64_t parked_bytes(int begin) const {
    if (!options_.park || begin == 0) return 0;
    return shape_.boundary_bytes * static_cast<std::uint64_t>(options_.micro_batches);
  }
  void forward(int begin, int end) {
    PassTime time;
    for (int u = begin; u < end; ++u) {
      time.h2d += link_seconds(parameter_elements(shape_, u) * request_.input.compute_dtype_size);
      time.compute += compute_seconds(unit_of(shape_, u).forward_flops, 1);
    }
    time.h2d += link_seconds(parked_bytes(begin));
    time.d2h += link_seconds(2 * parked_bytes(begin));
    passes_.push_back(time);
  }
  void backward(int begin, int end) {
    PassTime time;
    const bool forwards = options_.recompute || end == shape_.unit_count();
    for (int u = begin; u < end; ++u) {
      const ComputeUnit& unit = unit_of(shape_, u);
      const std::uint64_t elements = parameter_elements(shape_, u);
      const bool lone_embedding = unit.kind == UnitKind::embedding && (!forwards || end == 1);
      if (!lone_embedding) time.h2d += link_seconds(elements * request_.input.compute_dtype_size);
      time.d2h += link_seconds(elements * request_.input.grad_dtype_size);
      time.compute += compute_seconds(unit.backward_flops + (forwards && !lone_embedding ? unit.forward_flops : 0), 2);
    }
    time.h2d += link_seconds(2 * parked_bytes(begin));
    time.d2h += link_seconds(parked_bytes(begin));
    passes_.push_back(time);
  }

  const FitRequest& request_;
  const ModelShape& shape_;
  const ScheduleOptions& options_;
  std::vector<PassTime> passes_;
};

class Enumeration {
 public:
  explicit Enumeration(const FitRequest& request) : request_(request) {}

  void add(ScheduleOptions options) {
    options.micro_batches = request_.micro_batches;
    options.sum_groups = request_.sum_groups;
    const double seconds = Estimate(request_, options).seconds();
    found_.push_back({std::move(options), seconds});
  }
  std::vector<Candidate> take() {
    std::stable_sort(found_.begin(), found_.end(),
                     [](const Candidate& a, const Candidate& b) { return a.seconds < b.seconds; });
    return std::move(found_);
  }

 private:
  const FitRequest& request_;
  std::vector<Candidate> found_;
};

}  // namespace

std::vector<int> balanced_cuts(const std::vector<double>& weights, int parts) {
  const int count = static_cast<int>(weights.size());
  if (count == 0) return {};
  const auto weight = [&](int begin, int end) { return std::accumulate(weights.begin() + begin, weights.begin() + end, 0.0); };
  const auto cut_at = [&](double limit) {
    std::vector<int> cuts = {0};
    double sum = weights[0];
    for (int i = 1; i < count; ++i) {
      sum += weights[static_cast<std::size_t>(i)];
      if (sum <= limit) continue;
      cuts.push_back(i);
      sum = weights[static_cast<std::size_t>(i)];
    }
    return cuts;
  };
  // The smallest limit that few enough parts keep is near the weight of a part; bisection between bounds finds it.
  double low = *std::max_element(weights.begin(), weights.end()), high = weight(0, count);
  for (int i = 0; i < 60; ++i) {
    const double middle = low + (high - low) / 2;
    (static_cast<int>(cut_at(middle).size()) > parts ? low : high) = middle;
  }
  std::vector<int> cuts = cut_at(static_cast<int>(cut_at(low).size()) > parts ? high : low);
  // Parts may be left over: the heaviest that can be halved is.
  while (static_cast<int>(cuts.size()) < std::min(parts, count)) {
    int best = -1;
    double heaviest = -1;
    for (int p = 0; p < static_cast<int>(cuts.size()); ++p) {
      const int begin = cuts[static_cast<std::size_t>(p)];
      const int end = p + 1 < static_cast<int>(cuts.size()) ? cuts[static_cast<std::size_t>(p) + 1] : count;
      if (end - begin < 2 || weight(begin, end) <= heaviest) continue;
      heaviest = weight(begin, end);
      best = p;
    }
    const int begin = cuts[static_cast<std::size_t>(best)];
    const int end = best + 1 < static_cast<int>(cuts.size()) ? cuts[static_cast<std::size_t>(best) + 1] : count;
    int middle = begin + 1;
    while (middle + 1 < end && weight(begin, middle) < heaviest / 2) ++middle;
    cuts.insert(cuts.begin() + best + 1, middle);
  }
  return cuts;
}

std::vector<Candidate> training_candidates(const FitRequest& request) {
  const int units = request.input.shape->unit_count();
  Enumeration candidates(request);
  const bool stages_given = request.forward_stages || request.backward_stages;
  const bool may_park = request.park.value_or(true), must_park = request.park.value_or(false);
  for (const bool recompute : {false, true}) {
    if (request.recompute.value_or(recompute) != recompute) continue;
    if (!stages_given && !must_park) {
      for (const int segments : recompute ? stage_counts(units) : std::vector{1}) {
        if (recompute && segments == 1) continue;
        ScheduleOptions options{.residency = Residency::in_place, .recompute = recompute};
        options.backward_cuts = backward_cuts(request, segments, true);
        options.forward_cuts = {options.backward_cuts.begin(), options.backward_cuts.end() - 1};
        candidates.add(options);
      }
    }
    if (must_park && !recompute) continue;
    for (const int stages : request.backward_stages ? std::vector{*request.backward_stages} : stage_counts(units)) {
      ScheduleOptions options{.residency = Residency::streamed, .recompute = recompute};
      options.backward_cuts = backward_cuts(request, stages, false);
      const int end = options.backward_cuts.back();
      std::vector<int> forward_counts = {std::min(stages, end)};
      if (stages < end) forward_counts.push_back(end);
      if (request.forward_stages) forward_counts = {*request.forward_stages};
      for (const int forward_stages : forward_counts) {
        options.forward_cuts = forward_cuts(request, end, forward_stages);
        for (const int prefetch : {1, 0}) {
          for (const bool park : {false, true}) {
            if ((park && (!may_park || !recompute)) || (!park && must_park)) continue;
            options.prefetch = prefetch;
            options.park = park;
            candidates.add(options);
          }
        }
      }
    }
  }
  return candidates.take();
}

std::vector<Candidate> evaluation_candidates(const FitRequest& request) {
  const int units = request.input.shape->unit_count();
  Enumeration candidates(request);
  ScheduleOptions options{.evaluate = true};
  if (!request.forward_stages && !request.backward_stages) {
    options.forward_cuts = {0};
    candidates.add(options);
  }
  options.residency = Residency::streamed;
  for (const int stages : stage_counts(units)) {
    options.forward_cuts = forward_cuts(request, units, stages);
    for (const int prefetch : {1, 0}) {
      options.prefetch = prefetch;
      candidates.add(options);
    }
  }
  return candidates.take();
}

MemoryBound memory_bound(const FitRequest& request, const Candidate& candidate) {
  const auto bound_with = [&](int micro_batches) {
    ScheduleOptions options = candidate.options;
    options.micro_batches = micro_batches;
    return memory_bound(emit_streaming(request.input, options), *request.input.shape, request.input.grad_dtype_size);
  };
  // Sum groups of `few` and `more` micro-batches lie like those of all; fewer than four micro-batches park less.
  const int groups = request.sum_groups, all = request.micro_batches;
  const int few = std::max(4, 2 * groups) / groups * groups + groups + all % groups, more = few + groups;
  if (all <= more) return bound_with(all);
  const MemoryBound low = bound_with(few), high = bound_with(more);
  const auto steps = static_cast<std::uint64_t>((all - more) / groups);
  const auto extended = [&](std::uint64_t a, std::uint64_t b) { return b + (b - std::min(a, b)) * steps; };
  return {extended(low.arena, high.arena), high.in_place, extended(low.parking, high.parking), high.resident};
}

}  // namespace spipe::plan
