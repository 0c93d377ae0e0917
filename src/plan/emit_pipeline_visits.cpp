// What a visit computes.
#include <algorithm>

#include "emit_pipeline.h"
#include "spipe/base/checked.h"

namespace spipe::plan {

using model::UnitKind;

bool Pipeline::needs_parameters(const Pass& pass, int u) const {
  // The embedding's backward scatters the boundary's gradient and reads no parameters.
  return !pass.backward || unit(u).kind != UnitKind::embedding || forward_in_backward(shape_, pass.stage, u);
}

void Pipeline::use_parameters(std::vector<Use>& uses, const Step& step, int u) {
  const Run& run = rank_at(passes_[step.pass].rank).runs[step.run];
  for (const int s : unit(u).store_units) {
    if (elements(s) > 0) uses.push_back({run.fetched[static_cast<std::size_t>(s)], Access::read});
  }
}

void Pipeline::use_workspace(std::vector<Use>& uses, int rank, std::uint64_t bytes) {
  if (bytes > 0) uses.push_back({device(rank, {BufferKind::workspace, -1, -1, -1, bytes}), Access::write});
}

void Pipeline::use_constants(std::vector<Use>& uses, int rank) {
  if (shape_.constant_bytes == 0) return;
  std::uint32_t& constants = rank_at(rank).constants;
  if (constants == kNone) constants = device(rank, {BufferKind::constants, -1, -1, -1, shape_.constant_bytes});
  uses.push_back({constants, Access::read});
}

// The ranks that begin a stage at unit `u`.
std::vector<int> Pipeline::readers_of_boundary(int replica, int u) const {
  std::vector<int> readers;
  const int forward = forward_from_[static_cast<std::size_t>(u)], backward = backward_from_[static_cast<std::size_t>(u)];
  if (forward >= 0) readers.push_back(passes_[pass_index(replica, false, forward)].rank);
  if (backward >= 0) readers.push_back(passes_[pass_index(replica, true, backward)].rank);
  return readers;
}

// The place of the rank's next visit that begins with the boundary into `u`.
std::size_t Pipeline::next_reader(int rank, int u, int m) const {
  std::size_t next = SIZE_MAX;
  const int replica = replica_of(rank);
  for (const bool backward : {false, true}) {
    const int stage = (backward ? backward_from_ : forward_from_)[static_cast<std::size_t>(u)];
    if (stage < 0) continue;
    const std::size_t pass = pass_index(replica, backward, stage);
    const std::size_t place = places_[pass][static_cast<std::size_t>(m)];
    if (passes_[pass].rank == rank && place > rank_at(rank).place) next = std::min(next, place);
  }
  return next;
}

void Pipeline::boundary_made(const Step& step, int u, std::uint32_t buffer) {
  const int rank = passes_[step.pass].rank, m = step.micro_batch;
  const std::vector<int> readers = readers_of_boundary(replica_of(rank), u);
  if (readers.empty()) return;
  Copies& copies = boundaries_[index(u, m)];
  copies.device.emplace_back(rank, buffer);
  publish(copies, boundary(u, m), rank, stage_of(step), readers);
  settle(copies, boundary(u, m), rank, stage_of(step), next_reader(rank, u, m));
}

// Returns the boundary it makes.
std::uint32_t Pipeline::forward(const Step& step, int u, std::uint32_t input, std::uint32_t* saved) {
  const Pass& pass = passes_[step.pass];
  const int m = step.micro_batch;
  std::vector<Use> uses;
  use_parameters(uses, step, u);
  use_constants(uses, pass.rank);
  const bool embeds = unit(u).kind == UnitKind::embedding;
  uses.push_back({embeds ? rank_at(pass.rank).inputs[static_cast<std::size_t>(m)] : input, Access::read});
  const std::uint32_t output = device(pass.rank, boundary(u + 1, m));
  uses.push_back({output, Access::write});
  const bool saves = saved != nullptr && unit(u).saved.bytes > 0;
  if (saves) {
    *saved = device(pass.rank, {BufferKind::saved, u, m, -1, unit(u).saved.bytes});
    uses.push_back({*saved, Access::write});
  }
  use_workspace(uses, pass.rank, saves ? unit(u).save_workspace : unit(u).forward_workspace);
  std::uint16_t flags = pass.backward ? 0 : last_flag(step, u + 1 == pass.stage.end);
  if (pass.backward && u < forward_end(options_, shape_)) flags |= kRecompute;
  task(pass.rank,
       {.kind = TaskKind::forward,
        .unit = u,
        .micro_batch = m,
        .flags = flags,
        .stage = stage_of(step),
        .flops = unit(u).forward_flops},
       uses);
  return output;
}

// The head; in training with its backward, whose result is `gradient`.
void Pipeline::loss(const Step& step, std::uint32_t input, std::uint32_t* gradient) {
  const Pass& pass = passes_[step.pass];
  const int rank = pass.rank, m = step.micro_batch, u = head();
  const std::uint64_t loss_bytes = static_cast<std::uint64_t>(shape_.tokens_per_micro()) * 4;
  std::vector<Use> uses;
  use_parameters(uses, step, u);
  use_constants(uses, rank);
  uses.push_back({rank_at(rank).inputs[static_cast<std::size_t>(m)], Access::read});
  uses.push_back({input, Access::read});
  const std::uint32_t losses = device(rank, {BufferKind::token_loss, -1, m, -1, loss_bytes});
  uses.push_back({losses, Access::write});
  std::uint16_t flags = kEvaluate;
  if (training()) {
    *gradient = device(rank, boundary_gradient(-1, m));
    uses.push_back({*gradient, Access::write});
    use_gradients(uses, step, u);
    flags = place_in_group(m).second ? 0 : kAccumulate;
  }
  use_workspace(uses, rank, training() ? unit(u).backward_workspace : unit(u).forward_workspace);
  flags |= last_flag(step, pass.stage.begin == u || !training());
  task(rank,
       {.kind = TaskKind::loss,
        .unit = u,
        .micro_batch = m,
        .flags = flags,
        .stage = stage_of(step),
        .flops = training() ? unit(u).backward_flops : unit(u).forward_flops},
       uses);
  const std::uint32_t result = builder_.buffer({.kind = BufferKind::host_result,
                                                .place = Place::host,
                                                .rank = narrow<std::uint16_t>(rank),
                                                .micro_batch = m,
                                                .bytes = loss_bytes,
                                                .host = narrow<std::uint16_t>(host(rank))});
  results_[static_cast<std::size_t>(host(rank))].push_back(result);
  task(rank,
       {.kind = TaskKind::result, .stream = StreamKind::send, .micro_batch = m, .stage = stage_of(step), .bytes = loss_bytes},
       {{losses, Access::read}, {result, Access::write}});
}

void Pipeline::backward(const Step& step, int u, std::uint32_t input, std::uint32_t saved, std::uint32_t gradient) {
  const Pass& pass = passes_[step.pass];
  const int rank = pass.rank, m = step.micro_batch;
  const bool embeds = unit(u).kind == UnitKind::embedding;
  std::vector<Use> uses;
  if (!embeds) {
    use_parameters(uses, step, u);
    use_constants(uses, rank);
  }
  uses.push_back({embeds ? rank_at(rank).inputs[static_cast<std::size_t>(m)] : input, Access::read});
  if (unit(u).saved.bytes > 0) uses.push_back({saved, Access::read});
  uses.push_back({gradient, embeds ? Access::read : Access::update});
  use_gradients(uses, step, u);
  use_workspace(uses, rank, unit(u).backward_workspace);
  std::uint16_t flags = last_flag(step, u == pass.stage.begin);
  if (!place_in_group(m).second) flags |= kAccumulate;
  task(rank,
       {.kind = TaskKind::backward,
        .unit = u,
        .micro_batch = m,
        .flags = flags,
        .stage = stage_of(step),
        .flops = unit(u).backward_flops},
       uses);
}

void Pipeline::forward_visit(const Step& step) {
  const Pass& pass = passes_[step.pass];
  const int m = step.micro_batch, begin = pass.stage.begin;
  Copies& first = boundaries_[index(begin, m)];
  std::uint32_t x = kNone;
  for (const auto& [rank, buffer] : first.device) {
    if (rank == pass.rank) x = buffer;
  }
  for (int u = begin; u < pass.stage.end; ++u) {
    if (u == head()) {
      loss(step, x, nullptr);
      continue;
    }
    x = forward(step, u, x, nullptr);
    boundary_made(step, u + 1, x);
  }
  if (begin > 0) settle(first, boundary(begin, m), pass.rank, stage_of(step), next_reader(pass.rank, begin, m));
}

void Pipeline::backward_visit(const Step& step) {
  const Pass& pass = passes_[step.pass];
  const int m = step.micro_batch, rank = pass.rank, begin = pass.stage.begin, end = pass.stage.end;
  const auto here = [&](const Copies& copies) {
    for (const auto& [owner, buffer] : copies.device) {
      if (owner == rank) return buffer;
    }
    return kNone;
  };
  const auto at = [&](int u) { return static_cast<std::size_t>(u - begin); };
  std::vector<std::uint32_t> x(at(end) + 1, kNone), saved(at(end) + 1, kNone);
  x[0] = begin > 0 ? here(boundaries_[index(begin, m)]) : kNone;
  for (int u = begin; u < end; ++u) {
    if (forward_in_backward(shape_, pass.stage, u)) x[at(u) + 1] = forward(step, u, x[at(u)], &saved[at(u)]);
  }
  std::uint32_t gradient = kNone;
  if (end > head()) {
    loss(step, x[at(head())], &gradient);
  } else {
    Copies& from = gradients_[index(end, m)];
    gradient = here(from);
    std::erase_if(from.device, [&](const auto& entry) { return entry.first == rank; });
  }
  for (int u = std::min(end, head()); u-- > begin;) backward(step, u, x[at(u)], saved[at(u)], gradient);
  if (begin > 0) {
    Copies& copies = gradients_[index(begin, m)];
    copies.device.emplace_back(rank, gradient);
    const std::size_t next = pass_index(replica_of(rank), true, backward_to_[static_cast<std::size_t>(begin)]);
    publish(copies, boundary_gradient(begin, m), rank, stage_of(step), {passes_[next].rank});
    const bool stays = passes_[next].rank == rank;
    settle(copies, boundary_gradient(begin, m), rank, stage_of(step),
           stays ? places_[next][static_cast<std::size_t>(m)] : SIZE_MAX);
    settle(boundaries_[index(begin, m)], boundary(begin, m), rank, stage_of(step), next_reader(rank, begin, m));
  }
  for (int u = end; u-- > begin;) group_done(step, u);
}

}  // namespace spipe::plan
