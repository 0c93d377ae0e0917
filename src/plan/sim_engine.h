// The event loop of the simulator: begin and end of every task of several consecutive steps, and what each one started after.
#pragma once

#include <cstdint>
#include <queue>
#include <vector>

#include "sim_sharing.h"
#include "spipe/plan/simulator.h"

namespace spipe::plan {

class Engine {
 public:
  static constexpr std::uint64_t kNone = UINT64_MAX;
  // A task of a step.
  struct Instance {
    double begin = 0, end = 0;
    std::uint64_t after = kNone;  // the instance whose end let this one begin
    std::uint32_t pending = 0;    // waits to come
    bool begun = false, done = false;
  };

  Engine(const Plan& plan, const std::vector<TaskCost>& costs, const Hardware& hardware, const SimulationOptions& options);
  void run();
  [[nodiscard]] int steps() const { return steps_; }
  [[nodiscard]] const Instance& instance(int step, std::uint32_t task) const {
    return instances_[static_cast<std::size_t>(step) * count_ + task];
  }
  [[nodiscard]] std::uint32_t task_of(std::uint64_t instance) const { return static_cast<std::uint32_t>(instance % count_); }
  [[nodiscard]] const Instance& at(std::uint64_t instance) const { return instances_[instance]; }
  // Seconds the task takes by itself.
  [[nodiscard]] double alone(std::uint32_t task) const;

 private:
  struct Queue {  // a stream of a rank
    std::vector<std::uint32_t> tasks;
    int step = 0;
    std::size_t next = 0;
    bool busy = false;
    bool messages = false;          // they start when their waits are over, in any order, one step after the other
    std::vector<std::size_t> left;  // messages of each step to come
  };
  struct Event {
    double time = 0;
    std::uint64_t order = 0;  // events of one time happen in the order they were made
    std::uint64_t instance = 0;
    std::uint32_t flow = 0, version = 0;
    bool is_flow = false;
    bool operator>(const Event& other) const { return time != other.time ? time > other.time : order > other.order; }
  };
  struct Dependent {
    std::uint32_t task = 0;
    bool next_step = false;
  };

  void make_resources();
  void make_dependents();
  void try_start(std::size_t queue, std::uint64_t after);
  void try_message(std::uint64_t instance, std::uint64_t after);
  void try_messages(std::size_t queue, int step, std::uint64_t after);
  void start(std::uint64_t instance, std::uint64_t after);
  void start_flow(std::uint64_t instance);
  void finish(std::uint64_t instance);
  void push(double time, std::uint64_t instance);
  void push_changes();
  [[nodiscard]] double compute_factor(std::uint64_t instance) const;
  [[nodiscard]] std::size_t queue_of(const Task& task) const {
    return static_cast<std::size_t>(task.rank) * kStreamCount + static_cast<std::size_t>(task.stream);
  }
  [[nodiscard]] bool step_open(int step) const {
    return step == 0 || !plan_.options.barrier_between_steps || left_[static_cast<std::size_t>(step) - 1] == 0;
  }
  [[nodiscard]] Sharing::Flow flow_of(std::uint32_t task) const;

  const Plan& plan_;
  const std::vector<TaskCost>& costs_;
  const Hardware& hardware_;
  const SimulationOptions& options_;
  std::size_t count_ = 0;
  int steps_ = 0;
  double now_ = 0;
  std::uint64_t order_ = 0;
  std::vector<Instance> instances_;
  std::vector<Queue> queues_;
  std::vector<std::uint32_t> first_dependent_;
  std::vector<Dependent> dependents_;
  std::vector<std::size_t> left_;  // tasks of a step to come
  std::vector<double> tax_;        // per rank
  Sharing sharing_;
  std::vector<std::uint32_t> link_in_, link_out_;                                  // per rank, when shared
  std::vector<std::uint32_t> network_in_, network_out_, update_, dram_, storage_;  // per host
  std::vector<std::uint64_t> instance_of_flow_;
  std::vector<Sharing::End> changed_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
};

}  // namespace spipe::plan
