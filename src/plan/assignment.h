// Inside of the planner: which rank runs which stage, and in which order. A schedule says only this; tasks follow from it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "spipe/model/shape.h"
#include "spipe/plan/schedules.h"

namespace spipe::plan {

struct Stage {
  int begin = 0, end = 0;  // compute units
  int rank = 0;            // of the replica, from 0
};

// The stages of one replica, ascending by units; backward stages run from the last to the first.
struct Assignment {
  std::vector<Stage> forward, backward;
};

// One stage for one micro-batch.
struct Visit {
  bool backward = false;
  int stage = 0, micro_batch = 0;
  double start = 0, seconds = 0;  // in a pipeline without transfers
};
using VisitLists = std::vector<std::vector<Visit>>;  // per rank of the replica, in the order in which it runs them

using StageSeconds = std::function<double(bool backward, int stage)>;

struct Schedule {
  std::string name;
  bool fuse_last = false;   // the last backward stage has no separate forward
  bool same_cuts = false;   // both passes run over the same stages
  bool replicate = false;   // every rank is a replica
  int stages_per_rank = 0;  // at most; 0: any number
  std::function<void(Assignment&, int ranks)> assign;
  std::function<VisitLists(const Assignment&, const std::vector<int>& micro_batches, int ranks, const StageSeconds&)> order;
};

[[nodiscard]] Schedule spipe_schedule();
[[nodiscard]] Schedule mobius_schedule();
[[nodiscard]] Schedule gpipe_schedule();
[[nodiscard]] Schedule one_forward_one_backward_schedule();
[[nodiscard]] Schedule roundpipe_schedule();
[[nodiscard]] Schedule streaming_dp_schedule();

// Forward stage i on rank i mod N; backward stages go on from there along the same ring.
void assign_along_the_ring(Assignment& assignment, int ranks);
// Both passes of stage i on rank i mod N.
void assign_both_passes(Assignment& assignment, int ranks);

// Stage after stage over all micro-batches, forward and then backward.
[[nodiscard]] VisitLists order_by_stages(const Assignment& assignment, const std::vector<int>& micro_batches, int ranks,
                                         const StageSeconds& seconds);
// Sets the starts of visits that run in the given orders, each when its rank is free and what it reads exists.
void time_visits(const Assignment& assignment, VisitLists& lists);
// The last visit whose end a visit needs, as (backward, stage), for boundary or gradient; stage -1: none.
struct Producer {
  bool backward = false;
  int stage = -1;
};
[[nodiscard]] std::vector<Producer> producers_of(const Assignment& assignment, bool backward, int stage);

// Options with complete cuts and nothing that has no effect; throws Error when the schedule cannot do what is asked.
[[nodiscard]] ScheduleOptions resolve(const Schedule& schedule, const PipelineInput& input);
[[nodiscard]] Assignment assign(const Schedule& schedule, const ScheduleOptions& options, const model::ModelShape& shape);
// Per store unit the rank (of all) that runs its last contributing backward; replicas take turns. -1: no elements.
[[nodiscard]] std::vector<int> homes_of(const Assignment& training, const ScheduleOptions& options,
                                        const model::ModelShape& shape);
// One past the last unit of the forward stages.
[[nodiscard]] int forward_end(const ScheduleOptions& options, const model::ModelShape& shape);
// The micro-batches of a replica, ascending.
[[nodiscard]] std::vector<int> micro_batches_of(const ScheduleOptions& options, int replica);
// FLOPs of a stage for one micro-batch, recompute included.
[[nodiscard]] StageSeconds stage_flops(const Assignment& assignment, const model::ModelShape& shape);
// A backward stage runs the forward of all units that save something or feed the next one.
[[nodiscard]] bool forward_in_backward(const model::ModelShape& shape, const Stage& stage, int unit);

// One of schedule_names(); throws Error for others.
[[nodiscard]] const Schedule& schedule_named(const std::string& name);
// All tasks of the schedule, without waits and offsets (emit_pipeline.cpp).
[[nodiscard]] Plan emit_pipeline(const Schedule& schedule, const PipelineInput& input);

}  // namespace spipe::plan
