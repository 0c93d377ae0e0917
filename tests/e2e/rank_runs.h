// Runs of tiny models under mpirun whose outcomes can be compared bit for bit: shared by the matrices over ranks.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "spipe/comm/world.h"
#include "tests/support/tiny_run.h"

namespace spipe::test {

// What must not depend on the schedule.
struct Outcome {
  std::vector<double> losses, norms, clips;  // by step; -1 for norms that are not finite
  std::vector<double> unit_norms;            // by step and store unit; likewise
  std::vector<std::optional<double>> scales;
  std::vector<bool> skipped;
  std::vector<double> evaluations;
  std::map<std::string, std::string> tensors;  // parameters and moments of the last checkpoint
  bool operator==(const Outcome&) const = default;
  // What a run saw that goes on from here.
  void append(const Outcome& later);
};

// A folder of all ranks with a model of each name: "llama" (untied, grouped KV heads), "gpt2" (tied), "bf16" and "fp16" (llama
// in these precisions), each of 5 layers.
class RankRuns {
 public:
  RankRuns(comm::World& world, const std::vector<std::string>& models);

  struct Result {
    Outcome outcome;  // on rank 0
    exec::RunSummary summary;
    int speculating = 0;           // units of the plan; on rank 0
    std::uint64_t taken_back = 0;  // as the steps tell it; on rank 0
  };
  // Trains the model of that name on the ranks of `world` (all of this program's, or one that is alone). With `keep` the run
  // folder stays, for another call that resumes; else it is removed. The settings name a checkpoint.dir below path().
  Result train(const std::string& model, const std::vector<std::string>& settings, exec::RunOptions options, comm::World& world,
               bool keep = false);
  // The smallest device.memory that works with these settings; must be refused with one byte.
  std::uint64_t smallest_budget(const std::string& model, std::vector<std::string> settings);
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] comm::World& world() { return world_; }

 private:
  comm::World& world_;
  std::unique_ptr<TempFolder> folder_;  // rank 0's
  std::string path_;
};

}  // namespace spipe::test
