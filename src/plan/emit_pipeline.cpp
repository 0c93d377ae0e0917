// The drive over all visits.
#include "emit_pipeline.h"

#include <algorithm>

#include "spipe/base/checked.h"

namespace spipe::plan {

namespace {

constexpr std::size_t kNever = SIZE_MAX;  // a place that does not come

}  // namespace

Pipeline::Pipeline(const Schedule& schedule, const PipelineInput& input)
    : schedule_(schedule),
      input_(input),
      shape_(*input.shape),
      options_(resolve(schedule, input)),
      assignment_(assign(schedule, options_, shape_)),
      host_of_rank_(input.host_of_rank.empty() ? std::vector<int>(static_cast<std::size_t>(input.ranks), 0)
                                               : input.host_of_rank),
      builder_(options_, input.ranks, shape_.store_unit_count(), shape_.unit_count()),
      updates_(builder_, shape_, options_, input.update_bytes(),
               {.stored = [this](BufferKind kind, int s) { return stored(kind, s); },
                .home = [this](int s) { return home(s); },
                .host = [this](int rank) { return host(rank); },
                .task = [this](int rank, const Task& t, const std::vector<Use>& uses) { task(rank, t, uses); }}),
      ranks_(static_cast<std::size_t>(input.ranks)) {
  const auto units = static_cast<std::size_t>(shape_.unit_count());
  const auto micro_batches = static_cast<std::size_t>(options_.micro_batches);
  boundaries_.resize((units + 1) * micro_batches);
  gradients_.resize((units + 1) * micro_batches);
  for (Rank& rank : ranks_) rank.inputs.assign(micro_batches, kNone);
  stored_.assign(kBufferKinds, std::vector<std::uint32_t>(static_cast<std::size_t>(shape_.store_unit_count()), kNone));
  const auto hosts = static_cast<std::size_t>(*std::max_element(host_of_rank_.begin(), host_of_rank_.end())) + 1;
  norm_values_.assign(hosts, kNone);
  results_.resize(hosts);
  list_groups();
  list_sums();
  list_steps();
  list_runs();
}

std::size_t Pipeline::pass_index(int replica, bool backward, int stage) const {
  const std::size_t forwards = assignment_.forward.size(), all = forwards + assignment_.backward.size();
  return static_cast<std::size_t>(replica) * all + (backward ? forwards : 0) + static_cast<std::size_t>(stage);
}

// All visits of all replicas in the order in which they would start if only computing took time.
void Pipeline::list_steps() {
  const int ranks = options_.ranks / options_.replicas;
  Assignment working = assignment_;
  if (options_.evaluate) working.backward.clear();
  const StageSeconds seconds = stage_flops(working, shape_);
  forward_from_.assign(static_cast<std::size_t>(shape_.unit_count()) + 1, -1);
  backward_from_ = backward_to_ = forward_from_;
  const auto number = [](std::vector<int>& list, int u, std::size_t i) {
    list[static_cast<std::size_t>(u)] = static_cast<int>(i);
  };
  for (std::size_t f = 0; f < working.forward.size(); ++f) number(forward_from_, working.forward[f].begin, f);
  for (std::size_t b = 0; b < working.backward.size(); ++b) {
    number(backward_from_, working.backward[b].begin, b);
    number(backward_to_, working.backward[b].end, b);
  }
  for (int k = 0; k < options_.replicas; ++k) {
    for (const bool backward : {false, true}) {
      const auto& stages = backward ? assignment_.backward : assignment_.forward;
      for (std::size_t i = 0; i < stages.size(); ++i) {
        passes_.push_back({backward, static_cast<int>(i), k * ranks + stages[i].rank, stages[i]});
      }
    }
    const VisitLists lists = schedule_.order(working, micro_batches_of(options_, k), ranks, seconds);
    for (const auto& list : lists) {
      for (const Visit& visit : list) {
        steps_.push_back({pass_index(k, visit.backward, visit.stage), visit.micro_batch, visit.start});
      }
    }
  }
  std::stable_sort(steps_.begin(), steps_.end(), [](const Step& a, const Step& b) { return a.start < b.start; });
}

void Pipeline::list_runs() {
  places_.assign(passes_.size(), std::vector<std::size_t>(static_cast<std::size_t>(options_.micro_batches), kNever));
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    Step& step = steps_[i];
    const Pass& pass = passes_[step.pass];
    Rank& rank = rank_at(pass.rank);
    step.place = rank.steps.size();
    places_[step.pass][static_cast<std::size_t>(step.micro_batch)] = step.place;
    rank.steps.push_back(i);
    if (rank.runs.empty() || rank.runs.back().pass != step.pass) {
      Run run{
          step.pass, step.place, 0, {}, std::vector<std::uint32_t>(static_cast<std::size_t>(shape_.store_unit_count()), kNone)};
      for (int u = pass.stage.begin; u < pass.stage.end; ++u) {
        if (!needs_parameters(pass, u)) continue;
        for (const int s : unit(u).store_units) {
          const bool listed = std::find(run.store_units.begin(), run.store_units.end(), s) != run.store_units.end();
          if (elements(s) > 0 && !listed) run.store_units.push_back(s);
        }
      }
      rank.runs.push_back(std::move(run));
    }
    ++rank.runs.back().count;
    step.run = rank.runs.size() - 1;
  }
}

