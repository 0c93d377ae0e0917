// Derives waits from uses and prunes those that stream order and other waits imply.
//
// Both work on two unrolled steps: task i of the first has time i, of the second n + i. Every edge goes forward in this time,
// so one walk in time order sees all causes before their effects.
#include "waits.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_map>

#include "spipe/base/checked.h"
#include "spipe/plan/builder.h"

namespace spipe::plan {

namespace {

constexpr std::uint32_t kNone = UINT32_MAX;

// Buffers that are the same memory share a resource: the store is one per host, whatever rank looks at it, and a gradient
// that accumulates in the store is the store's gradient plane.
std::vector<std::uint32_t> resources_of(const Plan& plan) {
  std::vector<std::uint32_t> resource(plan.buffers.size());
  std::map<std::tuple<BufferKind, std::int32_t, std::uint16_t>, std::uint32_t> stored;
  for (std::uint32_t b = 0; b < plan.buffers.size(); ++b) {
    const Buffer& buffer = plan.buffers[b];
    if (buffer.place != Place::store) {
      resource[b] = b;
      continue;
    }
    const BufferKind plane = buffer.kind == BufferKind::gradient ? BufferKind::store_grad : buffer.kind;
    resource[b] = stored.try_emplace({plane, buffer.unit, buffer.host}, b).first->second;
  }
  return resource;
}

struct ResourceState {
  std::uint32_t writer = kNone;        // time of the last write
  std::vector<std::uint32_t> readers;  // times of reads since, the latest of every lane
};

bool lives_in_a_step(const Buffer& buffer) {
  if (buffer.place == Place::device) return buffer.kind != BufferKind::constants && buffer.kind != BufferKind::resident_state;
  return buffer.kind == BufferKind::parked || buffer.kind == BufferKind::mailbox || buffer.kind == BufferKind::norm_parts ||
         buffer.kind == BufferKind::wire;
}

void add_reader(ResourceState& state, std::uint32_t time, const Lanes& lanes, std::uint32_t tasks) {
  const std::uint32_t lane = lanes.of_task[time % tasks];
  if (lane != kNoLane) {
    for (std::uint32_t& reader : state.readers) {
      if (lanes.of_task[reader % tasks] == lane) {
        reader = time;
        return;
      }
    }
  }
  state.readers.push_back(time);
}

// Tasks by the vector clocks of their ends: clock[lane] = 1 + time of the latest task of the lane known to have ended.
class Pruner {
 public:
  Pruner(const Plan& plan, const Lanes& lanes, const std::vector<Edge>& edges);
  // The waits kept, per task of the steady step, as times.
  std::vector<std::vector<std::uint32_t>> run();

 private:
  using Clock = std::uint32_t*;
  // What is known of a task that ends in any order: tasks of that sort it waited for, and the first task of each lane that
  // comes after it.
  struct Free {
    std::vector<std::uint32_t> before;
    std::vector<std::pair<std::uint32_t, std::uint32_t>> after;  // lane, time
  };
  void visit(std::uint32_t task, std::uint32_t step);
  bool implied(std::uint32_t source, const std::vector<std::uint32_t>& kept) const;
  void merge(std::uint32_t source);
  void note_after(std::uint32_t source, std::uint32_t lane, std::uint32_t time);
  std::uint32_t lane_of(std::uint32_t time) const { return lanes_.of_task[time % tasks_]; }

