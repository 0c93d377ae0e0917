// Runs the plan with symbols in place of numbers, one task after another in program order, and demands at every task that its
// operands mean what the task needs.
#include <algorithm>

#include "verify_parts.h"

namespace spipe::plan::verification {

namespace {

constexpr std::uint32_t kUnset = UINT32_MAX;

using model::ComputeUnit;
using model::UnitKind;

// What a buffer holds.
struct Content {
  enum class Kind : std::uint8_t {
    nothing,
    parameters,         // of store unit `unit`, this step's committed version
    input,              // tokens and targets of micro-batch m
    boundary,           // into compute unit `unit`, micro-batch m
    saved,              // of compute unit `unit`, micro-batch m
    boundary_gradient,  // of the boundary into compute unit `unit`, micro-batch m
    token_loss,         // of micro-batch m
    gradient,           // of store unit `unit` from compute unit `source`, micro-batches [from, to)
    final_gradient,     // of store unit `unit`: all sources, all micro-batches, rounded, with its norm blocks
    norm_part,          // what host `source` gives to the norm
    norm,
    state_piece,    // of store unit `unit`: its state as committed and its gradient, elements of piece `from`
    updated_piece,  // and as its update leaves them
    updated_slot,   // of store unit `unit`: pieces [0, to) as the update leaves them
  };
  Kind kind = Kind::nothing;
  int unit = -1, micro_batch = -1, source = -1, from = 0, to = 0;
  bool operator==(const Content&) const = default;
};

// A store unit's current slot in the course of a step. An update of units with two slots leaves it as it is until the commit.
enum class Stage : std::uint8_t { committed, updating, updated, committed_again };

class Meaning {
 public:
  explicit Meaning(const Subject& subject);
  Finding run();

 private:
  using Kind = Content::Kind;
  Finding step(const Task& task);
  Finding input(const Task& task);
  Finding fetch(const Task& task);
  Finding forward(const Task& task);
  Finding loss(const Task& task);
  Finding backward(const Task& task);
  Finding reduce(const Task& task);
  Finding move(const Task& task);
  Finding push(const Task& task);
  Finding pull(const Task& task);
  // The task reads all that host `host` gives to the norm: gradients of its units, and losses of its micro-batches.
  Finding needs_share(const Task& task, int host);
  Finding offload(const Task& task);
  Finding result(const Task& task);
  Finding norm(const Task& task);
  Finding load(const Task& task);
  Finding optimize(const Task& task);
  Finding optimize_piece(const Task& task);
  Finding unload(const Task& task);
  Finding may_update(const Task& task);
  Finding commit(const Task& task);
  Finding save(const Task& task);

  Finding needs_parameters(const Task& task);
  Finding needs_workspace(const Task& task, std::uint64_t bytes);
  Finding adds_gradients(const Task& task);
  Finding adds_gradient(const Task& task, int store_unit, const Use& use);
  Finding needs_place(const Task& task, const Use* use, std::uint64_t bytes, const char* what) const;

  // The task's use that reads (or updates) `content`; null if there is none.
  const Use* reads(const Task& task, const Content& content) const;
  const Use* use_of(const Task& task, BufferKind kind, Access access, int unit = -1) const;
  void put(const Use& use, const Content& content) {
    held_[memory_[use.buffer]] = content;
    put_.push_back(memory_[use.buffer]);
  }
  const Content& held(const Use& use) const { return held_[memory_[use.buffer]]; }
  Stage& stage(int store_unit) { return stages_[static_cast<std::size_t>(store_unit)]; }
  const ComputeUnit& unit(int u) const { return subject_.shape.units[static_cast<std::size_t>(u)]; }
  int head() const { return subject_.shape.unit_count() - 1; }
  // First micro-batch of the sum group that holds m, and one past its last.
  std::pair<int, int> group(int m) const;
  Violation bad(int invariant, const Task& task, const std::string& finding) const {
    return subject_.violation(invariant, task, finding);
  }

  const Subject& subject_;
  const ScheduleOptions& options_;
  std::vector<std::uint32_t> memory_;  // the gradient plane of the store stands for gradients that live in it
  std::vector<Content> held_;
  std::vector<std::uint32_t> put_;  // what the task at hand filled
  std::vector<Stage> stages_;
  std::vector<int> unloaded_;     // per store unit: pieces that are back in the store
  std::vector<bool> prepared_;    // per store unit: its other slot is complete
  std::vector<int> result_host_;  // per micro-batch: where its losses are brought to
};

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

}  // namespace

Finding check_meaning(const Subject& subject) { return Meaning(subject).run(); }

}  // namespace spipe::plan::verification
