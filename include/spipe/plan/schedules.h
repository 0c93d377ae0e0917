// Schedules of several ranks. A schedule is an assignment of stages to ranks and an order of visits; one emitter makes tasks of
// any of them (src/plan/emit_pipeline.cpp).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "spipe/model/shape.h"
#include "spipe/plan/plan.h"
#include "spipe/plan/updates.h"

namespace spipe::plan {

struct PipelineInput {
  const model::ModelShape* shape = nullptr;
  std::uint64_t compute_dtype_size = 4, grad_dtype_size = 4;
  std::uint64_t state_bytes_per_element = 12;  // master + m + v (bytes moved by optimize and save, for the cost model)
  bool separate_master = false;                // UpdateBytes
  int ranks = 1, replicas = 1;                 // ranks of all replicas together; replicas divides ranks and sum_groups
  std::vector<int> host_of_rank;               // hosts are numbered from 0 without holes; empty: all ranks on one host
  int micro_batches = 1, sum_groups = 1;
  // First compute unit of every stage, over all pipeline ranks; the first is 0. Schedules that run both passes of a stage on
  // one rank (mobius, 1f1b, gpipe) take backward_cuts for both; then forward_cuts is empty or the same.
  std::vector<int> forward_cuts, backward_cuts;
  int prefetch = 1;                    // stages fetched ahead on every rank
  bool park = false;                   // boundaries that wait long on a rank wait in host memory
  bool evaluate = false;               // forward and loss only; backward_cuts still say where units are at home
  bool save = false;                   // with save tasks for the state before this step's updates
  std::optional<bool> fuse_last;       // unset: the schedule's own way
  bool barrier_between_steps = false;  // ScheduleOptions, as are these
  std::vector<UpdateWay> updates;
  std::uint64_t piece_elements = ScheduleOptions{}.piece_elements;
  [[nodiscard]] UpdateBytes update_bytes() const {
    return {compute_dtype_size, grad_dtype_size, state_bytes_per_element, separate_master};
  }
};

// spipe, mobius, 1f1b, gpipe, roundpipe, streaming-dp.
[[nodiscard]] const std::vector<std::string>& schedule_names();
// A complete, placed plan; recompute is always from boundaries at backward cuts. Throws Error when the schedule cannot do what
// is asked (the message says why) and for unknown names.
[[nodiscard]] Plan make_schedule(const std::string& name, const PipelineInput& input);

// Per store unit the rank where its gradient is collected, its state lies and its update runs; -1: no elements. Throws Error as
// make_schedule does.
[[nodiscard]] std::vector<int> unit_homes(const std::string& schedule, const PipelineInput& input);

}  // namespace spipe::plan
