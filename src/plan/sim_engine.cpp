#include "sim_engine.h"

#include <fmt/core.h>

#include <algorithm>

#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/base/random.h"

namespace spipe::plan {

namespace {
constexpr std::uint32_t kUnshared = UINT32_MAX;
}

Engine::Engine(const Plan& plan, const std::vector<TaskCost>& costs, const Hardware& hardware, const SimulationOptions& options)
    : plan_(plan), costs_(costs), hardware_(hardware), options_(options), count_(plan.tasks.size()) {
  SPIPE_CHECK(costs.size() == count_ && count_ > 0, "every task has a cost");
  SPIPE_CHECK(options.rank_speed.empty() || options.rank_speed.size() == static_cast<std::size_t>(plan.ranks),
              "speeds are given for all ranks or for none");
  steps_ = plan.options.barrier_between_steps ? 2 : std::max(3, options.steps);
  instances_.resize(count_ * static_cast<std::size_t>(steps_));
  queues_.resize(static_cast<std::size_t>(plan.ranks) * kStreamCount);
  for (const Task& task : plan.tasks) queues_[queue_of(task)].tasks.push_back(task.id);
  for (std::size_t q = 0; q < queues_.size(); ++q) {
    queues_[q].messages = static_cast<StreamKind>(q % kStreamCount) == StreamKind::comm;
    if (queues_[q].messages) queues_[q].left.assign(static_cast<std::size_t>(steps_), queues_[q].tasks.size());
  }
  left_.assign(static_cast<std::size_t>(steps_), count_);
  tax_.assign(static_cast<std::size_t>(plan.ranks), 0);
  make_resources();
  make_dependents();
}

void Engine::make_resources() {
  const auto ranks = static_cast<std::size_t>(plan_.ranks);
  const auto hosts = static_cast<std::size_t>(plan_.hosts());
  const Hardware& h = hardware_;
  const auto per_host = [&](double capacity) {
    std::vector<std::uint32_t> list(hosts, kUnshared);
    if (capacity > 0) {
      for (std::uint32_t& resource : list) resource = sharing_.add_resource(capacity);
    }
    return list;
  };
  update_ = per_host(h.update_params_per_s);
  network_in_ = per_host(h.network_bytes_per_s);
  network_out_ = per_host(h.network_bytes_per_s);
  dram_ = per_host(h.dram_bytes_per_s);
  storage_ = per_host(h.storage_bytes_per_s);
  // Neighbouring ranks of a host may share a link; the streams of a rank always do.
  const auto per_link = [&](double capacity) {
    std::vector<std::uint32_t> list(ranks, kUnshared);
    std::vector<int> seen(hosts, 0);
    for (std::size_t r = 0; r < ranks && capacity > 0; ++r) {
      int& before = seen[static_cast<std::size_t>(plan_.host_of_rank[r])];
      if (before % h.ranks_per_link == 0) {
        list[r] = sharing_.add_resource(capacity);
      } else {
        for (std::size_t other = r; other-- > 0;) {
          if (plan_.host_of_rank[other] != plan_.host_of_rank[r]) continue;
          list[r] = list[other];
          break;
        }
      }
      ++before;
    }
    return list;
  };
  link_in_ = per_link(h.h2d_bytes_per_s);
  link_out_ = per_link(h.d2h_bytes_per_s);
}

void Engine::make_dependents() {
  struct Edge {
    std::uint32_t from = 0;
    Dependent to;
  };
  std::vector<Edge> edges;
  // Parameters for one rank come one after the other (a receiver has credit for so many bytes), so that what is needed first is
  // there first.
  std::vector<std::uint32_t> last_parameters(static_cast<std::size_t>(plan_.ranks), kUnshared);
  for (const Task& task : plan_.tasks) {
    for (std::uint32_t i = 0; i < task.wait_count; ++i) {
      const Wait& wait = plan_.waits[task.first_wait + i];
      edges.push_back({wait.task, {task.id, wait.previous_step}});
    }
    if (task.kind != TaskKind::push || task.use_count == 0) continue;
    if (plan_.buffers[plan_.uses[task.first_use].buffer].kind != BufferKind::store_compute) continue;
    std::uint32_t& last = last_parameters[task.peer_rank];
    if (last != kUnshared) edges.push_back({last, {task.id, false}});
    last = task.id;
  }
  first_dependent_.assign(count_ + 1, 0);
  for (const Edge& edge : edges) ++first_dependent_[edge.from + 1];
  for (std::size_t t = 0; t < count_; ++t) first_dependent_[t + 1] += first_dependent_[t];
  dependents_.resize(edges.size());
  std::vector<std::uint32_t> next(first_dependent_.begin(), first_dependent_.end() - 1);
  for (const Edge& edge : edges) {
    dependents_[next[edge.from]++] = edge.to;
    for (int step = edge.to.next_step ? 1 : 0; step < steps_; ++step) {
      ++instances_[static_cast<std::size_t>(step) * count_ + edge.to.task].pending;
    }
  }
}

void Engine::run() {
  for (std::size_t q = 0; q < queues_.size(); ++q) try_start(q, kNone);
  while (!events_.empty()) {
    const Event event = events_.top();
    events_.pop();
    if (!event.is_flow) {
      now_ = event.time;
      const TaskCost& cost = costs_[task_of(event.instance)];
      if (cost.amount > 0) {
        start_flow(event.instance);
      } else {
        finish(event.instance);
      }
    } else if (sharing_.current(event.flow, event.version)) {
      now_ = event.time;
      const std::uint64_t instance = instance_of_flow_[event.flow];
      sharing_.end(event.flow, now_, changed_);
      push_changes();
      finish(instance);
    }
  }
  for (const std::size_t left : left_) {
    if (left == 0) continue;
    for (std::uint64_t i = 0; i < instances_.size(); ++i) {
      SPIPE_CHECK(instances_[i].done,
                  fmt::format("task {} ({}) waits for ever", task_of(i), task_kind_name(plan_.tasks[task_of(i)].kind)));
    }
  }
}

void Engine::try_start(std::size_t q, std::uint64_t after) {
  Queue& queue = queues_[q];
  if (queue.messages) {
    for (int step = 0; step < steps_; ++step) try_messages(q, step, after);
    return;
  }
  if (queue.busy || queue.step >= steps_ || queue.tasks.empty()) return;
  const std::uint64_t instance = static_cast<std::uint64_t>(queue.step) * count_ + queue.tasks[queue.next];
  if (instances_[instance].pending > 0) return;
  if (!step_open(queue.step)) return;
  queue.busy = true;
  if (++queue.next == queue.tasks.size()) {
    queue.next = 0;
    ++queue.step;
  }
  start(instance, after);
}

void Engine::try_message(std::uint64_t i, std::uint64_t after) {
  const auto step = static_cast<int>(i / count_);
  const Queue& queue = queues_[queue_of(plan_.tasks[task_of(i)])];
  if (instances_[i].begun || instances_[i].pending > 0 || !step_open(step)) return;
  if (step > 0 && queue.left[static_cast<std::size_t>(step) - 1] > 0) return;
  start(i, after);
}

void Engine::try_messages(std::size_t q, int step, std::uint64_t after) {
  for (const std::uint32_t id : queues_[q].tasks) try_message(static_cast<std::uint64_t>(step) * count_ + id, after);
}

double jitter_factor(double jitter, std::uint64_t seed, std::uint64_t step, std::uint32_t task) {
  return 1 + jitter * (2 * static_cast<double>(uniform_at(make_key(seed, 0), step, task)) - 1);
}

double Engine::compute_factor(std::uint64_t instance) const {
  const Task& task = plan_.tasks[task_of(instance)];
  double factor = 1;
  if (!options_.rank_speed.empty()) factor /= options_.rank_speed[task.rank];
  if (options_.jitter > 0) factor *= jitter_factor(options_.jitter, options_.seed, instance / count_, task.id);
  return factor;
}

void Engine::start(std::uint64_t i, std::uint64_t after) {
  Instance& instance = instances_[i];
  const Task& task = plan_.tasks[task_of(i)];
  const TaskCost& cost = costs_[task.id];
  instance.begin = now_;
  instance.after = after;
  instance.begun = true;
  double seconds = cost.seconds;
  if (task.stream == StreamKind::compute) {
    seconds = seconds * compute_factor(i) + tax_[task.rank];
    tax_[task.rank] = 0;
  }
  tax_[task.rank] += cost.device_tax;
  push(now_ + seconds, i);
}

Sharing::Flow Engine::flow_of(std::uint32_t id) const {
  const Task& task = plan_.tasks[id];
  const TaskCost& cost = costs_[id];
  const auto host = static_cast<std::size_t>(plan_.host_of_rank[task.rank]);
  Sharing::Flow flow{.remaining = cost.amount};
  const auto through = [&](std::uint32_t resource, double weight) {
    if (resource != kUnshared) flow.use(resource, weight);
  };
  switch (cost.shared) {
    case SharedBy::nobody:
      break;
    case SharedBy::link_in:
      through(link_in_[task.rank], 1);
      break;
    case SharedBy::link_out:
      through(link_out_[task.rank], 1);
      break;
    case SharedBy::network:
      through(network_out_[host], 1);
      through(network_in_[static_cast<std::size_t>(plan_.host_of_rank[task.peer_rank])], 1);
      break;
    case SharedBy::update:
      flow.cap = hardware_.update_params_per_s_rank;
      through(update_[host], 1);
      break;
    case SharedBy::storage:
      through(storage_[host], 1);
      break;
  }
  if (cost.dram_bytes > 0) through(dram_[host], cost.dram_bytes / cost.amount);
  return flow;
}

double Engine::alone(std::uint32_t id) const {
  const TaskCost& cost = costs_[id];
  if (cost.amount <= 0) return cost.seconds;
  return cost.seconds + cost.amount / sharing_.rate_alone(flow_of(id));
}

void Engine::start_flow(std::uint64_t i) {
  const std::uint32_t flow = sharing_.start(flow_of(task_of(i)), now_, changed_);
  if (flow >= instance_of_flow_.size()) instance_of_flow_.resize(flow + 1);
  instance_of_flow_[flow] = i;
  push_changes();
}

void Engine::push(double time, std::uint64_t instance) {
  events_.push({.time = time, .order = order_++, .instance = instance});
}

void Engine::push_changes() {
  for (const Sharing::End& end : changed_) {
    events_.push({.time = end.time, .order = order_++, .flow = end.flow, .version = end.version, .is_flow = true});
  }
  changed_.clear();
}

void Engine::finish(std::uint64_t i) {
  Instance& instance = instances_[i];
  instance.end = now_;
  instance.done = true;
  const std::uint32_t id = task_of(i);
  const std::uint64_t step = i / count_;
  const std::size_t own = queue_of(plan_.tasks[id]);
  Queue& queue = queues_[own];
  queue.busy = false;
  if (!queue.messages) {
    try_start(own, i);
  } else if (--queue.left[step] == 0 && static_cast<int>(step) + 1 < steps_) {
    try_messages(own, static_cast<int>(step) + 1, i);
  }
  for (std::uint32_t d = first_dependent_[id]; d < first_dependent_[id + 1]; ++d) {
    const Dependent& dependent = dependents_[d];
    const std::uint64_t its_step = step + (dependent.next_step ? 1 : 0);
    if (its_step >= static_cast<std::uint64_t>(steps_)) continue;
    const std::uint64_t waiting = its_step * count_ + dependent.task;
    if (--instances_[waiting].pending > 0) continue;
    const std::size_t its_queue = queue_of(plan_.tasks[dependent.task]);
    if (queues_[its_queue].messages) {
      try_message(waiting, i);
    } else {
      try_start(its_queue, i);
    }
  }
  if (--left_[step] == 0 && plan_.options.barrier_between_steps) {
    for (std::size_t q = 0; q < queues_.size(); ++q) try_start(q, i);
  }
}

}  // namespace spipe::plan
