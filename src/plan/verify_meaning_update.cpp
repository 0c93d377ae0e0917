// What the tasks of an update mean: from the gradients of all micro-batches to the parameters of the next step, within a host
// and between hosts.
#include <algorithm>

#include "verify_meaning.h"

namespace spipe::plan::verification {

Finding Meaning::needs_share(const Task& task, int host) {
  for (int s = 0; s < subject_.shape.store_unit_count(); ++s) {
    const bool here =
        subject_.plan.ranks == 1 ||
        (subject_.elements(s) > 0 &&
         subject_.plan.host_of_rank[static_cast<std::size_t>(subject_.plan.home_of_unit[static_cast<std::size_t>(s)])] == host);
    if (!here || subject_.elements(s) == 0 || reads(task, {.kind = Kind::final_gradient, .unit = s}) != nullptr) continue;
    return bad(3, task, fmt::format("leaves out the gradient of {}, or comes before its offload", subject_.store_name(s)));
  }
  for (int m = 0; m < options_.micro_batches; ++m) {
    if (result_host_[static_cast<std::size_t>(m)] != host) continue;
    if (reads(task, {.kind = Kind::token_loss, .micro_batch = m}) != nullptr) continue;
    return bad(3, task, fmt::format("leaves out the losses of micro-batch {}, or comes before they are there", m));
  }
  return std::nullopt;
}

Finding Meaning::push(const Task& task) {
  const auto uses = subject_.uses(task);
  const Use* wire = use_of(task, BufferKind::wire, Access::write);
  if (wire == nullptr || uses.size() < 2) return bad(5, task, "has no message");
  const Use& first = uses[0];
  const Buffer& source = subject_.buffer(first);
  if (source.kind == BufferKind::mailbox && uses.size() == 2) {
    if (held(first).kind == Kind::nothing) return bad(2, task, "sends a mailbox that holds nothing");
    if (source.bytes != subject_.buffer(*wire).bytes) return bad(5, task, "sends another number of bytes than its source has");
    put(*wire, held(first));
    return std::nullopt;
  }
  if (source.kind == BufferKind::store_compute && uses.size() == 2) {
    if (source.unit != task.unit) return bad(1, task, "sends the parameters of another unit");
    if (stage(task.unit) != Stage::committed) return bad(1, task, "sends parameters after their update");
    put(*wire, {.kind = Kind::parameters, .unit = source.unit});
    return std::nullopt;
  }
  if (auto found = needs_share(task, subject_.host(task))) return found;
  put(*wire, {.kind = Kind::norm_part, .source = subject_.host(task)});
  return std::nullopt;
}

Finding Meaning::pull(const Task& task) {
  const auto uses = subject_.uses(task);
  if (uses.size() != 2 || uses[0].access != Access::read || uses[1].access != Access::write) {
    return bad(5, task, "does not copy one message");
  }
  const Buffer& wire = subject_.buffer(uses[0]);
  const Buffer& target = subject_.buffer(uses[1]);
  if (held(uses[0]).kind == Kind::nothing) return bad(5, task, "takes a message that nobody has sent");
  if (wire.kind != BufferKind::wire || wire.bytes != target.bytes) {
    return bad(5, task, fmt::format("takes a message of {} bytes into {}", wire.bytes, target.bytes));
  }
  put(uses[1], held(uses[0]));
  return std::nullopt;
}

Finding Meaning::offload(const Task& task) {
  const int s = task.unit;
  const std::vector<int> sources = subject_.shape.gradient_sources(s);
  std::vector<const Use*> sums;
  for (const Use& use : subject_.uses(task)) {
    if (use.access == Access::read && subject_.buffer(use).kind == BufferKind::gradient) sums.push_back(&use);
  }
  if (sums.size() != sources.size()) {
    return bad(3, task, fmt::format("adds {} gradients of a unit that has {}", sums.size(), sources.size()));
  }
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const Content complete{.kind = Kind::gradient, .unit = s, .source = sources[i], .from = 0, .to = options_.micro_batches};
    if (held(*sums[i]) == complete) continue;
    return bad(3, task,
               fmt::format("takes as part {} something else than the whole gradient that {} gives to {}", i + 1,
                           unit(sources[i]).name, subject_.store_name(s)));
  }
  const Use* target = use_of(task, BufferKind::store_grad, Access::write, s);
  if (target == nullptr) return bad(3, task, "does not write the store's gradient");
  put(*target, {.kind = Kind::final_gradient, .unit = s});
  return std::nullopt;
}

