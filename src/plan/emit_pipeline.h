// Inside of the planner: turns visits into tasks. Visits come in one global order, each after those that make what it reads; a
// visit emits what it computes and what has to move for it. Four files: the drive (emit_pipeline.cpp), moving
// (emit_pipeline_traffic.cpp), computing (emit_pipeline_visits.cpp), gradients and updates (emit_pipeline_update.cpp).
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "assignment.h"
#include "emit_updates.h"
#include "spipe/plan/builder.h"

namespace spipe::plan {

class Pipeline {
 public:
  Pipeline(const Schedule& schedule, const PipelineInput& input);
  Plan emit();

 private:
  static constexpr std::uint32_t kNone = UINT32_MAX;
  static constexpr std::size_t kSpread = 4;  // fetches and offloads of a stage go out with this many visits

  // A stage of one replica on its rank, in one direction.
  struct Pass {
    bool backward = false;
    int number = 0, rank = 0;
    Stage stage;
  };
  struct Step {  // a visit, with its place among those of its rank
    std::size_t pass = 0;
    int micro_batch = 0;
    double start = 0;
    std::size_t place = 0, run = 0;
  };
  // Visits of one pass that follow each other on a rank: parameters are fetched for all of them together.
  struct Run {
    std::size_t pass = 0, first = 0, count = 0;
    std::vector<int> store_units;
    std::vector<std::uint32_t> fetched;  // per store unit
  };
  // Where a boundary or its gradient can be read.
  struct Copies {
    std::vector<std::pair<int, std::uint32_t>> device, parked;  // by rank
    std::vector<std::pair<int, std::uint32_t>> mailbox;         // by host
  };
  struct Tensor {
    BufferKind kind = BufferKind::boundary;
    int unit = -1, micro_batch = -1, source = -1;
    std::uint64_t bytes = 0;
  };
  // What one compute unit contributes to a store unit: sums of groups, added in ascending order on one rank.
  struct Part {
    std::uint32_t device = kNone, mailbox = kNone;
  };
  struct Sum {
    int unit = 0, source = 0;
    int collector = 0;
    std::vector<Part> parts;  // per group that is not empty
    std::size_t done = 0, added = 0;
    std::uint32_t total = kNone;    // on the collector, then at home
    std::uint32_t mailbox = kNone;  // on the home's host, when the collector is another rank
    std::uint32_t parked = kNone;
    int stage = 0;  // of the collector, for people
  };
  struct Held {
    std::uint32_t buffer = kNone;
    std::size_t until_place = 0;
  };
  struct Rank {
    std::vector<std::size_t> steps;
    std::vector<Run> runs;
    std::size_t place = 0;  // of the visit at hand
    std::size_t run = 0;
    std::uint32_t visit_begin = 0, last_task = 0;
    std::uint32_t constants = kNone;
    std::vector<std::uint32_t> inputs;  // per micro-batch
    std::vector<Held> held;
    bool in_visit = false;
    std::vector<std::pair<Sum*, std::size_t>> finishes;  // sums whose parts are all on the way, and the place of their turn
    std::vector<int> offloads;                           // store units whose gradient is complete
    std::size_t offloads_due = 0, offloads_per_visit = 0;
    [[nodiscard]] bool done() const { return place >= steps.size(); }
  };

  // The drive.
  void list_steps();
  void list_runs();
  void emit_step(const Step& step);
  void end_of_visit(int rank, const Step& step);
  void flush(int rank);
  std::uint32_t task(int rank, Task task, const std::vector<Use>& uses);

  // Moving.
  void emit_pulls(int rank, std::size_t run);
  void emit_fetches(int rank, std::size_t run, std::size_t visits);
  void offload_some(Rank& owner, std::size_t most);
  std::uint32_t pulled_parameters(int rank, int store_unit, bool backward);
  void emit_input(int rank, int micro_batch);
  void prepare(int rank, std::size_t place, bool ahead);
  std::uint32_t acquire(Copies& copies, const Tensor& tensor, int rank, std::uint16_t stage, bool ahead);
  void publish(Copies& copies, const Tensor& tensor, int rank, std::uint16_t stage, const std::vector<int>& readers);
  void settle(Copies& copies, const Tensor& tensor, int rank, std::uint16_t stage, std::size_t next_place);
  std::uint32_t mailbox(int host, const Tensor& tensor);
  std::uint32_t send(std::uint32_t device, const Tensor& tensor, int rank, std::uint16_t stage);
  std::uint32_t recv(std::uint32_t mailbox, const Tensor& tensor, int rank, std::uint16_t stage, bool reserve);
  // Carries a message; returns the buffer filled on the receiver's host.
  std::uint32_t carry(const std::vector<Use>& sources, const Buffer& target, int from, int to, int unit, int micro_batch,
                      std::uint16_t stage);
  void hold(int rank, std::uint32_t buffer, std::size_t until_place);
  void hold_over_visit(int rank, std::uint32_t buffer) { hold(rank, buffer, rank_at(rank).place + 1); }
  void hold_over_run(int rank, std::uint32_t buffer);

