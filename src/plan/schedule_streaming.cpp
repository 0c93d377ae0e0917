// The single-rank schedule. A training step is a list of visits: a forward or backward stage for one micro-batch. In place,
// the visits of one micro-batch follow each other; streamed, the visits of one stage do, between a fetch and an offload.
// What has to last from stage to stage (boundaries, their gradients, a tied matrix's first gradient) may be parked in between.
#include <algorithm>
#include <utility>

#include "memory.h"
#include "spipe/base/checked.h"
#include "spipe/plan/builder.h"

namespace spipe::plan {

namespace {

using model::ComputeUnit;
using model::ModelShape;
using model::UnitKind;

constexpr std::uint32_t kNone = UINT32_MAX;
constexpr int kFetchVisits = 4;  // fetches between parked boundaries go out with the first visits of a stage

struct Range {
  int begin = 0, end = 0;
};

// One pass over one stage; a visit is one micro-batch of it.
struct Pass {
  bool backward = false;
  int stage = 0;
  Range units;
};

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

class Streaming {
 public:
  Streaming(const ScheduleInput& input, const ScheduleOptions& options);
  Plan emit();

 private:
  // A tensor that outlives the visit that made it: on the device, parked, or both.
  struct Kept {
    std::uint32_t device = kNone, parked = kNone;
  };
  struct Gradient {
    Kept total;
    std::uint32_t partial = kNone;
  };

  // Emission.
  void emit_inputs(int micro_batch);
  void emit_fetches(std::size_t pass, int visits);
  void emit_forward_visit(const Pass& pass, int micro_batch);
  void emit_backward_visit(const Pass& pass, int micro_batch);
  void emit_forward(const Pass& pass, int unit, int micro_batch, bool saves, bool repeats);
  void emit_loss(const Pass& pass, int micro_batch);
  void emit_backward(const Pass& pass, int unit, int micro_batch);
  void emit_reduces(const Pass& pass, int unit, int micro_batch);
  void emit_offload(int store_unit, int stage);
  void emit_updates();
  void emit_saves();
  void park(Kept& kept, int unit, int micro_batch, int stage);
  void unpark(Kept& kept, int unit, int micro_batch, int stage);
  void unpark_for(const Pass& pass, int micro_batch);
  void park_boundary(const Pass& pass, int unit, int micro_batch);
  bool worth_parking(std::size_t passes_until_use) const;
  void end_of_visit(std::size_t pass, int micro_batch);

  // Uses.
  void use_parameters(std::vector<Use>& uses, int unit);
  void use_gradients(std::vector<Use>& uses, int unit, int micro_batch);
  void use_workspace(std::vector<Use>& uses, std::uint64_t bytes);
  void use_constants(std::vector<Use>& uses);
  std::uint32_t stored(BufferKind kind, int unit);
  std::uint32_t device(BufferKind kind, int unit, int micro_batch, std::uint64_t bytes, int source = -1);
  Gradient& gradient(int store_unit, int source);

  // Facts.
  const ComputeUnit& unit(int u) const { return shape_.units[static_cast<std::size_t>(u)]; }
  std::uint64_t elements(int s) const { return shape_.store_units[static_cast<std::size_t>(s)].elements; }
  int head() const { return shape_.unit_count() - 1; }
  bool in_place() const { return options_.residency == Residency::in_place; }
  bool training() const { return !options_.evaluate; }
  bool last_visit(int micro_batch) const { return micro_batch + 1 == options_.micro_batches; }
  int group_of(int micro_batch) const;
  bool first_of_group(int m) const { return m == 0 || group_of(m) != group_of(m - 1); }
  bool last_of_group(int m) const { return last_visit(m) || group_of(m) != group_of(m + 1); }
  bool is_first_group(int m) const { return group_of(m) == group_of(0); }
  bool has_forward_in_backward(const Pass& pass, int u) const;
  bool needs_parameters(const Pass& pass, int u) const;
  std::vector<int> store_units_of(const Pass& pass) const;
  std::size_t number(const Pass& pass) const { return static_cast<std::size_t>(&pass - passes_.data()); }
  std::uint16_t last_flag(bool last_unit, int m) const { return last_unit && last_visit(m) ? kLastOfStage : 0; }
  Kept& boundary(int u, int m) { return boundaries_[index(u, m)]; }
  std::size_t index(int u, int m) const {
    return static_cast<std::size_t>(u) * static_cast<std::size_t>(options_.micro_batches) + static_cast<std::size_t>(m);
  }