std::uint32_t Pipeline::task(int rank, Task task, const std::vector<Use>& uses) {
  task.rank = narrow<std::uint16_t>(rank);
  const std::uint32_t id = builder_.task(task, uses);
  rank_at(rank).last_task = id;
  return id;
}

std::uint16_t Pipeline::stage_of(const Step& step) const { return narrow<std::uint16_t>(passes_[step.pass].number); }

std::uint16_t Pipeline::last_flag(const Step& step, bool last_unit) const {
  const auto& places = places_[step.pass];
  const bool last_visit =
      std::none_of(places.begin(), places.end(), [&](std::size_t p) { return p != kNever && p > step.place; });
  return last_unit && last_visit ? kLastOfStage : 0;
}

// Brings what the visit at `place` reads, as far as it exists.
void Pipeline::prepare(int rank, std::size_t place, bool ahead) {
  const Rank& owner = rank_at(rank);
  if (place >= owner.steps.size()) return;
  const Step& step = steps_[owner.steps[place]];
  const Pass& pass = passes_[step.pass];
  const int m = step.micro_batch;
  if (pass.stage.begin == 0 || pass.stage.end > head()) emit_input(rank, m);
  if (pass.stage.begin > 0) {
    const int u = pass.stage.begin;
    static_cast<void>(acquire(boundaries_[index(u, m)], boundary(u, m), rank, stage_of(step), ahead));
  }
  if (pass.backward && pass.stage.end <= head()) {
    const int u = pass.stage.end;
    static_cast<void>(acquire(gradients_[index(u, m)], boundary_gradient(u, m), rank, stage_of(step), ahead));
  }
}

void Pipeline::emit_step(const Step& step) {
  const int rank = passes_[step.pass].rank;
  Rank& owner = rank_at(rank);
  owner.place = step.place;
  owner.run = step.run;
  owner.in_visit = true;
  const std::size_t visit = step.place - owner.runs[step.run].first;
  const auto ahead = static_cast<std::size_t>(options_.prefetch);
  if (visit == 0) {
    emit_fetches(rank, step.run, kNever);
    emit_pulls(rank, step.run + ahead + 1);
    const std::size_t visits = std::min(owner.runs[step.run].count, kSpread);
    owner.offloads_due = owner.offloads.size();
    owner.offloads_per_visit = (owner.offloads_due + visits - 1) / visits;
  }
  prepare(rank, step.place, false);
  owner.visit_begin = builder_.tasks();
  if (ahead > 0) prepare(rank, step.place + 1, true);
  for (std::size_t q = step.run + 1; q <= step.run + ahead; ++q) {
    emit_fetches(rank, q, q == step.run + ahead ? visit : kNever);
  }
  if (passes_[step.pass].backward) {
    backward_visit(step);
  } else {
    forward_visit(step);
  }
  end_of_visit(rank, step);
}

void Pipeline::offload_some(Rank& owner, std::size_t most) {
  for (std::size_t i = 0; i < most && !owner.offloads.empty(); ++i) {
    const int s = owner.offloads.front();
    owner.offloads.erase(owner.offloads.begin());
    emit_offload(s);
  }
}

void Pipeline::end_of_visit(int rank, const Step& step) {
  Rank& owner = rank_at(rank);
  const bool late = options_.prefetch > 0 && step.place + 1 < owner.steps.size();
  // Gradients leave with the visits of the run after theirs, so that boundaries need not queue behind a whole stage.
  const std::size_t due = std::min(owner.offloads_due, owner.offloads_per_visit);
  owner.offloads_due -= due;
  offload_some(owner, due);
  std::vector<std::pair<Sum*, std::size_t>> finishes;
  std::swap(finishes, owner.finishes);
  for (const auto& entry : finishes) {
    if (late && entry.second > step.place) {
      owner.finishes.push_back(entry);
    } else {
      finish(*entry.first);
    }
  }
  if (!late) offload_some(owner, owner.offloads.size());
  std::erase_if(owner.held, [&](const Held& held) {
    if (held.until_place > step.place) return false;
    std::uint32_t& until = builder_.buffer_at(held.buffer).held_until;
    until = std::max(until, owner.last_task);
    return true;
  });
  owner.place = step.place + 1;
  owner.in_visit = false;
}

// What is left when a rank has no more visits.
void Pipeline::flush(int rank) {
  Rank& owner = rank_at(rank);
  std::vector<std::pair<Sum*, std::size_t>> finishes;
  std::swap(finishes, owner.finishes);
  for (const auto& entry : finishes) finish(*entry.first);
  offload_some(owner, owner.offloads.size());
}

Plan Pipeline::emit() {
  updates_.add_residents();
  if (options_.save) emit_saves();
  for (std::size_t run = 0; run <= static_cast<std::size_t>(options_.prefetch); ++run) {
    for (int rank = 0; rank < options_.ranks; ++rank) emit_pulls(rank, run);
  }
  for (const Step& step : steps_) emit_step(step);
  if (training()) {
    // Twice: a sum that one rank finishes may be what another one offloads.
    for (int round = 0; round < 2; ++round) {
      for (int rank = 0; rank < options_.ranks; ++rank) flush(rank);
    }
    emit_norms();
    updates_.finish(norm_values_);
  }
  Plan plan = builder_.take();
  plan.host_of_rank = host_of_rank_;
  plan.home_of_unit = homes_;
  return plan;
}

Plan emit_pipeline(const Schedule& schedule, const PipelineInput& input) { return Pipeline(schedule, input).emit(); }

}  // namespace spipe::plan