Finding Meaning::result(const Task& task) {
  const Use* target = use_of(task, BufferKind::host_result, Access::write);
  const bool complete = target != nullptr && subject_.buffer(*target).micro_batch == task.micro_batch &&
                        reads(task, {.kind = Kind::token_loss, .micro_batch = task.micro_batch}) != nullptr;
  if (!complete) return bad(2, task, "does not bring its micro-batch's token losses to the host");
  put(*target, {.kind = Kind::token_loss, .micro_batch = task.micro_batch});
  return std::nullopt;
}

Finding Meaning::norm(const Task& task) {
  const Plan& plan = subject_.plan;
  const int own = subject_.host(task);
  if (auto found = needs_share(task, own)) return found;
  std::vector<bool> gives(static_cast<std::size_t>(plan.hosts()), false);
  for (const int home : plan.home_of_unit) {
    if (home >= 0) gives[static_cast<std::size_t>(plan.host_of_rank[static_cast<std::size_t>(home)])] = true;
  }
  for (const int host : result_host_) gives[static_cast<std::size_t>(host)] = true;
  for (int host = 0; host < plan.hosts(); ++host) {
    if (host == own || !gives[static_cast<std::size_t>(host)]) continue;
    if (reads(task, {.kind = Kind::norm_part, .source = host}) == nullptr) {
      return bad(3, task, fmt::format("leaves out what host {} gives to the norm", host));
    }
  }
  const Use* target = use_of(task, BufferKind::norm_value, Access::write);
  if (target == nullptr) return bad(3, task, "leaves its norm nowhere");
  put(*target, {.kind = Kind::norm});
  return std::nullopt;
}

// What every part of an update needs: the norm, unless it speculates.
Finding Meaning::may_update(const Task& task) {
  const UpdateWay way = options_.way(task.unit);
  if (stage(task.unit) != Stage::committed && stage(task.unit) != Stage::updating) {
    return bad(3, task, "updates a unit that is updated already");
  }
  const bool speculates = (task.flags & kSpeculate) != 0;
  if (speculates != way.speculate) return bad(3, task, "speculates where its unit does not, or the reverse");
  if (!speculates && reads(task, {.kind = Kind::norm}) == nullptr) return bad(3, task, "runs before the step's norm is known");
  return std::nullopt;
}

Finding Meaning::load(const Task& task) {
  const int s = task.unit;
  if (auto found = may_update(task)) return found;
  if (reads(task, {.kind = Kind::final_gradient, .unit = s}) == nullptr) {
    return bad(3, task, "runs before its gradient is there");
  }
  const bool resident = options_.way(s).placement == Placement::resident;
  const Use* gradient = use_of(task, BufferKind::store_grad, Access::read, s);
  const Use* state = use_of(task, BufferKind::store_state, Access::read, s);
  if (gradient == nullptr || (!resident && state == nullptr)) return bad(3, task, "does not bring its unit's state");
  const bool master_is_parameters = subject_.shape.compute == DType::f32;
  if (!resident && master_is_parameters && use_of(task, BufferKind::store_compute, Access::read, s) == nullptr) {
    return bad(3, task, "does not bring its unit's parameters");
  }
  const Use* target = use_of(task, BufferKind::state_piece, Access::write, s);
  const std::uint64_t begin = task.piece * options_.piece_elements;
  if (target == nullptr || begin >= subject_.elements(s)) return bad(3, task, "brings no piece of its unit to the device");
  const std::uint64_t length = std::min(options_.piece_elements, subject_.elements(s) - begin);
  std::uint64_t each = subject_.buffer(*gradient).bytes / subject_.elements(s);
  if (!resident) each += subject_.buffer(*state).bytes / subject_.elements(s);
  if (auto found = needs_place(task, target, length * each, "piece of the state")) return found;
  put(*target, {.kind = Kind::state_piece, .unit = s, .from = task.piece});
  return std::nullopt;
}

Finding Meaning::optimize(const Task& task) {
  const int s = task.unit;
  if (auto found = may_update(task)) return found;
  const UpdateWay way = options_.way(s);
  if (way.placement != Placement::cpu) return optimize_piece(task);
  if (prepared_[static_cast<std::size_t>(s)]) return bad(3, task, "updates a unit that is updated already");
  if (reads(task, {.kind = Kind::final_gradient, .unit = s}) == nullptr) {
    return bad(3, task, "runs before its gradient is there");
  }
  const Access access = way.slots() == 2 ? Access::read : Access::update;
  if (use_of(task, BufferKind::store_state, access, s) == nullptr ||
      use_of(task, BufferKind::store_compute, access, s) == nullptr) {
    return bad(3, task, "does not update its unit's state and parameters");
  }
  if (way.slots() == 1) {
    stage(s) = Stage::updated;
    return std::nullopt;
  }
  const Use* shadow = use_of(task, BufferKind::store_shadow, Access::write, s);
  if (shadow == nullptr) return bad(3, task, "does not leave its update in the unit's other slot");
  put(*shadow, {.kind = Kind::updated_slot, .unit = s, .to = 1});
  prepared_[static_cast<std::size_t>(s)] = true;
  return std::nullopt;
}

