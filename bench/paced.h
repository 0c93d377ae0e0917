// Real runs of tiny models on paced devices (device.pace), each task stretched to the time it takes on a modelled machine, and
// what the simulator says of the same plan.
#pragma once

#include <filesystem>
#include <string>

#include "spipe/comm/world.h"
#include "spipe/exec/trainer.h"
#include "spipe/plan/schedules.h"
#include "spipe/plan/simulator.h"
#include "spipe/plan/updates.h"

namespace spipe::bench {

inline constexpr int kRanks = 4;

// A tiny llama and the machine on which its tasks take as long as wanted.
struct Case {
  std::string name;
  int layers = 12, hidden = 32, ffn = 64, vocabulary = 512, seq_len = 16, micro_batches = 8;
  double layer_forward_ms = 10;     // one layer, one micro-batch
  double fetch_over_forward = 2;    // of a layer's parameters
  double update_over_forward = 4;   // of a layer's parameters, by one rank
  double ranks_that_fill = kRanks;  // so many of a host's ranks reach, updating, all that it can do
  std::string schedule = "spipe";
  int forward_stages = 8, backward_stages = 12;  // 0: the planner's choice
  double jitter = 0;
  int slow_rank = -1;
  bool barrier = false;
  std::string policy = "auto", placement = "auto", precision = "fp32";
  std::uint64_t device_bytes = 0;  // budget of a rank; 0: none
};

struct Measured {
  double real = 0, simulated = 0, bubble_real = 0, bubble_simulated = 0, overruns = 0, real_share = 0;
  std::uint64_t device_bytes = 0;
  plan::UpdateSplit split;
  std::string schedule;
  double bound = 0;  // step_bound() of the model and the machine
  // More than 1 % of the tasks overran their modelled time, or the real work took more than 30 % of it.
  [[nodiscard]] bool is_void() const { return overruns > 0.01 || real_share > 0.3; }
  [[nodiscard]] double error() const { return real / simulated - 1; }
};

// No schedule on a host is faster: the least over x of the largest of devices computing with every layer recomputed, links with
// both fetches of the parameters, the gradients and, for x of the parameters, the state to devices and back, and host cores
// with the rest of the updates.
[[nodiscard]] double step_bound(const plan::PipelineInput& input, const plan::Hardware& hardware);

// Collective over the ranks of the world; files lie in a temporary folder that goes with the object.
class PacedBench {
 public:
  PacedBench(comm::World& world, int steps);
  ~PacedBench();
  PacedBench(const PacedBench&) = delete;
  PacedBench& operator=(const PacedBench&) = delete;
  // Steps are medians over the last two thirds but one; on rank 0.
  Measured run(const Case& c);
  // What the planner chooses and the simulator says, nothing else; not collective.
  Measured predict(const Case& c);

 private:
  void write_files(const Case& c);
  comm::World& world_;
  int steps_;
  std::filesystem::path folder_;
};

}  // namespace spipe::bench
