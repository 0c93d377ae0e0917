// From begins and ends to what people ask: step time, bubbles, memory, and why the step is as long as it is.
#include "spipe/plan/simulator.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>

#include "sim_engine.h"
#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/base/units.h"

namespace spipe::plan {

namespace {

class Report {
 public:
  Report(const Plan& plan, const Engine& engine) : plan_(plan), engine_(engine) {
    for (int step = 0; step < engine.steps(); ++step) {
      double end = 0;
      for (const Task& task : plan.tasks) end = std::max(end, engine.instance(step, task.id).end);
      step_end_.push_back(end);
    }
    // The last step of all has no next one to compete with; after a barrier that makes no difference.
    reported_ = plan.options.barrier_between_steps ? engine.steps() - 1 : engine.steps() - 2;
  }

  Simulation make() {
    const int before = std::max(0, (reported_ - 1) / 2);  // steps up to this one warm up
    result_.step_seconds = (end_of(reported_) - end_of(before)) / (reported_ - before);
    origin_ = engine_.instance(reported_, 0).begin;
    for (const Task& task : plan_.tasks) origin_ = std::min(origin_, engine_.instance(reported_, task.id).begin);
    result_.tasks.resize(plan_.tasks.size());
    for (const Task& task : plan_.tasks) {
      const Engine::Instance& i = engine_.instance(reported_, task.id);
      result_.tasks[task.id] = {i.begin - origin_, i.end - origin_};
    }
    count_streams();
    find_bubble();
    draw_memory();
    walk_path();
    return std::move(result_);
  }

 private:
  [[nodiscard]] double end_of(int step) const { return step_end_[static_cast<std::size_t>(step)]; }
  static bool computes(const Task& task) { return task.stream == StreamKind::compute; }
  RankReport& rank(const Task& task) { return result_.ranks[task.rank]; }

  void count_streams() {
    result_.ranks.resize(static_cast<std::size_t>(plan_.ranks));
    std::vector<bool> seen(static_cast<std::size_t>(plan_.ranks));
    double first = step_end_.back(), last = 0;
    for (const Task& task : plan_.tasks) {
      const SimulatedTask& t = result_.tasks[task.id];
      rank(task).busy[static_cast<std::size_t>(task.stream)] += t.end - t.begin;
      if (computes(task)) first = std::min(first, t.begin);
      if (computes(task) || task.kind == TaskKind::offload) last = std::max(last, t.end);
      if (!computes(task)) continue;
      if (!seen[task.rank]) rank(task).first_compute = t.begin;
      seen[task.rank] = true;
      rank(task).last_compute = std::max(rank(task).last_compute, t.end);
    }
    result_.pass_seconds = std::max(0.0, last - first);
  }

  // Idle compute time between the first and the last compute task of the step. Steps may overlap: what ranks then do for the
  // steps before and after is not idle.
  void find_bubble() {
    double from = step_end_.back(), to = 0;
    for (const Task& task : plan_.tasks) {
      if (!computes(task)) continue;
      from = std::min(from, result_.tasks[task.id].begin);
      to = std::max(to, result_.tasks[task.id].end);
    }
    if (to <= from) return;
    double busy = 0;
    for (int step = 0; step < engine_.steps(); ++step) {
      for (const Task& task : plan_.tasks) {
        if (!computes(task)) continue;
        const Engine::Instance& i = engine_.instance(step, task.id);
        busy += std::max(0.0, std::min(i.end - origin_, to) - std::max(i.begin - origin_, from));
      }
    }
    result_.bubble = std::max(0.0, 1 - busy / ((to - from) * plan_.ranks));
  }

  // Device buffers live from the begin of their first task to the end of their last.
  void draw_memory() {
    struct Life {
      double from = -1, to = 0;
    };
    std::vector<Life> lives(plan_.buffers.size());
    for (const Task& task : plan_.tasks) {
      const SimulatedTask& t = result_.tasks[task.id];
      for (std::uint32_t u = 0; u < task.use_count; ++u) {
        Life& life = lives[plan_.uses[task.first_use + u].buffer];
        life.from = life.from < 0 ? t.begin : std::min(life.from, t.begin);
        life.to = std::max(life.to, t.end);
      }
    }
    std::vector<std::map<double, std::pair<std::uint64_t, std::uint64_t>>> changes(static_cast<std::size_t>(plan_.ranks));
    for (std::size_t b = 0; b < lives.size(); ++b) {
      const Buffer& buffer = plan_.buffers[b];
      if (buffer.place != Place::device || lives[b].from < 0) continue;
      changes[buffer.rank][lives[b].from].first += buffer.bytes;
      changes[buffer.rank][lives[b].to].second += buffer.bytes;
    }
    result_.memory.resize(changes.size());
    for (std::size_t r = 0; r < changes.size(); ++r) {
      std::uint64_t now = 0;
      for (const auto& [time, change] : changes[r]) {
        now = now + change.first - change.second;
        result_.memory[r].push_back({time, now});
        result_.ranks[r].peak_bytes = std::max(result_.ranks[r].peak_bytes, now);
      }
    }
  }

