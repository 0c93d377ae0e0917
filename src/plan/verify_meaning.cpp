// Runs the plan with symbols in place of numbers, one task after another in program order, and demands at every task that its
// operands mean what the task needs.
#include "verify_meaning.h"

#include <algorithm>

namespace spipe::plan::verification {

namespace {

constexpr std::uint32_t kUnset = UINT32_MAX;

}  // namespace

using model::ComputeUnit;
using model::UnitKind;

Meaning::Meaning(const Subject& subject)
    : subject_(subject),
      options_(subject.plan.options),
      held_(subject.plan.buffers.size()),
      stages_(static_cast<std::size_t>(subject.shape.store_unit_count()), Stage::committed),
      unloaded_(stages_.size(), 0),
      prepared_(stages_.size(), false),
      result_host_(static_cast<std::size_t>(options_.micro_batches), -1) {
  for (const Task& task : subject.plan.tasks) {
    if (task.kind == TaskKind::result) result_host_[static_cast<std::size_t>(task.micro_batch)] = subject.host(task);
  }
  std::vector<std::uint32_t> gradient_plane(stages_.size(), kUnset);
  for (std::uint32_t b = 0; b < subject.plan.buffers.size(); ++b) {
    const Buffer& buffer = subject.plan.buffers[b];
    memory_.push_back(b);
    const bool in_plane = buffer.place == Place::store &&
                          (buffer.kind == BufferKind::gradient || buffer.kind == BufferKind::store_grad) && buffer.unit >= 0 &&
                          buffer.unit < subject.shape.store_unit_count();
    if (!in_plane) continue;
    std::uint32_t& plane = gradient_plane[static_cast<std::size_t>(buffer.unit)];
    if (plane == kUnset) plane = b;
    memory_.back() = plane;
  }
}

std::pair<int, int> Meaning::group(int m) const {
  const auto count = static_cast<std::int64_t>(options_.micro_batches), groups = static_cast<std::int64_t>(options_.sum_groups);
  std::int64_t begin = 0;
  for (std::int64_t g = 1; g <= groups; ++g) {
    const std::int64_t end = g * count / groups;
    if (m < end) return {static_cast<int>(begin), static_cast<int>(end)};
    begin = end;
  }
  return {static_cast<int>(begin), static_cast<int>(count)};
}

const Use* Meaning::reads(const Task& task, const Content& content) const {
  for (const Use& use : subject_.uses(task)) {
    if (use.access != Access::write && held(use) == content) return &use;
  }
  return nullptr;
}

const Use* Meaning::use_of(const Task& task, BufferKind kind, Access access, int unit) const {
  for (const Use& use : subject_.uses(task)) {
    const Buffer& buffer = subject_.buffer(use);
    if (buffer.kind == kind && use.access == access && (unit < 0 || buffer.unit == unit)) return &use;
  }
  return nullptr;
}

Finding Meaning::needs_place(const Task& task, const Use* use, std::uint64_t bytes, const char* what) const {
  if (use == nullptr) return bad(2, task, fmt::format("has no buffer for its {}", what));
  const Buffer& buffer = subject_.buffer(*use);
  if (buffer.place == Place::device && buffer.bytes < bytes) {
    return bad(6, task, fmt::format("needs {} bytes for its {}, the buffer has {}", bytes, what, buffer.bytes));
  }
  return std::nullopt;
}

Finding Meaning::needs_parameters(const Task& task) {
  for (const int s : unit(task.unit).store_units) {
    if (subject_.elements(s) == 0) continue;
    if (const Use* in_place = use_of(task, BufferKind::store_compute, Access::read, s)) {
      if (subject_.buffer(*in_place).place == Place::store && stage(s) == Stage::committed) continue;
      return bad(1, task, fmt::format("uses parameters of {} in place after their update", subject_.store_name(s)));
    }
    const Use* use = reads(task, {.kind = Kind::parameters, .unit = s});
    if (use == nullptr) {
      return bad(1, task,
                 fmt::format("reads parameters of {} that are not there: no fetch before it, or overwritten since",
                             subject_.store_name(s)));
    }
    const std::uint64_t bytes = subject_.elements(s) * dtype_size(subject_.shape.compute);
    if (auto found = needs_place(task, use, bytes, "parameters")) return found;
  }
  return std::nullopt;
}

Finding Meaning::needs_workspace(const Task& task, std::uint64_t bytes) {
  if (bytes == 0) return std::nullopt;
  return needs_place(task, use_of(task, BufferKind::workspace, Access::write), bytes, "workspace");
}

Finding Meaning::adds_gradient(const Task& task, int s, const Use& use) {
  const int m = task.micro_batch;
  const auto [begin, end] = group(m);
  const Content& sum = held(use);
  const Content sum_before{.kind = Kind::gradient, .unit = s, .source = task.unit, .from = begin, .to = m};
  const bool accumulates = (task.flags & kAccumulate) != 0;
  if (accumulates != (use.access == Access::update)) {
    return bad(3, task, fmt::format("adds to the gradient of {} and says it does not, or the reverse", subject_.store_name(s)));
  }
  if (m == begin && accumulates) return bad(3, task, "adds to a gradient that has no first contribution");
  if (m > begin && (!accumulates || sum != sum_before)) {
    return bad(3, task,
               fmt::format("contributes micro-batch {} of {} to a sum that does not hold micro-batches {}..{} alone", m,
                           subject_.store_name(s), begin, m - 1));
  }
  put(use, {.kind = Kind::gradient, .unit = s, .source = task.unit, .from = begin, .to = m + 1});
  return needs_place(task, &use, subject_.elements(s) * 4, "gradient");
}

Finding Meaning::adds_gradients(const Task& task) {
  for (const int s : unit(task.unit).store_units) {
    if (subject_.elements(s) == 0) continue;
    const Use* target = nullptr;
    for (const Use& use : subject_.uses(task)) {
      const Buffer& buffer = subject_.buffer(use);
      const bool gradient = buffer.kind == BufferKind::gradient || buffer.kind == BufferKind::gradient_partial;
      if (!gradient || buffer.unit != s || use.access == Access::read) continue;
      if (target != nullptr) return bad(3, task, fmt::format("adds to two gradients of {}", subject_.store_name(s)));
      target = &use;
    }
    if (target == nullptr) return bad(3, task, fmt::format("leaves its gradient of {} nowhere", subject_.store_name(s)));
    if (auto found = adds_gradient(task, s, *target)) return found;
  }
  return std::nullopt;
}

Finding Meaning::input(const Task& task) {
  const Use* use = use_of(task, BufferKind::input, Access::write);
  const Use* source = use_of(task, BufferKind::host_input, Access::read);
  if (source == nullptr || subject_.buffer(*source).micro_batch != task.micro_batch) {
    return bad(2, task, "does not read its micro-batch from the host");
  }
  if (auto found = needs_place(task, use, subject_.shape.input_bytes, "tokens")) return found;
  put(*use, {.kind = Kind::input, .micro_batch = task.micro_batch});
  return std::nullopt;
}

Finding Meaning::fetch(const Task& task) {
  const Use* source = use_of(task, BufferKind::store_compute, Access::read, task.unit);
  const Use* target = use_of(task, BufferKind::parameters, Access::write, task.unit);
  const Use* message = reads(task, {.kind = Kind::parameters, .unit = task.unit});  // from another host
  if (task.unit < 0 || (source == nullptr) == (message == nullptr) || target == nullptr) {
    return bad(1, task, "does not copy its unit to the device");
  }
  if (stage(task.unit) != Stage::committed) return bad(1, task, "fetches parameters after their update");
  put(*target, {.kind = Kind::parameters, .unit = task.unit});
  return std::nullopt;
}

Finding Meaning::forward(const Task& task) {
  const int u = task.unit, m = task.micro_batch;
  const ComputeUnit& own = unit(u);
  if (own.kind == UnitKind::head) return bad(2, task, "is a forward of the head, which has only a loss");
  if (auto found = needs_parameters(task)) return found;
  const Content needed = own.kind == UnitKind::embedding ? Content{.kind = Kind::input, .micro_batch = m}
                                                         : Content{.kind = Kind::boundary, .unit = u, .micro_batch = m};
  if (reads(task, needed) == nullptr) return bad(2, task, "runs before its input exists, or after it was overwritten");
  const Use* output = use_of(task, BufferKind::boundary, Access::write, u + 1);
  if (auto found = needs_place(task, output, subject_.shape.boundary_bytes, "output")) return found;
  const Use* saved = own.saved.bytes > 0 ? use_of(task, BufferKind::saved, Access::write) : nullptr;
  if (saved != nullptr) {
    if (auto found = needs_place(task, saved, own.saved.bytes, "saved activations")) return found;
    put(*saved, {.kind = Kind::saved, .unit = u, .micro_batch = m});
  }
  put(*output, {.kind = Kind::boundary, .unit = u + 1, .micro_batch = m});
  return needs_workspace(task, saved != nullptr ? own.save_workspace : own.forward_workspace);
}

Finding Meaning::loss(const Task& task) {
  const int u = task.unit, m = task.micro_batch;
  if (auto found = needs_parameters(task)) return found;
  if (reads(task, {.kind = Kind::input, .micro_batch = m}) == nullptr) return bad(2, task, "runs without its targets");
  if (reads(task, {.kind = Kind::boundary, .unit = u, .micro_batch = m}) == nullptr) {
    return bad(2, task, "runs before its input exists, or after it was overwritten");
  }
  const Use* losses = use_of(task, BufferKind::token_loss, Access::write);
  const auto loss_bytes = static_cast<std::uint64_t>(subject_.shape.tokens_per_micro()) * 4;
  if (auto found = needs_place(task, losses, loss_bytes, "token losses")) return found;
  put(*losses, {.kind = Kind::token_loss, .micro_batch = m});
  if (((task.flags & kEvaluate) != 0) != options_.evaluate) return bad(2, task, "mixes training and evaluation");
  if (options_.evaluate) return needs_workspace(task, unit(u).forward_workspace);
  const Use* output = use_of(task, BufferKind::boundary_gradient, Access::write);
  if (auto found = needs_place(task, output, subject_.shape.boundary_bytes, "boundary gradient")) return found;
  put(*output, {.kind = Kind::boundary_gradient, .unit = u, .micro_batch = m});
  if (auto found = adds_gradients(task)) return found;
  return needs_workspace(task, unit(u).backward_workspace);
}

Finding Meaning::backward(const Task& task) {
  const int u = task.unit, m = task.micro_batch;
  const ComputeUnit& own = unit(u);
  const bool embeds = own.kind == UnitKind::embedding;
  if (!embeds) {
    if (auto found = needs_parameters(task)) return found;
  }
  const Content input =
      embeds ? Content{.kind = Kind::input, .micro_batch = m} : Content{.kind = Kind::boundary, .unit = u, .micro_batch = m};
  if (reads(task, input) == nullptr) return bad(2, task, "runs without its unit's input");
  if (own.saved.bytes > 0 && reads(task, {.kind = Kind::saved, .unit = u, .micro_batch = m}) == nullptr) {
    return bad(2, task, "runs without saved activations: no forward of this unit before it saved them, or overwritten since");
  }
  const Use* gradient = reads(task, {.kind = Kind::boundary_gradient, .unit = u + 1, .micro_batch = m});
  if (gradient == nullptr) return bad(2, task, "runs before the gradient of its output exists");
  if (!embeds) {
    const Use* output =
        gradient->access == Access::update ? gradient : use_of(task, BufferKind::boundary_gradient, Access::write);
    if (auto found = needs_place(task, output, subject_.shape.boundary_bytes, "boundary gradient")) return found;
    put(*output, {.kind = Kind::boundary_gradient, .unit = u, .micro_batch = m});
  }
  if (auto found = adds_gradients(task)) return found;
  return needs_workspace(task, own.backward_workspace);
}

Finding Meaning::reduce(const Task& task) {
  const Use* from = nullptr;
  const Use* into = nullptr;
  for (const Use& use : subject_.uses(task)) {
    if (held(use).kind != Kind::gradient || held(use).unit != task.unit) continue;
    if (use.access == Access::read) from = &use;
    if (use.access == Access::update) into = &use;
  }
  if (from == nullptr || into == nullptr) return bad(3, task, "has no two sums to add");
  const Content& partial = held(*from);
  Content total = held(*into);
  const bool whole_group = group(partial.from) == std::pair{partial.from, partial.to};
  if (!whole_group || total.source != partial.source || total.from != 0 || total.to != partial.from) {
    return bad(3, task,
               fmt::format("adds micro-batches {}..{} of {} to a sum of {}..{}: groups are added whole and in order",
                           partial.from, partial.to - 1, subject_.store_name(task.unit), total.from, total.to - 1));
  }
  total.to = partial.to;
  put(*into, total);
  return std::nullopt;
}

Finding Meaning::move(const Task& task) {
  const auto uses = subject_.uses(task);
  if (uses.size() != 2 || uses[0].access != Access::read || uses[1].access != Access::write) {
    return bad(2, task, "does not copy one buffer to another");
  }
  const Buffer& from = subject_.buffer(uses[0]);
  const Buffer& to = subject_.buffer(uses[1]);
  const bool leaves = task.kind == TaskKind::park || task.kind == TaskKind::send;
  const bool parks = task.kind == TaskKind::park || task.kind == TaskKind::unpark;
  const BufferKind far = parks ? BufferKind::parked : BufferKind::mailbox;
  if ((leaves ? to : from).kind != far || (leaves ? from : to).place != Place::device) {
    return bad(2, task, parks ? "does not copy between device and parking" : "does not copy between device and mailbox");
  }
  if (held(uses[0]).kind == Kind::nothing) return bad(2, task, "copies a buffer that holds nothing");
  if (from.bytes != to.bytes) return bad(6, task, fmt::format("copies {} bytes into {}", from.bytes, to.bytes));
  put(uses[1], held(uses[0]));
  return std::nullopt;
}

Finding Meaning::step(const Task& task) {
  switch (task.kind) {
    case TaskKind::input:
      return input(task);
    case TaskKind::fetch:
      return fetch(task);
    case TaskKind::forward:
      return forward(task);
    case TaskKind::loss:
      return loss(task);
    case TaskKind::backward:
      return backward(task);
    case TaskKind::reduce:
      return reduce(task);
    case TaskKind::park:
    case TaskKind::unpark:
    case TaskKind::send:
    case TaskKind::recv:
      return move(task);
    case TaskKind::offload:
      return offload(task);
    case TaskKind::result:
      return result(task);
    case TaskKind::norm:
      return norm(task);
    case TaskKind::load:
      return load(task);
    case TaskKind::optimize:
      return optimize(task);
    case TaskKind::unload:
      return unload(task);
    case TaskKind::commit:
      return commit(task);
    case TaskKind::save:
      return save(task);
    case TaskKind::push:
      return push(task);
    case TaskKind::pull:
      return pull(task);
  }
  return bad(5, task, "is of no known kind");
}

Finding Meaning::run() {
  for (const Task& task : subject_.plan.tasks) {
    put_.clear();
    if (auto found = step(task)) return found;
    // Whatever else the task overwrites holds nothing that anybody may read.
    for (const Use& use : subject_.uses(task)) {
      const std::uint32_t memory = memory_[use.buffer];
      if (use.access != Access::read && std::find(put_.begin(), put_.end(), memory) == put_.end()) held_[memory] = {};
    }
  }
  return std::nullopt;
}

Finding check_meaning(const Subject& subject) { return Meaning(subject).run(); }

}  // namespace spipe::plan::verification
