// How schedules emit plans, and the passes that complete them.
#pragma once

#include <initializer_list>

#include "spipe/model/shape.h"
#include "spipe/plan/plan.h"
#include "spipe/plan/updates.h"

namespace spipe::plan {

// Appends tasks, buffers and uses to a plan in program order.
class Builder {
 public:
  explicit Builder(ScheduleOptions options, int ranks, int store_units, int compute_units);
  std::uint32_t buffer(Buffer description);
  // Returns the task's id. `task.first_use` and `use_count` are filled from `uses`.
  std::uint32_t task(Task task, const std::vector<Use>& uses);
  [[nodiscard]] Buffer& buffer_at(std::uint32_t index) { return plan_.buffers[index]; }
  [[nodiscard]] Task& task_at(std::uint32_t id) { return plan_.tasks[id]; }
  [[nodiscard]] std::uint32_t tasks() const { return static_cast<std::uint32_t>(plan_.tasks.size()); }
  [[nodiscard]] Plan take();  // without waits and offsets

 private:
  Plan plan_;
};

// Derives waits from uses (this step and the step before), prunes those implied by others. SPIPE_CHECKs that no device buffer
// is read before it is written.
void derive_waits(Plan& plan);
// Static offsets for device and parked buffers from lifetimes in program order (greedy by size, 256-byte aligned,
// deterministic); adds the waits that reuse of bytes needs, in this step and across the step border. Fills arena_bytes and
// parking_bytes.
void place_buffers(Plan& plan);
// derive_waits + place_buffers + in_place_bytes.
void complete(Plan& plan, const model::ModelShape& shape, std::uint64_t bytes_per_gradient);

// Everything the single-rank schedule needs beside its options.
struct ScheduleInput {
  const model::ModelShape* shape = nullptr;
  std::uint64_t compute_dtype_size = 4, grad_dtype_size = 4;
  std::uint64_t state_bytes_per_element = 12;  // master + m + v (bytes moved by optimize and save, for the cost model)
  bool separate_master = false;                // UpdateBytes
  [[nodiscard]] UpdateBytes update_bytes() const {
    return {compute_dtype_size, grad_dtype_size, state_bytes_per_element, separate_master};
  }
};
// The single-rank schedule (plan/schedule_streaming.cpp): a complete, placed plan for the options as given.
//  - in_place: parameters are read from the store, fp32 gradients of untied units accumulate in the store (sum_groups = 1);
//  micro-batch by
//    micro-batch forward then backward, so that without recompute only one micro-batch's activations live.
//  - streamed: stage by stage over all micro-batches; forward stages fetch, compute and drop; the last backward stage (with the
//  head)
//    has no separate forward: its recompute is its forward; backward stages fetch again, recompute from kept boundaries when
//    asked, accumulate in fp32 on the device and offload each store unit once.
[[nodiscard]] Plan schedule_streaming(const ScheduleInput& input, const ScheduleOptions& options);

}  // namespace spipe::plan
