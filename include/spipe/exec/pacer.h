// The paced device: every task takes as long as on given hardware, so that many ranks on few cores behave in time like a
// cluster. The real work is done first, the rest of the modelled time is slept. Costs, shares and jitter are the simulator's.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "spipe/plan/hardware.h"
#include "spipe/plan/plan.h"
#include "spipe/plan/simulator.h"

namespace spipe::exec {

class PacedFlows;

class Pacer {
 public:
  // Nanoseconds of the steady clock, and sleeping until then; tests bring their own.
  struct Clock {
    std::function<std::int64_t()> now;
    std::function<void(std::int64_t)> sleep_until;
  };
  // Of tasks that take time on the hardware. Those that take none (norm, commit, pull) may wait inside, so they say nothing.
  struct Account {
    // Overrun: the real work ended later than the modelled time by more than 0.2 ms and 2 % of it. Less than the first is what
    // waking up takes here, less than the second nobody can measure; what escapes that way adds up in late_seconds.
    std::uint64_t tasks = 0, overruns = 0;
    double real_seconds = 0, paced_seconds = 0;  // of compute tasks: real work, modelled time
    double worst_overrun_seconds = 0;
    double late_seconds = 0;  // by which real work ended later than modelled, overruns and all others
  };

  // Bytes that the ranks of a host share, aligned to 8, zeros at the start.
  [[nodiscard]] static std::uint64_t shared_bytes(int ranks_of_host);
  // Ranks of a host are numbered as in the simulator: neighbours share a link (hardware.ranks_per_link). `speed`: of this
  // rank's compute, 0.5 takes twice as long. Messages of a network are paced by their receivers, so what a host's senders share
  // is not known here.
  Pacer(const plan::Hardware& hardware, int rank_on_host, int ranks_of_host, std::span<std::byte> shared, double jitter,
        std::uint64_t seed, double speed);
  Pacer(const plan::Hardware& hardware, int rank_on_host, int ranks_of_host, std::span<std::byte> shared, double jitter,
        std::uint64_t seed, double speed, Clock clock);
  ~Pacer();
  Pacer(const Pacer&) = delete;
  Pacer& operator=(const Pacer&) = delete;

  // Costs of a plan's tasks; called once per plan, before it runs. `number` tells the plans of a run apart.
  void add_plan(int number, const plan::Plan& plan, const model::ModelShape& shape);
  // After the real work of a task that began at begin_ns: returns when its modelled time is over. Any thread. `step` makes the
  // jitter differ from step to step: the simulator's for the same seed, step and task.
  void pace(int number, const plan::Task& task, std::int64_t begin_ns, std::uint64_t step);
  [[nodiscard]] Account account() const;

 private:
  [[nodiscard]] double move(const plan::TaskCost& cost, double start);
  void count(const plan::Task& task, std::int64_t real, std::int64_t modelled);

  const plan::Hardware hardware_;
  const int rank_on_host_;
  const double jitter_;
  const std::uint64_t seed_;
  const double speed_;
  Clock clock_;
  std::vector<double> capacities_;  // of what the host's ranks share, per nanosecond
  std::unique_ptr<PacedFlows> flows_;
  std::vector<std::vector<plan::TaskCost>> costs_;  // by plan, task
  std::atomic<std::uint64_t> tasks_{0}, overruns_{0};
  std::atomic<std::int64_t> real_ns_{0}, paced_ns_{0}, worst_ns_{0}, late_ns_{0};
  std::atomic<std::int64_t> tax_ns_{0};  // that the next compute task takes longer
};

}  // namespace spipe::exec