  // Computing.
  void forward_visit(const Step& step);
  void backward_visit(const Step& step);
  std::uint32_t forward(const Step& step, int unit, std::uint32_t input, std::uint32_t* saved);
  void loss(const Step& step, std::uint32_t input, std::uint32_t* gradient);
  void backward(const Step& step, int unit, std::uint32_t input, std::uint32_t saved, std::uint32_t gradient);
  void boundary_made(const Step& step, int unit, std::uint32_t buffer);
  std::vector<int> readers_of_boundary(int replica, int unit) const;
  std::size_t next_reader(int rank, int unit, int micro_batch) const;
  void use_parameters(std::vector<Use>& uses, const Step& step, int unit);
  void use_workspace(std::vector<Use>& uses, int rank, std::uint64_t bytes);
  void use_constants(std::vector<Use>& uses, int rank);
  bool needs_parameters(const Pass& pass, int unit) const;

  // Gradients and updates.
  void list_groups();
  void list_sums();
  int lowest_rank(int host) const;
  Tensor gradient_tensor(const Sum& sum, bool partial) const;
  std::pair<std::size_t, bool> place_in_group(int micro_batch) const;
  void use_gradients(std::vector<Use>& uses, const Step& step, int unit);
  void group_done(const Step& step, int unit);
  void add_part(Sum& sum);
  void finish(Sum& sum);
  void sum_complete(Sum& sum);
  std::uint32_t total_at_home(Sum& sum);
  void emit_offload(int store_unit);
  void emit_saves();
  void emit_norms();
  Sum& sum_of(int store_unit, int source);

  // Buffers and facts.
  std::uint32_t stored(BufferKind kind, int store_unit);
  std::uint32_t device(int rank, const Tensor& tensor);
  const model::ComputeUnit& unit(int u) const { return shape_.units[static_cast<std::size_t>(u)]; }
  std::uint64_t elements(int s) const { return shape_.store_units[static_cast<std::size_t>(s)].elements; }
  int head() const { return shape_.unit_count() - 1; }
  int host(int rank) const { return host_of_rank_[static_cast<std::size_t>(rank)]; }
  int home(int store_unit) const { return homes_[static_cast<std::size_t>(store_unit)]; }
  bool training() const { return !options_.evaluate; }
  int replica_of(int rank) const { return rank / (options_.ranks / options_.replicas); }
  Rank& rank_at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  const Rank& rank_at(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }
  std::uint16_t stage_of(const Step& step) const;
  std::size_t index(int u, int m) const {
    return static_cast<std::size_t>(u) * static_cast<std::size_t>(options_.micro_batches) + static_cast<std::size_t>(m);
  }
  Tensor boundary(int u, int m) const { return {BufferKind::boundary, u, m, -1, shape_.boundary_bytes}; }
  Tensor boundary_gradient(int u, int m) const { return {BufferKind::boundary_gradient, u, m, -1, shape_.boundary_bytes}; }
  std::size_t pass_index(int replica, bool backward, int stage) const;
  std::uint16_t last_flag(const Step& step, bool last_unit) const;

  const Schedule& schedule_;
  const PipelineInput& input_;
  const model::ModelShape& shape_;
  const ScheduleOptions options_;
  const Assignment assignment_;
  std::vector<int> host_of_rank_, homes_;
  Builder builder_;
  Updates updates_;
  std::vector<Pass> passes_;  // of all replicas
  std::vector<Step> steps_;
  std::vector<Rank> ranks_;
  std::vector<std::vector<std::size_t>> places_;                 // per pass: place of the visit of each micro-batch on its rank
  std::vector<int> forward_from_, backward_from_, backward_to_;  // per unit: the stage that begins (ends) there, or -1
  std::vector<Copies> boundaries_, gradients_;                   // per (unit, micro-batch)
  std::map<std::tuple<int, int, bool>, std::uint32_t> pulled_;   // parameters on other hosts: host, store unit, direction
  std::vector<std::pair<int, int>> groups_;                      // first and last micro-batch of those that are not empty
  std::vector<int> group_of_;                                    // per micro-batch: index in groups_
  std::vector<std::vector<Sum>> sums_;                           // per store unit, in canonical order of sources
  std::vector<std::size_t> sums_left_;
  std::vector<std::vector<std::uint32_t>> stored_;
  std::vector<std::uint32_t> norm_values_;
  std::vector<std::vector<std::uint32_t>> results_;  // per host: what its ranks bring back
};

}  // namespace spipe::plan