  const ScheduleInput& input_;
  const ModelShape& shape_;
  const ScheduleOptions options_;
  Builder builder_;
  std::vector<Pass> passes_;
  std::uint32_t constants_ = kNone;
  std::vector<std::vector<std::uint32_t>> fetched_;  // per pass and store unit: the parameters' buffer
  const std::vector<std::uint32_t>* parameters_ = nullptr;
  std::vector<Kept> boundaries_;                  // into unit u, micro-batch m
  std::vector<std::uint32_t> saved_, inputs_;     // per (unit, micro-batch), per micro-batch
  std::vector<Kept> boundary_gradients_;          // per micro-batch
  std::vector<std::vector<Gradient>> gradients_;  // per store unit, per source in canonical order
  std::vector<std::size_t> sources_left_;
  std::vector<std::vector<std::uint32_t>> stored_;  // per kind and unit
  std::uint32_t norm_value_ = kNone;
  std::vector<std::uint32_t> results_;  // per micro-batch
  struct Offload {
    int store_unit = 0, stage = 0;
  };
  std::vector<Offload> offloads_, late_offloads_;
  struct Parking {
    Kept* kept = nullptr;
    int unit = 0, micro_batch = 0, stage = 0;
  };
  std::vector<Parking> parkings_, late_parkings_;
};

Streaming::Streaming(const ScheduleInput& input, const ScheduleOptions& options)
    : input_(input),
      shape_(*input.shape),
      options_(resolved(options, shape_)),
      builder_(options_, 1, shape_.store_unit_count(), shape_.unit_count()) {
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

std::uint32_t Streaming::stored(BufferKind kind, int unit) {
  std::uint32_t& buffer = stored_[static_cast<std::size_t>(kind)][static_cast<std::size_t>(unit)];
  if (buffer == kNone) {
    const Place place = kind == BufferKind::checkpoint_file ? Place::host : Place::store;
    const std::uint64_t size = kind == BufferKind::store_compute ? input_.compute_dtype_size
                               : kind == BufferKind::store_grad  ? input_.grad_dtype_size
                                                                 : input_.state_bytes_per_element;
    buffer = builder_.buffer({.kind = kind, .place = place, .unit = unit, .bytes = elements(unit) * size});
  }
  return buffer;
}

std::uint32_t Streaming::device(BufferKind kind, int unit, int micro_batch, std::uint64_t bytes, int source) {
  return builder_.buffer({.kind = kind, .unit = unit, .micro_batch = micro_batch, .source = source, .bytes = bytes});
}

Streaming::Gradient& Streaming::gradient(int store_unit, int source) {
  const std::vector<int> sources = shape_.gradient_sources(store_unit);
  const auto at = std::find(sources.begin(), sources.end(), source);
  SPIPE_CHECK(at != sources.end(), "a compute unit contributes to the store units it lists");
  return gradients_[static_cast<std::size_t>(store_unit)][static_cast<std::size_t>(at - sources.begin())];
}

void Streaming::use_parameters(std::vector<Use>& uses, int u) {
  for (const int s : unit(u).store_units) {
    if (elements(s) == 0) continue;
    const std::uint32_t buffer =
        in_place() ? stored(BufferKind::store_compute, s) : (*parameters_)[static_cast<std::size_t>(s)];
    uses.push_back({buffer, Access::read});
  }
}

void Streaming::use_gradients(std::vector<Use>& uses, int u, int m) {
  const bool one_group = group_of(0) == group_of(options_.micro_batches - 1);
  for (const int s : unit(u).store_units) {
    if (elements(s) == 0) continue;
    Gradient& sums = gradient(s, u);
    const bool first = first_of_group(m);
    const bool into_total = is_first_group(m);
    if (first && into_total) {
      const bool in_store = in_place() && one_group && input_.grad_dtype_size == 4 && shape_.gradient_sources(s)[0] == u;
      sums.total.device = builder_.buffer({.kind = BufferKind::gradient,
                                           .place = in_store ? Place::store : Place::device,
                                           .unit = s,
                                           .source = u,
                                           .bytes = elements(s) * 4});
    } else if (first) {
      sums.partial = device(BufferKind::gradient_partial, s, -1, elements(s) * 4, u);
    }
    uses.push_back({into_total ? sums.total.device : sums.partial, first ? Access::write : Access::update});
  }
}

void Streaming::use_workspace(std::vector<Use>& uses, std::uint64_t bytes) {
  if (bytes > 0) uses.push_back({device(BufferKind::workspace, -1, -1, bytes), Access::write});
}

void Streaming::use_constants(std::vector<Use>& uses) {
  if (shape_.constant_bytes == 0) return;
  if (constants_ == kNone) constants_ = device(BufferKind::constants, -1, -1, shape_.constant_bytes);
  uses.push_back({constants_, Access::read});
}

void Streaming::emit_inputs(int m) {
  if (m >= options_.micro_batches || inputs_[static_cast<std::size_t>(m)] != kNone) return;
  const std::uint32_t on_host =
      builder_.buffer({.kind = BufferKind::host_input, .place = Place::host, .micro_batch = m, .bytes = shape_.input_bytes});
  const std::uint32_t buffer = device(BufferKind::input, -1, m, shape_.input_bytes);
  inputs_[static_cast<std::size_t>(m)] = buffer;
  builder_.task({.kind = TaskKind::input, .stream = StreamKind::h2d, .micro_batch = m, .bytes = shape_.input_bytes},
                {{on_host, Access::read}, {buffer, Access::write}});
}

// The fetches of `pass` that are due `visits` visits after they may start.
void Streaming::emit_fetches(std::size_t pass, int visits) {
  if (in_place()) return;
  auto& buffers = fetched_[pass];
  buffers.resize(static_cast<std::size_t>(shape_.store_unit_count()), kNone);
  const std::vector<int> list = store_units_of(passes_[pass]);
  for (std::size_t i = 0; i < list.size(); ++i) {
    const int s = list[i];
    std::uint32_t& buffer = buffers[static_cast<std::size_t>(s)];
    const int due = static_cast<int>(i) * std::min(options_.micro_batches, kFetchVisits) / static_cast<int>(list.size());
    if (buffer != kNone || due > visits) continue;
    // A unit that the pass before still holds (a tied matrix between the first and the last stage) is not fetched twice.
    if (pass > 0) buffer = fetched_[pass - 1][static_cast<std::size_t>(s)];
    if (buffer != kNone) continue;
    const std::uint64_t bytes = elements(s) * input_.compute_dtype_size;
    buffer = device(BufferKind::parameters, s, -1, bytes);
    builder_.task({.kind = TaskKind::fetch,
                   .stream = StreamKind::h2d,
                   .unit = s,
                   .stage = narrow<std::uint16_t>(passes_[pass].stage),
                   .bytes = bytes},
                  {{stored(BufferKind::store_compute, s), Access::read}, {buffer, Access::write}});
  }
}

void Streaming::emit_forward(const Pass& pass, int u, int m, bool saves, bool repeats) {
  std::vector<Use> uses;
  use_parameters(uses, u);
  use_constants(uses);
  const bool embeds = unit(u).kind == UnitKind::embedding;
  uses.push_back({embeds ? inputs_[static_cast<std::size_t>(m)] : boundary(u, m).device, Access::read});
  boundary(u + 1, m) = {device(BufferKind::boundary, u + 1, m, shape_.boundary_bytes), kNone};
  uses.push_back({boundary(u + 1, m).device, Access::write});
  saves = saves && unit(u).saved.bytes > 0;
  if (saves) {
    saved_[index(u, m)] = device(BufferKind::saved, u, m, unit(u).saved.bytes);
    uses.push_back({saved_[index(u, m)], Access::write});
  }
  use_workspace(uses, saves ? unit(u).save_workspace : unit(u).forward_workspace);
  std::uint16_t flags = repeats ? kRecompute : 0;
  if (!pass.backward) flags |= last_flag(u + 1 == pass.units.end, m);
  builder_.task({.kind = TaskKind::forward,
                 .unit = u,
                 .micro_batch = m,
                 .flags = flags,
                 .stage = narrow<std::uint16_t>(pass.stage),
                 .flops = unit(u).forward_flops},
                uses);
}

void Streaming::emit_loss(const Pass& pass, int m) {
  const int u = head();
  std::vector<Use> uses;
  use_parameters(uses, u);
  use_constants(uses);
  uses.push_back({inputs_[static_cast<std::size_t>(m)], Access::read});
  uses.push_back({boundary(u, m).device, Access::read});
  const std::uint64_t loss_bytes = static_cast<std::uint64_t>(shape_.tokens_per_micro()) * 4;
  const std::uint32_t losses = device(BufferKind::token_loss, -1, m, loss_bytes);
  uses.push_back({losses, Access::write});
  std::uint16_t flags = last_flag(pass.units.begin == u, m);
  if (training()) {
    Kept& output = boundary_gradients_[static_cast<std::size_t>(m)];
    output.device = device(BufferKind::boundary_gradient, -1, m, shape_.boundary_bytes);
    uses.push_back({output.device, Access::write});
    use_gradients(uses, u, m);
    if (!first_of_group(m)) flags |= kAccumulate;
  } else {
    flags = kEvaluate | last_flag(true, m);
  }
  use_workspace(uses, training() ? unit(u).backward_workspace : unit(u).forward_workspace);
  const double flops = unit(u).forward_flops + (training() ? unit(u).backward_flops : 0);
  const auto stage = narrow<std::uint16_t>(pass.stage);
  builder_.task({.kind = TaskKind::loss, .unit = u, .micro_batch = m, .flags = flags, .stage = stage, .flops = flops}, uses);
  results_.push_back(
      builder_.buffer({.kind = BufferKind::host_result, .place = Place::host, .micro_batch = m, .bytes = loss_bytes}));
  builder_.task({.kind = TaskKind::result, .stream = StreamKind::d2h, .micro_batch = m, .stage = stage, .bytes = loss_bytes},
                {{losses, Access::read}, {results_.back(), Access::write}});
  if (training()) emit_reduces(pass, u, m);
}

void Streaming::emit_backward(const Pass& pass, int u, int m) {
  std::vector<Use> uses;
  const bool embeds = unit(u).kind == UnitKind::embedding;
  if (!embeds) use_parameters(uses, u);
  use_constants(uses);
  uses.push_back({embeds ? inputs_[static_cast<std::size_t>(m)] : boundary(u, m).device, Access::read});
  if (unit(u).saved.bytes > 0) uses.push_back({saved_[index(u, m)], Access::read});
  uses.push_back({boundary_gradients_[static_cast<std::size_t>(m)].device, embeds ? Access::read : Access::update});
  use_gradients(uses, u, m);
  use_workspace(uses, unit(u).backward_workspace);
  std::uint16_t flags = last_flag(u == pass.units.begin, m);
  if (!first_of_group(m)) flags |= kAccumulate;
  builder_.task({.kind = TaskKind::backward,
                 .unit = u,
                 .micro_batch = m,
                 .flags = flags,
                 .stage = narrow<std::uint16_t>(pass.stage),
                 .flops = unit(u).backward_flops},
                uses);
  emit_reduces(pass, u, m);
}

// After the last micro-batch of a group: its sum joins the total; after the last of all: the unit's gradient can leave.
void Streaming::emit_reduces(const Pass& pass, int u, int m) {
  if (!last_of_group(m)) return;
  for (const int s : unit(u).store_units) {
    if (elements(s) == 0) continue;
    Gradient& sums = gradient(s, u);
    if (!is_first_group(m)) {
      builder_.task({.kind = TaskKind::reduce,
                     .unit = s,
                     .micro_batch = m,
                     .stage = narrow<std::uint16_t>(pass.stage),
                     .bytes = elements(s) * 12},
                    {{sums.partial, Access::read}, {sums.total.device, Access::update}});
    }
    if (!last_visit(m)) continue;
    if (--sources_left_[static_cast<std::size_t>(s)] == 0) {
      offloads_.push_back({s, pass.stage});
    } else if (options_.park && pass.units.begin > 0 && worth_parking(passes_.size() - 1 - number(pass))) {
      parkings_.push_back({&sums.total, s, -1, pass.stage});
    }
  }
}

void Streaming::emit_offload(int s, int stage) {
  std::vector<Use> uses;
  for (Gradient& sums : gradients_[static_cast<std::size_t>(s)]) {
    if (sums.total.device == kNone) unpark(sums.total, s, -1, stage);
    uses.push_back({sums.total.device, Access::read});
  }
  uses.push_back({stored(BufferKind::store_grad, s), Access::write});
  builder_.task({.kind = TaskKind::offload,
                 .stream = StreamKind::d2h,
                 .unit = s,
                 .stage = narrow<std::uint16_t>(stage),
                 .bytes = elements(s) * input_.grad_dtype_size},
                uses);
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

void Streaming::emit_saves() {
  for (int s = 0; s < shape_.store_unit_count(); ++s) {
    if (elements(s) == 0) continue;
    builder_.task(
        {.kind = TaskKind::save, .stream = StreamKind::io, .unit = s, .bytes = elements(s) * input_.state_bytes_per_element},
        {{stored(BufferKind::store_compute, s), Access::read},
         {stored(BufferKind::store_state, s), Access::read},
         {stored(BufferKind::checkpoint_file, s), Access::write}});
  }
}

void Streaming::emit_updates() {
  norm_value_ = builder_.buffer({.kind = BufferKind::norm_value, .place = Place::host, .bytes = 256});
  std::vector<Use> norm_uses;
  for (int s = 0; s < shape_.store_unit_count(); ++s) {
    if (elements(s) > 0) norm_uses.push_back({stored(BufferKind::store_grad, s), Access::read});
  }
  // The step is skipped when a loss is not finite.
  for (const std::uint32_t result : results_) norm_uses.push_back({result, Access::read});
  norm_uses.push_back({norm_value_, Access::write});
  builder_.task({.kind = TaskKind::norm, .stream = StreamKind::cpu}, norm_uses);
  // In the order in which the next step needs them.
  std::vector<bool> done(static_cast<std::size_t>(shape_.store_unit_count()), false);
  for (int u = 0; u < shape_.unit_count(); ++u) {
    for (const int s : unit(u).store_units) {
      if (elements(s) == 0 || done[static_cast<std::size_t>(s)]) continue;
      done[static_cast<std::size_t>(s)] = true;
      const std::uint32_t parameters = stored(BufferKind::store_compute, s);
      const std::uint64_t state_bytes = elements(s) * (2 * input_.state_bytes_per_element + input_.grad_dtype_size);
      builder_.task({.kind = TaskKind::optimize, .stream = StreamKind::cpu, .unit = s, .bytes = state_bytes},
                    {{norm_value_, Access::read},
                     {stored(BufferKind::store_grad, s), Access::read},
                     {stored(BufferKind::store_state, s), Access::update},
                     {parameters, Access::update}});
      builder_.task({.kind = TaskKind::commit, .stream = StreamKind::cpu, .unit = s}, {{parameters, Access::update}});
    }
  }
}

Plan Streaming::emit() {
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
  if (training()) emit_updates();
  return builder_.take();
}

}  // namespace

Plan emit_streaming(const ScheduleInput& input, const ScheduleOptions& options) {
  SPIPE_CHECK(input.shape != nullptr, "a schedule is made for a model");
  return Streaming(input, options).emit();
}

Plan schedule_streaming(const ScheduleInput& input, const ScheduleOptions& options) {
  Plan plan = emit_streaming(input, options);
  complete(plan, *input.shape, input.grad_dtype_size);
  return plan;
}

}  // namespace spipe::plan
