// Tasks of the single-rank schedule with the buffers they use.
#include "spipe/base/checked.h"
#include "streaming.h"

namespace spipe::plan::streaming {

using model::UnitKind;

namespace {
constexpr int kFetchVisits = 4;  // fetches between parked boundaries go out with the first visits of a stage
}  // namespace

std::uint32_t Streaming::stored(BufferKind kind, int unit) {
  std::uint32_t& buffer = stored_[static_cast<std::size_t>(kind)][static_cast<std::size_t>(unit)];
  if (buffer == kNone) {
    const Place place = kind == BufferKind::checkpoint_file ? Place::host : Place::store;
    const std::uint64_t size = kind == BufferKind::store_compute  ? input_.compute_dtype_size
                               : kind == BufferKind::store_grad   ? input_.grad_dtype_size
                               : kind == BufferKind::store_shadow ? input_.update_bytes().slot()
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
  updates_.offloaded(s);
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

// The step's norm, and the updates that it lets go.
void Streaming::emit_norm() {
  norm_value_ = builder_.buffer({.kind = BufferKind::norm_value, .place = Place::host, .bytes = 256});
  std::vector<Use> norm_uses;
  for (int s = 0; s < shape_.store_unit_count(); ++s) {
    if (elements(s) > 0) norm_uses.push_back({stored(BufferKind::store_grad, s), Access::read});
  }
  // The step is skipped when a loss is not finite.
  for (const std::uint32_t result : results_) norm_uses.push_back({result, Access::read});
  norm_uses.push_back({norm_value_, Access::write});
  builder_.task({.kind = TaskKind::norm, .stream = StreamKind::decide}, norm_uses);
  updates_.finish({norm_value_});
}

}  // namespace spipe::plan::streaming
