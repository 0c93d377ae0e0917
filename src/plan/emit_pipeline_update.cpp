// Gradients from their first contribution to the store, and what follows in the store.
#include <algorithm>

#include "emit_pipeline.h"
#include "spipe/base/checked.h"

namespace spipe::plan {

namespace {
constexpr std::uint64_t kBlockElements = 4096;  // of the norm
}

// Group g holds micro-batches floor(g M / G) .. floor((g + 1) M / G) - 1; empty ones are skipped.
void Pipeline::list_groups() {
  const std::int64_t count = options_.micro_batches, groups = options_.sum_groups;
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::int64_t begin = g * count / groups, end = (g + 1) * count / groups;
    if (begin == end) continue;
    for (std::int64_t m = begin; m < end; ++m) group_of_.push_back(static_cast<int>(groups_.size()));
    groups_.emplace_back(static_cast<int>(begin), static_cast<int>(end) - 1);
  }
}

// The group of a micro-batch, and whether it is the first in it.
std::pair<std::size_t, bool> Pipeline::place_in_group(int m) const {
  const auto group = static_cast<std::size_t>(group_of_[static_cast<std::size_t>(m)]);
  return {group, groups_[group].first == m};
}

// A unit is at home on the rank that runs its (last contributing) backward in one of the replicas, which take turns. Homes
// depend on the stages of training only: an evaluation has the same.
void Pipeline::list_sums() {
  PipelineInput input = input_;
  input.evaluate = false;
  const ScheduleOptions options = resolve(schedule_, input);
  const Assignment training = assign(schedule_, options, shape_);
  homes_ = homes_of(training, options, shape_);
  const int ranks = options_.ranks / options_.replicas;
  const auto stores = static_cast<std::size_t>(shape_.store_unit_count());
  sums_.resize(stores);
  sums_left_.assign(stores, 0);
  for (std::size_t s = 0; s < stores; ++s) {
    const int number = static_cast<int>(s);
    if (elements(number) == 0) continue;
    for (const int source : shape_.gradient_sources(number)) {
      const auto stage = std::find_if(training.backward.begin(), training.backward.end(),
                                      [&](const Stage& own) { return own.begin <= source && source < own.end; });
      SPIPE_CHECK(stage != training.backward.end(), "every unit has a backward stage");
      Sum sum;
      sum.unit = number;
      sum.source = source;
      sum.collector = number % options_.replicas * ranks + stage->rank;
      sum.stage = static_cast<int>(stage - training.backward.begin());
      sum.parts.resize(groups_.size());
      sums_[s].push_back(std::move(sum));
      ++sums_left_[s];
    }
  }
}

Pipeline::Sum& Pipeline::sum_of(int s, int source) {
  auto& list = sums_[static_cast<std::size_t>(s)];
  const auto found = std::find_if(list.begin(), list.end(), [&](const Sum& sum) { return sum.source == source; });
  SPIPE_CHECK(found != list.end(), "a compute unit contributes to the store units it lists");
  return *found;
}

Pipeline::Tensor Pipeline::gradient_tensor(const Sum& sum, bool partial) const {
  return {partial ? BufferKind::gradient_partial : BufferKind::gradient, sum.unit, -1, sum.source, elements(sum.unit) * 4};
}

void Pipeline::use_gradients(std::vector<Use>& uses, const Step& step, int u) {
  const int rank = passes_[step.pass].rank;
  const auto [group, first] = place_in_group(step.micro_batch);
  for (const int s : unit(u).store_units) {
    if (elements(s) == 0) continue;
    Sum& sum = sum_of(s, u);
    Part& part = sum.parts[group];
    const bool total = rank == sum.collector && group == 0;
    if (first) part.device = device(rank, gradient_tensor(sum, !total));
    uses.push_back({part.device, first ? Access::write : Access::update});
  }
}

