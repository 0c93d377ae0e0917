// The simulator: runs any plan in virtual time on given hardware. Every (rank, stream) runs its tasks in program order, a task
// starts when its waits are over, and copies, messages and updates that use the same link, network or host get fair shares.
// The same plan gives the same result to the bit.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "spipe/model/shape.h"
#include "spipe/plan/hardware.h"
#include "spipe/plan/plan.h"

namespace spipe::plan {

enum class SharedBy : std::uint8_t { nobody, link_in, link_out, network, update, storage };

// A task takes `seconds`, then moves `amount` (bytes, or parameters for updates) through what it shares.
struct TaskCost {
  double seconds = 0;
  double amount = 0;
  SharedBy shared = SharedBy::nobody;
  double dram_bytes = 0;  // of host memory, while it moves `amount`
  double device_tax = 0;  // seconds that the rank's next compute task takes longer (copies by kernels)
};

struct SimulationOptions {
  int steps = 6;                   // consecutive steps; the last but one is reported (with a barrier: the last of two)
  std::vector<double> rank_speed;  // of compute, per rank; empty: 1
  double jitter = 0;               // compute times are multiplied by 1 + jitter * u, u uniform in [-1, 1)
  std::uint64_t seed = 0;
};

// 1 + jitter * u for a task of a step: the same draw in virtual and in real time.
[[nodiscard]] double jitter_factor(double jitter, std::uint64_t seed, std::uint64_t step, std::uint32_t task);

// What tasks cost: FLOPs and bytes of the plan over the hardware's rates.
[[nodiscard]] std::vector<TaskCost> task_costs(const Plan& plan, const model::ModelShape& shape, const Hardware& hardware);

struct SimulatedTask {
  double begin = 0, end = 0;  // seconds; the reported step's first task begins at 0
};

struct RankReport {
  std::array<double, kStreamCount> busy{};  // seconds of the reported step's tasks, per stream
  double first_compute = 0, last_compute = 0;
  std::uint64_t peak_bytes = 0;
};

struct MemoryPoint {
  double time = 0;
  std::uint64_t bytes = 0;  // of live device buffers from here on
};

// A stretch of the critical path: it ends at the end of the step and is one step long.
struct PathPart {
  std::uint32_t task = 0;
  double begin = 0, end = 0;
  double shared = 0;  // seconds of it that were lost to sharing
};
struct PathShare {
  TaskKind kind = TaskKind::forward;
  double seconds = 0;
};

struct Simulation {
  double step_seconds = 0;  // steady state
  double pass_seconds = 0;  // begin of computing to the end of computing and offloading
  // Idle compute time between the first forward and the last backward of the step, over all ranks and that time.
  double bubble = 0;
  double exposed_optimizer_seconds = 0;  // of the critical path: norm, updates and commits
  double shared_seconds = 0;             // of the critical path: lost to sharing
  std::vector<RankReport> ranks;
  std::vector<SimulatedTask> tasks;              // of the reported step, by task id
  std::vector<std::vector<MemoryPoint>> memory;  // per rank, over the reported step
  std::vector<PathPart> path;                    // last part first
  std::vector<PathShare> shares;                 // of the path by kind, longest first; they add up to step_seconds
};

[[nodiscard]] Simulation simulate(const Plan& plan, const std::vector<TaskCost>& costs, const Hardware& hardware,
                                  const SimulationOptions& options = {});
[[nodiscard]] Simulation simulate(const Plan& plan, const model::ModelShape& shape, const Hardware& hardware,
                                  const SimulationOptions& options = {});

// A few lines for people: step time, bubble, what bounds the step, busy shares.
[[nodiscard]] std::string simulation_summary(const Plan& plan, const Simulation& simulation);

}  // namespace spipe::plan
