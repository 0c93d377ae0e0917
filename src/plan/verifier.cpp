// Entry of the verifier, names for its messages, and the checks that need no order.
#include "spipe/plan/verifier.h"

#include <algorithm>
#include <map>

#include "verify_parts.h"

namespace spipe::plan {

namespace verification {

namespace {

bool moves(TaskKind kind) {
  return kind == TaskKind::park || kind == TaskKind::unpark || kind == TaskKind::send || kind == TaskKind::recv ||
         kind == TaskKind::push || kind == TaskKind::pull;
}

// Whether a task may touch a buffer where it is; else what is wrong.
const char* out_of_reach(const Plan& plan, const Task& task, const Buffer& buffer) {
  switch (buffer.place) {
    case Place::device:
      return buffer.rank == task.rank ? nullptr : "uses memory of another rank";
    case Place::network:
      return task.kind == TaskKind::push || task.kind == TaskKind::pull ? nullptr : "uses the network";
    case Place::store:
    case Place::host:
      break;
  }
  if (buffer.kind == BufferKind::parked && buffer.rank != task.rank) return "uses memory of another rank";
  if (buffer.host != plan.host_of_rank[task.rank]) return "uses memory of another host";
  return nullptr;
}

Finding check_topology(const Plan& plan, const model::ModelShape& shape) {
  const auto bad = [](const std::string& finding) { return Violation{5, 0, "invariant 5: " + finding}; };
  if (plan.ranks < 1 || plan.host_of_rank.size() != static_cast<std::size_t>(plan.ranks)) return bad("a rank has no host");
  for (const int host : plan.host_of_rank) {
    if (host < 0 || host >= plan.ranks) return bad("a host's number is out of range");
  }
  const ScheduleOptions& options = plan.options;
  const bool all_have_ways = options.updates.size() == static_cast<std::size_t>(shape.store_unit_count());
  if (!options.updates.empty() && !all_have_ways) return bad("the ways of updating belong to another model");
  if (options.piece_elements == 0 || options.piece_elements % 4096 != 0) return bad("pieces are no whole blocks");
  for (const UpdateWay& way : options.updates) {
    if (way.speculate && way.placement == Placement::resident) return bad("a resident unit speculates");
  }
  if (plan.ranks == 1) return std::nullopt;
  if (plan.home_of_unit.size() != static_cast<std::size_t>(shape.store_unit_count())) return bad("units have no homes");
  for (std::size_t s = 0; s < plan.home_of_unit.size(); ++s) {
    const int home = plan.home_of_unit[s];
    if (home >= plan.ranks || (home < 0 && shape.store_units[s].elements > 0)) {
      return bad("store unit " + shape.store_units[s].name + " has no home");
    }
  }
  for (const Buffer& buffer : plan.buffers) {
    if (buffer.place != Place::store || buffer.unit < 0 || buffer.unit >= shape.store_unit_count()) continue;
    const int home = plan.home_of_unit[static_cast<std::size_t>(buffer.unit)];
    if (home < 0 || plan.host_of_rank[static_cast<std::size_t>(home)] != buffer.host) {
      return bad(fmt::format("a buffer of {} lies in the store of host {}, which is not its home",
                             shape.store_units[static_cast<std::size_t>(buffer.unit)].name, buffer.host));
    }
  }
  return std::nullopt;
}

}  // namespace

std::string Subject::name(const Task& task) const {
  std::string text = fmt::format("task {} ({}", task.id, task_kind_name(task.kind));
  const bool computes = task.kind == TaskKind::forward || task.kind == TaskKind::loss || task.kind == TaskKind::backward;
  const bool moves_boundary = moves(task.kind) && task.micro_batch >= 0;
  if (task.unit >= 0 && (computes || moves_boundary) && task.unit < shape.unit_count()) {
    text += " " + shape.units[static_cast<std::size_t>(task.unit)].name;
  } else if (task.unit >= 0 && task.unit < shape.store_unit_count()) {
    text += " " + store_name(task.unit);
  }
  if (task.micro_batch >= 0) text += fmt::format(", micro-batch {}", task.micro_batch);
  if (task.piece > 0) text += fmt::format(", piece {}", task.piece);
  return text + ")";
}

std::string Subject::store_name(int store_unit) const { return shape.store_units[static_cast<std::size_t>(store_unit)].name; }

Violation Subject::violation(int invariant, const Task& task, const std::string& finding) const {
  return {invariant, task.id, fmt::format("invariant {}: {} {}", invariant, name(task), finding)};
}

Finding check_structure(const Subject& subject) {
  const Plan& plan = subject.plan;
  if (auto found = check_topology(plan, subject.shape)) return found;
  for (std::size_t i = 0; i < plan.tasks.size(); ++i) {
    const Task& task = plan.tasks[i];
    const auto bad = [&](const std::string& finding) {
      return Violation{5, static_cast<std::uint32_t>(i), fmt::format("invariant 5: task {} {}", i, finding)};
    };
    if (task.id != i) return bad("carries another task's id");
    if (task.rank >= plan.ranks) return bad("belongs to no rank");
    if (std::size_t{task.first_use} + task.use_count > plan.uses.size()) return bad("has uses that do not exist");
    if (std::size_t{task.first_wait} + task.wait_count > plan.waits.size()) return bad("has waits that do not exist");
    const bool computes = task.kind == TaskKind::forward || task.kind == TaskKind::loss || task.kind == TaskKind::backward;
    const int units = computes ? subject.shape.unit_count() : subject.shape.store_unit_count();
    if (task.unit < -1 || (!moves(task.kind) && task.unit >= units)) return bad("names a unit that does not exist");
    if (computes && task.unit < 0) return bad("names no unit");
    if (task.micro_batch < -1 || task.micro_batch >= plan.options.micro_batches) return bad("names no micro-batch of the step");
    if (computes && task.micro_batch < 0) return bad("names no micro-batch");
    for (const Use& use : subject.uses(task)) {
      if (use.buffer >= plan.buffers.size()) return bad("uses a buffer that does not exist");
      const Buffer& buffer = plan.buffers[use.buffer];
      if (const char* finding = out_of_reach(plan, task, buffer)) return bad(finding);
      if (buffer.place == Place::store && (buffer.unit < 0 || buffer.unit >= subject.shape.store_unit_count())) {
        return bad("uses a store buffer of no store unit");
      }
    }
    std::vector<std::uint32_t> used;
    for (const Use& use : subject.uses(task)) used.push_back(use.buffer);
    std::sort(used.begin(), used.end());
    if (std::adjacent_find(used.begin(), used.end()) != used.end()) return bad("uses a buffer twice");
    for (const Wait& wait : subject.waits(task)) {
      if (wait.task >= plan.tasks.size()) return bad(fmt::format("waits for task {}, which does not exist", wait.task));
      if (!wait.previous_step && wait.task >= i) {
        return bad(
            fmt::format("waits for task {}, which does not come before it in program order: it may wait for ever", wait.task));
      }
    }
  }
  return std::nullopt;
}

namespace {

struct Count {
  int wanted = 1, found = 0;
};
// The counts of one kind of task, by (unit, micro-batch) or by unit.
struct Tally {
  TaskKind kind;
  int invariant;
  std::map<std::pair<int, int>, Count> expected;
};

int pieces_of(const Subject& subject, int store_unit) {
  const ScheduleOptions& options = subject.plan.options;
  if (options.way(store_unit).placement == Placement::cpu) return 0;
  return static_cast<int>((subject.elements(store_unit) + options.piece_elements - 1) / options.piece_elements);
}

std::vector<Tally> tallies(const Subject& subject) {
  const ScheduleOptions& options = subject.plan.options;
  const model::ModelShape& shape = subject.shape;
  Tally loss{TaskKind::loss, 2, {}}, backward{TaskKind::backward, 2, {}}, result{TaskKind::result, 2, {}};
  Tally offload{TaskKind::offload, 3, {}}, optimize{TaskKind::optimize, 3, {}}, commit{TaskKind::commit, 3, {}};
  Tally norm{TaskKind::norm, 3, {}}, save{TaskKind::save, 3, {}}, load{TaskKind::load, 3, {}}, unload{TaskKind::unload, 3, {}};
  for (int m = 0; m < options.micro_batches; ++m) {
    loss.expected[{shape.unit_count() - 1, m}] = {};
    result.expected[{-1, m}] = {};
    for (int u = 0; u + 1 < shape.unit_count() && !options.evaluate; ++u) backward.expected[{u, m}] = {};
  }
  if (!options.evaluate) norm.expected[{-1, -1}] = {subject.plan.hosts()};  // every host computes it
  for (int s = 0; s < shape.store_unit_count() && !options.evaluate; ++s) {
    if (subject.elements(s) == 0) continue;
    for (Tally* tally : {&offload, &optimize, &commit}) tally->expected[{s, -1}] = {};
    if (options.save) save.expected[{s, -1}] = {};
    const int pieces = pieces_of(subject, s);
    if (pieces == 0) continue;
    for (Tally* tally : {&load, &optimize, &unload}) tally->expected[{s, -1}] = {pieces};
  }
  return {loss, backward, result, offload, norm, optimize, commit, save, load, unload};
}

}  // namespace

Finding check_counts(const Subject& subject) {
  const Plan& plan = subject.plan;
  std::vector<Tally> all = tallies(subject);
  for (const Task& task : plan.tasks) {
    for (Tally& tally : all) {
      if (tally.kind != task.kind) continue;
      const auto found = tally.expected.find({task.unit, task.micro_batch});
      if (found == tally.expected.end()) {
        return subject.violation(tally.invariant, task,
                                 plan.options.evaluate ? "has no place in an evaluation" : "has no place in this step");
      }
      if (++found->second.found > found->second.wanted) {
        return subject.violation(tally.invariant, task, "happens a second time in the same step");
      }
    }
    if (plan.options.evaluate && task.kind == TaskKind::reduce) {
      return subject.violation(3, task, "has no place in an evaluation");
    }
  }
  for (const Tally& tally : all) {
    for (const auto& [key, count] : tally.expected) {
      if (count.found == count.wanted) continue;
      Task missing;
      missing.id = static_cast<std::uint32_t>(plan.tasks.size());
      missing.kind = tally.kind;
      missing.unit = key.first;
      missing.micro_batch = key.second;
      Violation violation = subject.violation(tally.invariant, missing, "is missing");
      violation.message = fmt::format("invariant {}: no{} in the plan", tally.invariant,
                                      subject.name(missing).substr(fmt::format("task {}", missing.id).size()));
      violation.task = plan.tasks.empty() ? 0 : missing.id - 1;
      return violation;
    }
  }
  return std::nullopt;
}

}  // namespace verification

std::optional<Violation> verify(const Plan& plan, const model::ModelShape& shape, const Limits& limits) {
  const verification::Subject subject{plan, shape};
  if (auto found = verification::check_structure(subject)) return found;
  if (auto found = verification::check_counts(subject)) return found;
  if (auto found = verification::check_messages(subject)) return found;
  if (auto found = verification::check_meaning(subject)) return found;
  const verification::Order order(subject);
  if (auto found = verification::check_races(subject, order)) return found;
  return verification::check_memory(subject, order, limits);
}

}  // namespace spipe::plan