// After the last micro-batch of a group: its sum joins the total, or goes to the rank that collects them.
void Pipeline::group_done(const Step& step, int u) {
  const int rank = passes_[step.pass].rank;
  const std::size_t group = place_in_group(step.micro_batch).first;
  if (groups_[group].second != step.micro_batch) return;
  for (const int s : unit(u).store_units) {
    if (elements(s) == 0) continue;
    Sum& sum = sum_of(s, u);
    Part& part = sum.parts[group];
    if (rank != sum.collector) {
      const Tensor tensor = gradient_tensor(sum, true);
      part.mailbox = send(part.device, tensor, rank, stage_of(step));
      part.device = kNone;
      if (host(rank) != host(sum.collector)) {
        Buffer target = builder_.buffer_at(part.mailbox);
        target.host = narrow<std::uint16_t>(host(sum.collector));
        part.mailbox = carry({{part.mailbox, Access::read}}, target, rank, sum.collector, s, -1, stage_of(step));
      }
    } else if (sum.added == group) {
      add_part(sum);
    }
    if (++sum.done < sum.parts.size()) continue;
    if (sum.added == sum.parts.size()) {
      sum_complete(sum);
    } else {
      // Parts are on their way: the collector goes on with its next visit and takes them after it.
      Rank& collector = rank_at(sum.collector);
      collector.finishes.emplace_back(&sum, collector.place + (collector.in_visit ? 1 : 0));
    }
  }
}

// Adds the next group's sum to the total.
void Pipeline::add_part(Sum& sum) {
  Part& part = sum.parts[sum.added];
  const auto stage = narrow<std::uint16_t>(sum.stage);
  const bool first = sum.added == 0;
  if (part.device == kNone) part.device = recv(part.mailbox, gradient_tensor(sum, !first), sum.collector, stage, true);
  if (first) {
    sum.total = part.device;
  } else {
    task(sum.collector,
         {.kind = TaskKind::reduce,
          .unit = sum.unit,
          .micro_batch = groups_[sum.added].second,
          .stage = stage,
          .bytes = elements(sum.unit) * 12},
         {{part.device, Access::read}, {sum.total, Access::update}});
  }
  ++sum.added;
}

void Pipeline::finish(Sum& sum) {
  while (sum.added < sum.parts.size()) add_part(sum);
  sum_complete(sum);
}

void Pipeline::sum_complete(Sum& sum) {
  const int at_home = home(sum.unit);
  const auto stage = narrow<std::uint16_t>(sum.stage);
  const std::size_t left = --sums_left_[static_cast<std::size_t>(sum.unit)];
  const Tensor tensor = gradient_tensor(sum, false);
  if (sum.collector != at_home) {
    sum.mailbox = send(sum.total, tensor, sum.collector, stage);
    sum.total = kNone;
    if (host(sum.collector) != host(at_home)) {
      Buffer target = builder_.buffer_at(sum.mailbox);
      target.host = narrow<std::uint16_t>(host(at_home));
      sum.mailbox = carry({{sum.mailbox, Access::read}}, target, sum.collector, at_home, sum.unit, -1, stage);
    }
  } else if (options_.park && left > 0) {
    sum.parked = builder_.buffer({.kind = BufferKind::parked,
                                  .place = Place::host,
                                  .rank = narrow<std::uint16_t>(at_home),
                                  .unit = sum.unit,
                                  .source = sum.source,
                                  .bytes = tensor.bytes,
                                  .host = narrow<std::uint16_t>(host(at_home))});
    task(at_home, {.kind = TaskKind::park, .stream = StreamKind::d2h, .unit = sum.unit, .stage = stage, .bytes = tensor.bytes},
         {{sum.total, Access::read}, {sum.parked, Access::write}});
    sum.total = kNone;
  }
  if (left == 0) rank_at(at_home).offloads.push_back(sum.unit);
}

std::uint32_t Pipeline::total_at_home(Sum& sum) {
  if (sum.total != kNone) return sum.total;
  const int rank = home(sum.unit);
  const auto stage = narrow<std::uint16_t>(sum.stage);
  const Tensor tensor = gradient_tensor(sum, false);
  if (sum.mailbox != kNone) return recv(sum.mailbox, tensor, rank, stage, true);
  const std::uint32_t target = device(rank, tensor);
  task(rank, {.kind = TaskKind::unpark, .stream = StreamKind::h2d, .unit = sum.unit, .stage = stage, .bytes = tensor.bytes},
       {{sum.parked, Access::read}, {target, Access::write}});
  return target;
}