Finding Meaning::optimize_piece(const Task& task) {
  const int s = task.unit;
  const Use* piece = reads(task, {.kind = Kind::state_piece, .unit = s, .from = task.piece});
  if (piece == nullptr || piece->access != Access::update) return bad(3, task, "updates a piece that is not there");
  const bool resident = options_.way(s).placement == Placement::resident;
  if (resident && use_of(task, BufferKind::resident_state, Access::update, s) == nullptr) {
    return bad(3, task, "does not update its unit's state");
  }
  put(*piece, {.kind = Kind::updated_piece, .unit = s, .from = task.piece});
  return std::nullopt;
}

Finding Meaning::unload(const Task& task) {
  const int s = task.unit;
  if (((task.flags & kSpeculate) != 0) != options_.way(s).speculate) return bad(3, task, "speculates where its unit does not");
  if (reads(task, {.kind = Kind::updated_piece, .unit = s, .from = task.piece}) == nullptr) {
    return bad(3, task, "takes back a piece that is not updated");
  }
  int& done = unloaded_[static_cast<std::size_t>(s)];
  if (done != task.piece) return bad(3, task, fmt::format("comes after {} pieces of its unit: they go back in order", done));
  ++done;
  const bool last = static_cast<std::uint64_t>(done) * options_.piece_elements >= subject_.elements(s);
  if (options_.way(s).placement == Placement::resident) {
    if (use_of(task, BufferKind::store_compute, Access::update, s) == nullptr) {
      return bad(3, task, "does not bring its unit's parameters to the store");
    }
    stage(s) = last ? Stage::updated : Stage::updating;
    return std::nullopt;
  }
  const Use* shadow = use_of(task, BufferKind::store_shadow, task.piece == 0 ? Access::write : Access::update, s);
  const bool follows = shadow != nullptr &&
                       (task.piece == 0 || held(*shadow) == Content{.kind = Kind::updated_slot, .unit = s, .to = task.piece});
  if (!follows) return bad(3, task, "does not leave its piece in the unit's other slot");
  put(*shadow, {.kind = Kind::updated_slot, .unit = s, .to = done});
  prepared_[static_cast<std::size_t>(s)] = last;
  return std::nullopt;
}

Finding Meaning::commit(const Task& task) {
  const int s = task.unit;
  const UpdateWay way = options_.way(s);
  const bool updated = way.slots() == 2 ? prepared_[static_cast<std::size_t>(s)] : stage(s) == Stage::updated;
  if (!updated || stage(s) == Stage::committed_again) return bad(3, task, "commits a unit that is not updated");
  if (use_of(task, BufferKind::store_compute, Access::update, s) == nullptr) {
    return bad(3, task, "does not touch the parameters it commits");
  }
  if (((task.flags & kSpeculate) != 0) != way.speculate) return bad(3, task, "cannot take back, or would without need");
  if (way.slots() == 2) {
    const Use* shadow = use_of(task, BufferKind::store_shadow, Access::update, s);
    if (shadow == nullptr || held(*shadow).kind != Kind::updated_slot ||
        use_of(task, BufferKind::store_state, Access::update, s) == nullptr) {
      return bad(3, task, "does not change its unit's slots");
    }
  }
  // What it takes back it does again, rightly.
  if (way.speculate &&
      (reads(task, {.kind = Kind::norm}) == nullptr || reads(task, {.kind = Kind::final_gradient, .unit = s}) == nullptr)) {
    return bad(3, task, "decides without the norm and the gradient");
  }
  stage(s) = Stage::committed_again;
  return std::nullopt;
}

Finding Meaning::save(const Task& task) {
  if (stage(task.unit) != Stage::committed) return bad(1, task, "saves a unit after its update");
  if (use_of(task, BufferKind::store_compute, Access::read, task.unit) == nullptr ||
      use_of(task, BufferKind::store_state, Access::read, task.unit) == nullptr ||
      use_of(task, BufferKind::checkpoint_file, Access::write, task.unit) == nullptr) {
    return bad(3, task, "does not copy its unit's parameters and state to the checkpoint");
  }
  return std::nullopt;
}

}  // namespace spipe::plan::verification
