// Options of a pipeline as they are carried out, or the reason why they cannot be.
#include "assignment.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "spipe/base/checked.h"
#include "spipe/base/error.h"

namespace spipe::plan {

using model::ModelShape;
using model::UnitKind;

namespace {

void check_cuts(const std::vector<int>& cuts, int units, const char* which) {
  for (std::size_t i = 0; i < cuts.size(); ++i) {
    if ((i > 0 || cuts[0] == 0) && cuts[i] < units && (i == 0 || cuts[i] > cuts[i - 1])) continue;
    throw Error(fmt::format("cut {} ({}) of the {} stages does not lie between the one before and the model's {} units", i,
                            cuts[i], which, units),
                fmt::format("parallel.{}_stages", which), "cuts ascend from 0");
  }
}

// Ascending cuts below `end`; a model of one stage is cut at 0.
std::vector<int> below(std::vector<int> cuts, int end) {
  if (cuts.empty()) cuts = {0};
  cuts.erase(std::lower_bound(cuts.begin(), cuts.end(), end), cuts.end());
  return cuts;
}

void check_ranks(const Schedule& schedule, const PipelineInput& input, int replicas) {
  SPIPE_CHECK(input.micro_batches >= 1 && input.sum_groups >= 1 && input.prefetch >= 0, "a step has micro-batches");
  if (input.ranks < 1 || input.ranks > UINT16_MAX || replicas < 1 || input.ranks % replicas != 0) {
    throw Error(fmt::format("{} ranks cannot be divided into {} equal pipelines", input.ranks, replicas), "parallel.data",
                "give a number that divides the number of ranks");
  }
  if (input.sum_groups % replicas != 0) {
    throw Error(fmt::format("{} replicas cannot share {} sum groups equally", replicas, input.sum_groups), "batch.sum_groups",
                fmt::format("{} needs a multiple of {}", schedule.name, replicas));
  }
  if (input.host_of_rank.empty()) return;
  SPIPE_CHECK(input.host_of_rank.size() == static_cast<std::size_t>(input.ranks), "every rank has a host");
  const std::set<int> hosts(input.host_of_rank.begin(), input.host_of_rank.end());
  SPIPE_CHECK(*hosts.begin() == 0 && *hosts.rbegin() == static_cast<int>(hosts.size()) - 1, "hosts are numbered without holes");
}

}  // namespace

ScheduleOptions resolve(const Schedule& schedule, const PipelineInput& input) {
  SPIPE_CHECK(input.shape != nullptr && input.shape->unit_count() >= 2, "a model has an embedding and a head");
  if (schedule.replicate && input.replicas != 1 && input.replicas != input.ranks) {
    throw Error(fmt::format("{} has one replica on every rank, not {}", schedule.name, input.replicas), "parallel.data",
                "leave it out");
  }
  const int replicas = schedule.replicate ? input.ranks : input.replicas;
  check_ranks(schedule, input, replicas);
  const int units = input.shape->unit_count();
  check_cuts(input.forward_cuts, units, "forward");
  check_cuts(input.backward_cuts, units, "backward");
  ScheduleOptions options;
  options.schedule = schedule.name;
  options.residency = Residency::streamed;
  options.micro_batches = input.micro_batches;
  options.sum_groups = input.sum_groups;
  options.recompute = !input.evaluate;
  options.park = input.park && !input.evaluate;
  options.prefetch = input.prefetch;
  options.evaluate = input.evaluate;
  options.save = input.save && !input.evaluate;
  options.ranks = input.ranks;
  options.replicas = replicas;
  options.fuse_last = input.fuse_last.value_or(schedule.fuse_last);
  options.barrier_between_steps = input.barrier_between_steps;
  options.updates = input.updates;
  options.piece_elements = input.piece_elements;
  options.backward_cuts = below(input.backward_cuts, units);
  options.evaluate = false;
  const int end = forward_end(options, *input.shape);
  options.forward_cuts = below(input.forward_cuts, end);
  if (schedule.same_cuts) {
    const std::vector<int> cuts = below(options.backward_cuts, end);
    if (!input.forward_cuts.empty() && options.forward_cuts != cuts) {
      throw Error(fmt::format("{} runs both passes over the same stages, but {} forward and {} backward stages are cut apart",
                              schedule.name, options.forward_cuts.size(), options.backward_cuts.size()),
                  "parallel.forward_stages", "leave it out, or choose the schedule spipe or roundpipe");
    }
    options.forward_cuts = cuts;
  }
  if (input.evaluate) {
    // The stages of training and what has no forward of its own there: every rank keeps its place along the ring.
    options.evaluate = true;
    if (schedule.same_cuts) {
      options.forward_cuts = options.backward_cuts;
    } else if (end < units) {
      options.forward_cuts.push_back(end);
    }
  }
  const int ranks = input.ranks / replicas, stages = static_cast<int>(options.backward_cuts.size());
  if (schedule.stages_per_rank > 0 && stages > schedule.stages_per_rank * ranks) {
    throw Error(fmt::format("{} has {} stage on a rank, but {} stages for {} ranks are asked for", schedule.name,
                            schedule.stages_per_rank, stages, ranks),
                "parallel.backward_stages", "ask for as many stages as there are ranks, or choose the schedule mobius");
  }
  return options;
}

int forward_end(const ScheduleOptions& options, const ModelShape& shape) {
  if (options.evaluate) return shape.unit_count();
  return options.fuse_last ? options.backward_cuts.back() : shape.unit_count() - 1;
}

Assignment assign(const Schedule& schedule, const ScheduleOptions& options, const ModelShape& shape) {
  const auto stages = [](const std::vector<int>& cuts, int end) {
    std::vector<Stage> list;
    for (std::size_t i = 0; i < cuts.size(); ++i) list.push_back({cuts[i], i + 1 < cuts.size() ? cuts[i + 1] : end, 0});
    return list;
  };
  Assignment assignment;
  assignment.forward = stages(options.forward_cuts, forward_end(options, shape));
  assignment.backward = stages(options.backward_cuts, shape.unit_count());
  schedule.assign(assignment, options.ranks / options.replicas);
  return assignment;
}

std::vector<int> micro_batches_of(const ScheduleOptions& options, int replica) {
  // Replica k has the sum groups k G / K .. (k + 1) G / K - 1, so the micro-batches from k M / K on.
  const auto first = [&](std::int64_t k) { return static_cast<int>(k * options.micro_batches / options.replicas); };
  std::vector<int> list;
  for (int m = first(replica); m < first(replica + 1); ++m) list.push_back(m);
  return list;
}

bool forward_in_backward(const ModelShape& shape, const Stage& stage, int unit) {
  const model::ComputeUnit& own = shape.units[static_cast<std::size_t>(unit)];
  if (own.kind == UnitKind::head) return false;
  // The stage's last unit is repeated only for what it saves; the others also for the next unit's input.
  return unit + 1 < stage.end || own.saved.bytes > 0;
}

StageSeconds stage_flops(const Assignment& assignment, const ModelShape& shape) {
  return [&assignment, &shape](bool backward, int number) {
    const Stage& stage = (backward ? assignment.backward : assignment.forward)[static_cast<std::size_t>(number)];
    double flops = 1;
    for (int u = stage.begin; u < stage.end; ++u) {
      const model::ComputeUnit& unit = shape.units[static_cast<std::size_t>(u)];
      if (!backward || forward_in_backward(shape, stage, u)) flops += unit.forward_flops;
      if (backward) flops += unit.backward_flops;
    }
    return flops;
  };
}

std::vector<int> homes_of(const Assignment& training, const ScheduleOptions& options, const model::ModelShape& shape) {
  std::vector<int> homes(static_cast<std::size_t>(shape.store_unit_count()), -1);
  const int ranks = options.ranks / options.replicas;
  for (int s = 0; s < shape.store_unit_count(); ++s) {
    if (shape.store_units[static_cast<std::size_t>(s)].elements == 0) continue;
    for (const int source : shape.gradient_sources(s)) {
      const auto stage = std::find_if(training.backward.begin(), training.backward.end(),
                                      [&](const Stage& own) { return own.begin <= source && source < own.end; });
      SPIPE_CHECK(stage != training.backward.end(), "every unit has a backward stage");
      homes[static_cast<std::size_t>(s)] = s % options.replicas * ranks + stage->rank;
    }
  }
  return homes;
}

std::vector<int> unit_homes(const std::string& schedule, const PipelineInput& input) {
  PipelineInput training = input;
  training.evaluate = false;
  const Schedule& named = schedule_named(schedule);
  const ScheduleOptions options = resolve(named, training);
  return homes_of(assign(named, options, *input.shape), options, *input.shape);
}

}  // namespace spipe::plan