void Pipeline::emit_offload(int s) {
  std::vector<Use> uses;
  auto& sums = sums_[static_cast<std::size_t>(s)];
  for (Sum& sum : sums) {
    uses.push_back({total_at_home(sum), Access::read});
    hold_over_run(home(s), uses.back().buffer);
  }
  uses.push_back({stored(BufferKind::store_grad, s), Access::write});
  task(home(s),
       {.kind = TaskKind::offload,
        .stream = StreamKind::d2h,
        .unit = s,
        .stage = narrow<std::uint16_t>(sums.back().stage),
        .bytes = elements(s) * input_.grad_dtype_size},
       uses);
  updates_.offloaded(s);
}

// One rank of a host writes all that lives there, so that files need not be shared.
void Pipeline::emit_saves() {
  for (int s = 0; s < shape_.store_unit_count(); ++s) {
    if (elements(s) == 0) continue;
    task(lowest_rank(host(home(s))),
         {.kind = TaskKind::save, .stream = StreamKind::io, .unit = s, .bytes = elements(s) * input_.state_bytes_per_element},
         {{stored(BufferKind::store_compute, s), Access::read},
          {stored(BufferKind::store_state, s), Access::read},
          {stored(BufferKind::checkpoint_file, s), Access::write}});
  }
}

int Pipeline::lowest_rank(int of_host) const {
  return static_cast<int>(std::find(host_of_rank_.begin(), host_of_rank_.end(), of_host) - host_of_rank_.begin());
}

// Every host sends its shares to all others and combines all of them in the same order: all get the same bits.
void Pipeline::emit_norms() {
  const int hosts = static_cast<int>(norm_values_.size());
  std::vector<std::vector<Use>> shares(norm_values_.size()), uses(norm_values_.size());
  std::vector<std::uint64_t> bytes(norm_values_.size(), 0);
  for (int s = 0; s < shape_.store_unit_count(); ++s) {
    if (elements(s) == 0) continue;
    const auto h = static_cast<std::size_t>(host(home(s)));
    shares[h].push_back({stored(BufferKind::store_grad, s), Access::read});
    bytes[h] += 8;
    for (const model::Parameter& p : shape_.store_units[static_cast<std::size_t>(s)].parameters) {
      bytes[h] += (p.elements() + kBlockElements - 1) / kBlockElements * 8;
    }
  }
  for (std::size_t h = 0; h < results_.size(); ++h) {
    for (const std::uint32_t result : results_[h]) shares[h].push_back({result, Access::read});
    bytes[h] += results_[h].size() * 16;
    bytes[h] += 8;  // what signals have asked of the host's ranks
    uses[h] = shares[h];
  }
  for (int from = 0; from < hosts; ++from) {
    const auto source = static_cast<std::size_t>(from);
    for (int to = 0; to < hosts && !shares[source].empty(); ++to) {
      if (from == to) continue;
      const Buffer parts{.kind = BufferKind::norm_parts,
                         .place = Place::host,
                         .source = from,
                         .bytes = round_up(bytes[source], 256),
                         .host = narrow<std::uint16_t>(to)};
      const std::uint32_t filled = carry(shares[source], parts, lowest_rank(from), lowest_rank(to), -1, -1, 0);
      uses[static_cast<std::size_t>(to)].push_back({filled, Access::read});
    }
  }
  for (int h = 0; h < hosts; ++h) {
    const auto own = static_cast<std::size_t>(h);
    norm_values_[own] = builder_.buffer({.kind = BufferKind::norm_value,
                                         .place = Place::host,
                                         .rank = narrow<std::uint16_t>(lowest_rank(h)),
                                         .bytes = 256,
                                         .host = narrow<std::uint16_t>(h)});
    uses[own].push_back({norm_values_[own], Access::write});
    task(lowest_rank(h), {.kind = TaskKind::norm, .stream = StreamKind::decide}, uses[own]);
  }
}

}  // namespace spipe::plan
