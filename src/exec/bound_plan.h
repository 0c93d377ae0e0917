// A plan with its buffers resolved to memory: for every task the pointers its work needs, found once.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "spipe/exec/executor.h"

namespace spipe::exec {

// A parameters buffer remembers which unit and version it holds: stale or early use is an error at once.
struct ParameterTag {
  int unit = -1;
  std::uint64_t version = ~std::uint64_t{0};
};

struct BoundTask {
  model::UnitCall call;                   // compute tasks; step-dependent fields are filled when it runs
  std::vector<model::UnitMemory> memory;  // call.memory points here
  std::vector<ParameterTag*> parameters;  // tags to check before use, or (fetch) the one to set
  std::vector<int> in_place_units;        // store units read in place: their committed version is checked
  const void* source = nullptr;           // copies
  void* destination = nullptr;
  std::uint64_t copy_bytes = 0;
  std::vector<const float*> gradients;  // offload, reduce: operands in canonical order (reduce: destination first)
};

// Memory of one executor that is neither store nor arena.
struct HostStaging {
  std::vector<std::int32_t> inputs;  // [micro_batches][2][tokens]
  std::vector<float> losses;         // [micro_batches][tokens]
};

class BoundPlan {
 public:
  BoundPlan(const plan::Plan& plan, const Machine& machine);
  [[nodiscard]] BoundTask& task(std::uint32_t id) { return tasks_[id]; }
  [[nodiscard]] HostStaging& staging() { return staging_; }
  void forget_parameters();  // at a step's start: nothing fetched is valid any more

 private:
  void bind_compute(const plan::Task& task, BoundTask& bound);
  void bind_copy(const plan::Task& task, BoundTask& bound);
  void bind_gradient(const plan::Task& task, BoundTask& bound);
  [[nodiscard]] void* address(const plan::Buffer& buffer) const;
  [[nodiscard]] std::span<const plan::Use> uses(const plan::Task& task) const;

  const plan::Plan& plan_;
  const Machine& machine_;
  HostStaging staging_;
  std::vector<ParameterTag> tags_;  // per buffer
  std::vector<BoundTask> tasks_;
};

}  // namespace spipe::exec
