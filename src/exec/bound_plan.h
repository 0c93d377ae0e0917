// A plan with its buffers resolved to memory: for every task the pointers its work needs, found once.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "spipe/exec/executor.h"

namespace spipe::exec {

// A parameters buffer remembers which unit of which run it holds: stale or early use is an error at once.
struct ParameterTag {
  int unit = -1;
  std::uint64_t run = 0;
};

// What a host hands over for the norm: a unit's part of the norm table, or the loss of a micro-batch.
struct NormItem {
  int unit = -1;  // or
  int micro_batch = -1;
};
// The parts of another host, as they arrive.
struct NormParts {
  const std::byte* data = nullptr;
  std::vector<NormItem> items;
};

struct BoundTask {
  model::UnitCall call;                   // compute tasks; step-dependent fields are filled when it runs
  std::vector<model::UnitMemory> memory;  // call.memory points here
  std::vector<ParameterTag*> parameters;  // tags to check before use, or (fetch) the one to set
  std::vector<int> in_place_units;        // store units read in place: their committed version is checked
  const void* source = nullptr;           // copies
  void* destination = nullptr;
  std::uint64_t copy_bytes = 0;
  bool from_store = false;              // fetch: the version is checked, and the source is the unit's slot of that moment
  std::span<std::byte> message;         // push, pull
  int message_unit = -1;                // push of a store unit's parameters, in its slot of that moment
  std::vector<NormItem> norm_items;     // push of norm parts
  std::vector<NormParts> norm_parts;    // norm
  std::vector<const float*> gradients;  // offload, reduce: operands in canonical order (reduce: destination first)
};

// Memory of one executor that is neither store nor arena.
struct HostStaging {
  std::vector<std::int32_t> inputs;                // [2 runs][micro_batches][2][tokens]
  std::vector<float> losses;                       // [micro_batches][tokens]
  std::vector<std::vector<std::byte>> norm_parts;  // per push of norm parts: [2 runs][bytes]
};

class BoundPlan {
 public:
  BoundPlan(const plan::Plan& plan, const Machine& machine, std::span<std::byte> mailboxes);
  // A task of this rank.
  [[nodiscard]] BoundTask& task(std::uint32_t id) { return tasks_[index_[id]]; }
  [[nodiscard]] HostStaging& staging() { return staging_; }
  [[nodiscard]] const std::int32_t* input(int micro_batch, std::uint64_t run) const;
  [[nodiscard]] bool reads_input(int micro_batch) const { return reads_input_[static_cast<std::size_t>(micro_batch)]; }

 private:
  void bind(const plan::Task& task, BoundTask& bound);
  void bind_compute(const plan::Task& task, BoundTask& bound);
  void bind_copy(const plan::Task& task, BoundTask& bound);
  void bind_gradient(const plan::Task& task, BoundTask& bound);
  void bind_message(const plan::Task& task, BoundTask& bound);
  void bind_norm(const plan::Task& task, BoundTask& bound);
  [[nodiscard]] std::vector<NormItem> norm_items(const plan::Task& push) const;
  [[nodiscard]] void* address(const plan::Buffer& buffer) const;
  [[nodiscard]] std::span<const plan::Use> uses(const plan::Task& task) const;

  const plan::Plan& plan_;
  const Machine& machine_;
  std::span<std::byte> mailboxes_;
  HostStaging staging_;
  std::vector<ParameterTag> tags_;    // per buffer
  std::vector<std::uint32_t> index_;  // per task of the plan
  std::vector<BoundTask> tasks_;
  std::vector<bool> reads_input_;
};

// The rank whose tasks a machine runs, and its host.
[[nodiscard]] int rank_of(const Machine& machine);

}  // namespace spipe::exec