  // From the task that ends the step back through what each began after, one step time long.
  void walk_path() {
    std::uint64_t at = Engine::kNone;
    for (const Task& task : plan_.tasks) {
      if (engine_.instance(reported_, task.id).end != end_of(reported_)) continue;
      at = static_cast<std::uint64_t>(reported_) * plan_.tasks.size() + task.id;
    }
    const double start = end_of(reported_) - result_.step_seconds;
    std::map<TaskKind, double> seconds;
    while (at != Engine::kNone && engine_.at(at).end > start) {
      const Engine::Instance& i = engine_.at(at);
      const Task& task = plan_.tasks[engine_.task_of(at)];
      const double begin = std::max(i.begin, start);
      const double shared = computes(task) ? 0 : std::max(0.0, i.end - i.begin - engine_.alone(task.id));
      if (i.end > begin) result_.path.push_back({task.id, begin - origin_, i.end - origin_, std::min(shared, i.end - begin)});
      seconds[task.kind] += i.end - begin;
      at = i.after;
    }
    for (const auto& [kind, s] : seconds) {
      if (s > 0) result_.shares.push_back({kind, s});
      if (kind == TaskKind::norm || kind == TaskKind::optimize || kind == TaskKind::commit || kind == TaskKind::load ||
          kind == TaskKind::unload) {
        result_.exposed_optimizer_seconds += s;
      }
    }
    std::stable_sort(result_.shares.begin(), result_.shares.end(),
                     [](const PathShare& a, const PathShare& b) { return a.seconds > b.seconds; });
    for (const PathPart& part : result_.path) result_.shared_seconds += part.shared;
  }

  const Plan& plan_;
  const Engine& engine_;
  std::vector<double> step_end_;
  int reported_ = 0;
  double origin_ = 0;
  Simulation result_;
};

}  // namespace

Simulation simulate(const Plan& plan, const std::vector<TaskCost>& costs, const Hardware& hardware,
                    const SimulationOptions& options) {
  Engine engine(plan, costs, hardware, options);
  engine.run();
  return Report(plan, engine).make();
}

Simulation simulate(const Plan& plan, const model::ModelShape& shape, const Hardware& hardware,
                    const SimulationOptions& options) {
  return simulate(plan, task_costs(plan, shape, hardware), hardware, options);
}

std::string simulation_summary(const Plan& plan, const Simulation& simulation) {
  std::string text = fmt::format("step {}: pass {}, bubble {:.1f} %, optimizer exposed {}\n",
                                 format_duration(simulation.step_seconds), format_duration(simulation.pass_seconds),
                                 100 * simulation.bubble, format_duration(simulation.exposed_optimizer_seconds));
  text += "critical path:";
  for (const PathShare& share : simulation.shares) {
    const double part = share.seconds / simulation.step_seconds;
    if (part >= 0.005) text += fmt::format(" {} {:.0f} %,", task_kind_name(share.kind), 100 * part);
  }
  text += fmt::format(" of which {:.0f} % lost to sharing\n", 100 * simulation.shared_seconds / simulation.step_seconds);
  for (int r = 0; r < plan.ranks; ++r) {
    const RankReport& rank = simulation.ranks[static_cast<std::size_t>(r)];
    text += fmt::format("rank {}: busy", r);
    for (int s = 0; s < kStreamCount; ++s) {
      const double part = rank.busy[static_cast<std::size_t>(s)] / simulation.step_seconds;
      if (part > 0) text += fmt::format(" {} {:.0f} %", stream_name(static_cast<StreamKind>(s)), 100 * part);
    }
    text += fmt::format(", device memory {}\n", format_bytes(rank.peak_bytes));
  }
  return text;
}

}  // namespace spipe::plan
