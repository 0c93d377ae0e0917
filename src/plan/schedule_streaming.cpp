// The single-rank schedule. A training step is a list of visits: a forward or backward stage for one micro-batch. In place,
// the visits of one micro-batch follow each other; streamed, the visits of one stage do, between a fetch and an offload.
// What has to last from stage to stage (boundaries, their gradients, a tied matrix's first gradient) may be parked in between.
#include <algorithm>
#include <utility>

#include "memory.h"
#include "spipe/base/checked.h"
#include "streaming.h"

namespace spipe::plan {

namespace streaming {

using model::ModelShape;
using model::UnitKind;

namespace {

std::vector<Range> ranges_of(const std::vector<int>& cuts, int end) {
  std::vector<Range> ranges;
  for (std::size_t i = 0; i < cuts.size(); ++i) ranges.push_back({cuts[i], i + 1 < cuts.size() ? cuts[i + 1] : end});
  return ranges;
}

// Ascending, from 0, below `end`; empty when there is nothing to cut.
std::vector<int> normalised(std::vector<int> cuts, int end) {
  cuts.push_back(0);
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  SPIPE_CHECK(cuts.front() == 0, "stages are cut at units");
  cuts.erase(std::lower_bound(cuts.begin(), cuts.end(), end), cuts.end());
  return cuts;
}

// Options as they are carried out: cuts complete, and nothing that has no effect.
ScheduleOptions resolved(ScheduleOptions options, const ModelShape& shape) {
  SPIPE_CHECK(options.micro_batches >= 1 && options.sum_groups >= 1 && options.prefetch >= 0, "a step has micro-batches");
  SPIPE_CHECK(shape.unit_count() >= 2, "a model has an embedding and a head");
  const int units = shape.unit_count();
  const bool in_place = options.residency == Residency::in_place;
  options.park = options.park && options.recompute && !in_place && !options.evaluate;
  if (in_place) options.prefetch = 0;
  if (options.evaluate) {
    options.backward_cuts.clear();
    options.recompute = false;
    options.save = false;
    options.forward_cuts = in_place ? std::vector<int>{0} : normalised(options.forward_cuts, units);
    return options;
  }
  // The head is computed once, in the last backward stage, whose forward is its recompute.
  if (in_place && !options.recompute) options.backward_cuts.clear();
  options.backward_cuts = normalised(options.backward_cuts, units);
  options.forward_cuts = normalised(in_place ? options.backward_cuts : options.forward_cuts, options.backward_cuts.back());
  return options;
}

}  // namespace

Streaming::Streaming(const ScheduleInput& input, const ScheduleOptions& options)
    : input_(input),
      shape_(*input.shape),
      options_(resolved(options, shape_)),
      builder_(options_, 1, shape_.store_unit_count(), shape_.unit_count()),
      updates_(builder_, shape_, options_, input.update_bytes(),
               {.stored = [this](BufferKind kind, int s) { return stored(kind, s); },
                .home = [](int) { return 0; },
                .host = [](int) { return 0; },
                .task = [this](int, const Task& task, const std::vector<Use>& uses) { builder_.task(task, uses); }}) {
  const auto units = static_cast<std::size_t>(shape_.unit_count());
  const auto stores = static_cast<std::size_t>(shape_.store_unit_count());
  const auto micro_batches = static_cast<std::size_t>(options_.micro_batches);
  boundaries_.resize((units + 1) * micro_batches);
  saved_.assign(units * micro_batches, kNone);
  inputs_.assign(micro_batches, kNone);
  boundary_gradients_.resize(micro_batches);
  stored_.assign(static_cast<std::size_t>(BufferKind::checkpoint_file) + 1, std::vector<std::uint32_t>(stores, kNone));
  gradients_.resize(stores);
  sources_left_.resize(stores);
  for (std::size_t s = 0; s < stores; ++s) {
    sources_left_[s] = shape_.gradient_sources(static_cast<int>(s)).size();
    gradients_[s].resize(sources_left_[s]);
  }
  const int forward_end = training() ? options_.backward_cuts.back() : shape_.unit_count();
  const std::vector<Range> forward = ranges_of(options_.forward_cuts, forward_end);
  for (std::size_t f = 0; f < forward.size(); ++f) passes_.push_back({false, static_cast<int>(f), forward[f]});
  const std::vector<Range> backward = ranges_of(options_.backward_cuts, shape_.unit_count());
  for (std::size_t b = backward.size(); b-- > 0;) passes_.push_back({true, static_cast<int>(b), backward[b]});
  fetched_.resize(passes_.size());
}

int Streaming::group_of(int micro_batch) const {
  // Group g holds micro-batches floor(g M / G) .. floor((g + 1) M / G) - 1.
  const std::int64_t groups = options_.sum_groups, count = options_.micro_batches;
  std::int64_t group = micro_batch * groups / count;
  while ((group + 1) * count / groups <= micro_batch) ++group;
  return static_cast<int>(group);
}

bool Streaming::has_forward_in_backward(const Pass& pass, int u) const {
  if (u == head() || (!options_.recompute && pass.units.end <= head())) return false;
  // The stage's last unit is repeated only for what it saves; the others also for the next unit's input.
  return u + 1 < pass.units.end || unit(u).saved.bytes > 0;
}

bool Streaming::needs_parameters(const Pass& pass, int u) const {
  // The embedding's backward scatters the boundary's gradient and reads no parameters.
  return !pass.backward || unit(u).kind != UnitKind::embedding || has_forward_in_backward(pass, u);
}

std::vector<int> Streaming::store_units_of(const Pass& pass) const {
  std::vector<int> list;
  for (int u = pass.units.begin; u < pass.units.end; ++u) {
    if (!needs_parameters(pass, u)) continue;
    for (const int s : unit(u).store_units) {
      if (elements(s) > 0 && std::find(list.begin(), list.end(), s) == list.end()) list.push_back(s);
    }
  }
  if (pass.backward && pass.units.end <= head() && !options_.recompute) std::reverse(list.begin(), list.end());
  return list;
}

void Streaming::park(Kept& kept, int unit, int m, int stage) {
  const bool is_gradient = m < 0;
  const std::uint64_t bytes = is_gradient ? elements(unit) * 4 : shape_.boundary_bytes;
  if (kept.parked == kNone) {
    kept.parked =
        builder_.buffer({.kind = BufferKind::parked, .place = Place::host, .unit = unit, .micro_batch = m, .bytes = bytes});
    builder_.task({.kind = TaskKind::park,
                   .stream = StreamKind::d2h,
                   .unit = unit,
                   .micro_batch = m,
                   .stage = narrow<std::uint16_t>(stage),
                   .bytes = bytes},
                  {{kept.device, Access::read}, {kept.parked, Access::write}});
  }
  kept.device = kNone;
}

void Streaming::unpark(Kept& kept, int unit, int m, int stage) {
  if (kept.device != kNone || kept.parked == kNone) return;
  const bool is_gradient = m < 0;
  const bool is_boundary_gradient = !is_gradient && &kept == &boundary_gradients_[static_cast<std::size_t>(m)];
  const BufferKind kind = is_gradient            ? BufferKind::gradient
                          : is_boundary_gradient ? BufferKind::boundary_gradient
                                                 : BufferKind::boundary;
  const std::uint64_t bytes = is_gradient ? elements(unit) * 4 : shape_.boundary_bytes;
  const int source = is_gradient ? shape_.gradient_sources(unit)[0] : -1;
  kept.device = device(kind, is_boundary_gradient ? -1 : unit, m, bytes, source);
  builder_.task({.kind = TaskKind::unpark,
                 .stream = StreamKind::h2d,
                 .unit = unit,
                 .micro_batch = m,
                 .stage = narrow<std::uint16_t>(stage),
                 .bytes = bytes},
                {{kept.parked, Access::read}, {kept.device, Access::write}});
  if (is_boundary_gradient) kept.parked = kNone;  // the next stage changes it
}

// A tensor is parked when its use is far enough away for the way there and back to pass beside compute.
bool Streaming::worth_parking(std::size_t passes_until_use) const {
  const std::size_t visits = passes_until_use * static_cast<std::size_t>(options_.micro_batches);
  return visits >= (options_.prefetch > 0 ? 3U : 2U);
}

// After the boundary into `unit` was written or read in a pass: parks it until the next pass that starts with it.
void Streaming::park_boundary(const Pass& pass, int unit, int m) {
  if (!options_.park) return;
  std::size_t reader = number(pass) + 1;
  while (reader < passes_.size() && passes_[reader].units.begin != unit) ++reader;
  if (reader == passes_.size() || !worth_parking(reader - number(pass))) return;
  Kept& kept = boundary(unit, m);
  if (kept.parked != kNone) {
    kept.device = kNone;
  } else {
    parkings_.push_back({&kept, unit, m, pass.stage});
  }
}

// Brings back what a visit reads from earlier stages.
void Streaming::unpark_for(const Pass& pass, int m) {
  if (!options_.park) return;
  if (pass.units.begin > 0) unpark(boundary(pass.units.begin, m), pass.units.begin, m, pass.stage);
  if (pass.backward && pass.units.end <= head()) {
    unpark(boundary_gradients_[static_cast<std::size_t>(m)], pass.units.end, m, pass.stage);
  }
}

void Streaming::emit_forward_visit(const Pass& pass, int m) {
  for (int u = pass.units.begin; u < pass.units.end; ++u) {
    if (u == head()) {
      emit_loss(pass, m);
      continue;
    }
    emit_forward(pass, u, m, training() && !options_.recompute, false);
    park_boundary(pass, u + 1, m);
  }
  if (pass.units.begin > 0) park_boundary(pass, pass.units.begin, m);
}

void Streaming::emit_backward_visit(const Pass& pass, int m) {
  const bool last_stage = pass.units.end > head();
  for (int u = pass.units.begin; u < pass.units.end; ++u) {
    if (has_forward_in_backward(pass, u)) emit_forward(pass, u, m, true, !last_stage);
  }
  if (last_stage) emit_loss(pass, m);
  for (int u = std::min(pass.units.end, head()); u-- > pass.units.begin;) emit_backward(pass, u, m);
  if (options_.park && pass.units.begin > 0 && worth_parking(1)) {
    parkings_.push_back({&boundary_gradients_[static_cast<std::size_t>(m)], pass.units.begin, m, pass.stage});
  }
}

// With stages fetched ahead, copies to the host are placed later in program order, so that compute does not wait for the bytes
// they free: parking one visit later; offloads by one stage, or by its first visit where parking wants the same stream.
void Streaming::end_of_visit(std::size_t pass, int m) {
  const bool late = options_.prefetch > 0 && pass + 1 < passes_.size();
  const auto flush_parkings = [&](std::vector<Parking>& list) {
    for (const Parking& p : list) park(*p.kept, p.unit, p.micro_batch, p.stage);
    list.clear();
  };
  const auto flush_offloads = [&](std::vector<Offload>& list) {
    for (const Offload& o : list) emit_offload(o.store_unit, o.stage);
    list.clear();
  };
  flush_parkings(late_parkings_);
  if (options_.park || last_visit(m)) flush_offloads(late_offloads_);
  if (late) {
    std::swap(parkings_, late_parkings_);
    if (last_visit(m)) std::swap(offloads_, late_offloads_);
  }
  flush_parkings(parkings_);
  flush_offloads(offloads_);
}

Plan Streaming::emit() {
  updates_.add_residents();
  if (options_.save) emit_saves();
  if (!in_place()) {
    for (int m = 0; m < options_.micro_batches; ++m) emit_inputs(m);
  }
  // Visits in order.
  std::vector<std::pair<std::size_t, int>> visits;
  for (std::size_t p = 0; p < (in_place() ? 1 : passes_.size()); ++p) {
    for (int m = 0; m < options_.micro_batches; ++m) {
      if (!in_place()) visits.emplace_back(p, m);
      for (std::size_t q = 0; in_place() && q < passes_.size(); ++q) visits.emplace_back(q, m);
    }
  }
  const auto ahead = static_cast<std::size_t>(options_.prefetch);
  for (std::size_t i = 0; i < visits.size(); ++i) {
    const auto [p, m] = visits[i];
    // What is needed now first. What is fetched ahead goes out at once, or unit by unit between the boundaries that come back
    // from parking on the same stream.
    for (std::size_t q = p; q < std::min(passes_.size(), p + ahead + 1); ++q) {
      const bool spread = q == p + ahead && options_.park && ahead > 0 && p > 0;
      if (m == 0 || spread) emit_fetches(q, spread ? m : options_.micro_batches);
    }
    if (in_place()) {
      emit_inputs(m);
      emit_inputs(m + 1);
    }
    unpark_for(passes_[p], m);
    if (ahead > 0 && i + 1 < visits.size()) unpark_for(passes_[visits[i + 1].first], visits[i + 1].second);
    parameters_ = &fetched_[p];
    if (passes_[p].backward) {
      emit_backward_visit(passes_[p], m);
    } else {
      emit_forward_visit(passes_[p], m);
    }
    end_of_visit(p, m);
  }
  if (training()) emit_norm();
  return builder_.take();
}

}  // namespace streaming

Plan emit_streaming(const ScheduleInput& input, const ScheduleOptions& options) {
  SPIPE_CHECK(input.shape != nullptr, "a schedule is made for a model");
  return streaming::Streaming(input, options).emit();
}

Plan schedule_streaming(const ScheduleInput& input, const ScheduleOptions& options) {
  Plan plan = emit_streaming(input, options);
  complete(plan, *input.shape, input.grad_dtype_size);
  return plan;
}

}  // namespace spipe::plan