  const Lanes& lanes_;
  std::uint32_t tasks_ = 0;
  std::vector<std::uint32_t> first_;    // candidates of task t: first_[t] .. first_[t + 1]
  std::vector<std::uint32_t> sources_;  // as times of the steady step, latest first
  std::vector<std::uint32_t> slot_;     // where the clock of a source task is kept; kNone for the others
  std::uint32_t slots_ = 0;
  std::vector<std::uint32_t> clocks_, lane_clocks_, clock_;
  std::unordered_map<std::uint32_t, Free> free_;
  std::vector<std::vector<std::uint32_t>> kept_;
};

Pruner::Pruner(const Plan& plan, const Lanes& lanes, const std::vector<Edge>& edges)
    : lanes_(lanes), tasks_(narrow<std::uint32_t>(plan.tasks.size())) {
  SPIPE_CHECK(plan.tasks.size() < (1U << 31) - 1, "a plan of two steps must be countable in 32 bits");
  first_.assign(tasks_ + 1U, 0);
  for (const Edge& edge : edges) ++first_[edge.to + 1U];
  for (std::uint32_t t = 0; t < tasks_; ++t) first_[t + 1] += first_[t];
  sources_.resize(edges.size());
  slot_.assign(tasks_, kNone);
  std::vector<std::uint32_t> next(first_.begin(), first_.end() - 1);
  for (const Edge& edge : edges) {
    SPIPE_CHECK(edge.previous_step || edge.from < edge.to, "waits point back in program order");
    sources_[next[edge.to]++] = edge.previous_step ? edge.from : tasks_ + edge.from;
    if (slot_[edge.from] == kNone) slot_[edge.from] = slots_++;
  }
  for (std::uint32_t t = 0; t < tasks_; ++t) {
    std::sort(sources_.begin() + first_[t], sources_.begin() + first_[t + 1], std::greater<>());
  }
  clocks_.assign(std::size_t{2} * slots_ * lanes_.count, 0);
  lane_clocks_.assign(std::size_t{lanes_.count} * lanes_.count, 0);
  clock_.assign(lanes_.count, 0);
  kept_.resize(tasks_);
}

bool Pruner::implied(std::uint32_t source, const std::vector<std::uint32_t>& kept) const {
  const std::uint32_t lane = lane_of(source);
  if (lane != kNoLane) return clock_[lane] > source;
  const auto found = free_.find(source);
  if (found != free_.end()) {
    for (const auto& [after_lane, time] : found->second.after) {
      if (clock_[after_lane] > time) return true;
    }
  }
  return std::any_of(kept.begin(), kept.end(), [&](std::uint32_t other) {
    if (other == source) return true;
    if (lane_of(other) != kNoLane) return false;
    const auto entry = free_.find(other);
    return entry != free_.end() &&
           std::find(entry->second.before.begin(), entry->second.before.end(), source) != entry->second.before.end();
  });
}

void Pruner::merge(std::uint32_t source) {
  const std::uint32_t step = source / tasks_;
  const std::uint32_t* clock = &clocks_[(std::size_t{step} * slots_ + slot_[source % tasks_]) * lanes_.count];
  for (std::uint32_t l = 0; l < lanes_.count; ++l) clock_[l] = std::max(clock_[l], clock[l]);
}

void Pruner::note_after(std::uint32_t source, std::uint32_t lane, std::uint32_t time) {
  auto& after = free_[source].after;
  if (std::none_of(after.begin(), after.end(), [&](const auto& entry) { return entry.first == lane; })) {
    after.emplace_back(lane, time);
  }
}

void Pruner::visit(std::uint32_t task, std::uint32_t step) {
  const std::uint32_t lane = lanes_.of_task[task], time = step * tasks_ + task;
  if (lane == kNoLane) {
    std::fill(clock_.begin(), clock_.end(), 0);
  } else {
    std::copy_n(&lane_clocks_[std::size_t{lane} * lanes_.count], lanes_.count, clock_.begin());
  }
  std::vector<std::uint32_t> kept;  // times of this walk
  const auto keep = [&](std::uint32_t source) {
    kept.push_back(source);
    merge(source);
  };
  // In the first step the waits inside a step are decided (only paths inside a step can imply them); in the second those
  // over the border. Latest sources first: an earlier one never implies a later one.
  const std::uint32_t to_this_step = (1 - step) * tasks_;
  if (step == 1) {
    for (const std::uint32_t source : kept_[task]) keep(source);
  }
  for (std::uint32_t i = first_[task]; i < first_[task + 1]; ++i) {
    const bool inside = sources_[i] >= tasks_;
    if (inside != (step == 0)) continue;
    const std::uint32_t source = inside ? sources_[i] - to_this_step : sources_[i];
    if (!implied(source, kept)) {
      keep(source);
      kept_[task].push_back(sources_[i]);
    }
  }
  for (const std::uint32_t source : kept) {
    if (lane_of(source) != kNoLane) continue;
    const std::vector<std::uint32_t> before = free_[source].before;
    if (lane == kNoLane) {
      auto& own = free_[time].before;
      own.push_back(source);
      own.insert(own.end(), before.begin(), before.end());
    } else {
      note_after(source, lane, time);
      for (const std::uint32_t earlier : before) note_after(earlier, lane, time);
    }
  }
  if (lane != kNoLane) {
    clock_[lane] = time + 1;
    std::copy(clock_.begin(), clock_.end(), &lane_clocks_[std::size_t{lane} * lanes_.count]);
  }
  if (slot_[task] != kNone) {
    std::copy(clock_.begin(), clock_.end(), &clocks_[(std::size_t{step} * slots_ + slot_[task]) * lanes_.count]);
  }
}

std::vector<std::vector<std::uint32_t>> Pruner::run() {
  for (std::uint32_t step = 0; step < 2; ++step) {
    for (std::uint32_t task = 0; task < tasks_; ++task) visit(task, step);
  }
  return std::move(kept_);
}

}  // namespace

Lanes::Lanes(const Plan& plan) : of_task(plan.tasks.size(), kNoLane) {
  std::map<std::pair<std::uint16_t, StreamKind>, std::uint32_t> numbers;
  for (const Task& task : plan.tasks) {
    if (ends_in_any_order(task)) continue;
    const auto [entry, is_new] = numbers.try_emplace({task.rank, task.stream}, count);
    if (is_new) ++count;
    of_task[task.id] = entry->second;
  }
}

void Accesses::add(const Plan& plan, const Lanes& lanes, std::uint32_t task) {
  if (lanes.of_task[task] != kNoLane) {
    for (std::uint32_t& known : tasks) {
      if (lanes.of_task[known] == lanes.of_task[task]) {
        known = std::max(known, task);
        return;
      }
    }
  }
  SPIPE_CHECK(task < plan.tasks.size(), "an access belongs to a task");
  tasks.push_back(task);
}

void collect_dependences(const Plan& plan, const Lanes& lanes, std::vector<Edge>& edges) {
  const auto tasks = narrow<std::uint32_t>(plan.tasks.size());
  const std::vector<std::uint32_t> resource = resources_of(plan);
  std::vector<ResourceState> states(plan.buffers.size());
  std::vector<bool> written(plan.buffers.size(), false);
  for (std::uint32_t time = 0; time < 2 * tasks; ++time) {
    const Task& task = plan.tasks[time % tasks];
    const auto wait_for = [&](std::uint32_t source) {
      if (time >= tasks && source != time) edges.push_back({source % tasks, task.id, source < tasks});
    };
    for (std::uint32_t i = 0; i < task.use_count; ++i) {
      const Use& use = plan.uses[task.first_use + i];
      ResourceState& state = states[resource[use.buffer]];
      if (time < tasks && use.access != Access::write && lives_in_a_step(plan.buffers[use.buffer])) {
        SPIPE_CHECK(written[use.buffer], "task " + std::to_string(task.id) + " (" + task_kind_name(task.kind) +
                                             ") reads a buffer of kind " + buffer_kind_name(plan.buffers[use.buffer].kind) +
                                             " that nothing has written");
      }
      written[use.buffer] = true;
      if (use.access == Access::read) {
        if (state.writer != kNone) wait_for(state.writer);
        add_reader(state, time, lanes, tasks);
        continue;
      }
      // Messages queue: a wire takes the next one whether or not the one before has arrived.
      if (plan.buffers[use.buffer].place == Place::network) {
        state.writer = time;
        continue;
      }
      // Readers waited for the writer themselves.
      for (const std::uint32_t reader : state.readers) wait_for(reader);
      if (state.writer != kNone && (state.readers.empty() || state.readers == std::vector{time})) wait_for(state.writer);
      state.readers.clear();
      state.writer = time;
    }
  }
}

std::vector<Edge> edges_of(const Plan& plan) {
  std::vector<Edge> edges;
  for (const Task& task : plan.tasks) {
    for (std::uint32_t i = 0; i < task.wait_count; ++i) {
      const Wait& wait = plan.waits[task.first_wait + i];
      edges.push_back({wait.task, task.id, wait.previous_step});
    }
  }
  return edges;
}

void set_waits(Plan& plan, const Lanes& lanes, const std::vector<Edge>& edges) {
  const std::vector<std::vector<std::uint32_t>> kept = Pruner(plan, lanes, edges).run();
  const auto tasks = narrow<std::uint32_t>(plan.tasks.size());
  plan.waits.clear();
  for (Task& task : plan.tasks) {
    task.first_wait = narrow<std::uint32_t>(plan.waits.size());
    task.wait_count = narrow<std::uint16_t>(kept[task.id].size());
    for (const std::uint32_t source : kept[task.id]) plan.waits.push_back({source % tasks, source < tasks});
  }
}

void derive_waits(Plan& plan) {
  const Lanes lanes(plan);
  std::vector<Edge> edges;
  collect_dependences(plan, lanes, edges);
  set_waits(plan, lanes, edges);
}

}  // namespace spipe::plan
