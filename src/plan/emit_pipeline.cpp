// The drive over all visits, and everything that moves for them.
#include "emit_pipeline.h"

#include <algorithm>

#include "spipe/base/checked.h"

namespace spipe::plan {

namespace {

constexpr std::size_t kSpread = 4;        // fetches and offloads of a stage go out with this many visits
constexpr std::size_t kNever = SIZE_MAX;  // a place that does not come
constexpr std::size_t kWorthParking = 3;  // visits until a boundary is read again

template <typename List>
std::uint32_t found(const List& list, int key) {
  for (const auto& [place, buffer] : list) {
    if (place == key) return buffer;
  }
  return UINT32_MAX;
}

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

// Buffers.

std::uint32_t Pipeline::stored(BufferKind kind, int s) {
  std::uint32_t& buffer = stored_[static_cast<std::size_t>(kind)][static_cast<std::size_t>(s)];
  if (buffer == kNone) {
    const std::uint64_t size = kind == BufferKind::store_compute ? input_.compute_dtype_size
                               : kind == BufferKind::store_grad  ? input_.grad_dtype_size
                                                                 : input_.state_bytes_per_element;
    buffer = builder_.buffer({.kind = kind,
                              .place = kind == BufferKind::checkpoint_file ? Place::host : Place::store,
                              .rank = narrow<std::uint16_t>(home(s)),
                              .unit = s,
                              .bytes = elements(s) * size,
                              .host = narrow<std::uint16_t>(host(home(s)))});
  }
  return buffer;
}

std::uint32_t Pipeline::device(int rank, const Tensor& tensor) {
  return builder_.buffer({.kind = tensor.kind,
                          .rank = narrow<std::uint16_t>(rank),
                          .unit = tensor.unit,
                          .micro_batch = tensor.micro_batch,
                          .source = tensor.source,
                          .bytes = tensor.bytes});
}

std::uint32_t Pipeline::mailbox(int host, const Tensor& tensor) {
  return builder_.buffer({.kind = BufferKind::mailbox,
                          .place = Place::host,
                          .unit = tensor.unit,
                          .micro_batch = tensor.micro_batch,
                          .source = tensor.source,
                          .bytes = tensor.bytes,
                          .host = narrow<std::uint16_t>(host)});
}

// With stages fetched ahead, bytes that a copy reads are not given to the next visits, which would wait for the copy.
void Pipeline::hold(int rank, std::uint32_t buffer, std::size_t until_place) {
  Rank& owner = rank_at(rank);
  if (options_.prefetch > 0 && !owner.done()) owner.held.push_back({buffer, until_place});
}

// A gradient takes long to leave: the next run has its own, so until its end these bytes are hardly missed.
void Pipeline::hold_over_run(int rank, std::uint32_t buffer) {
  const Rank& owner = rank_at(rank);
  if (owner.done()) return;
  const Run& run = owner.runs[owner.run];
  hold(rank, buffer, std::max(run.first + run.count - 1, owner.place + 1));
}

// Messages.

std::uint32_t Pipeline::send(std::uint32_t device, const Tensor& tensor, int rank, std::uint16_t stage) {
  const std::uint32_t box = mailbox(host(rank), tensor);
  task(rank,
       {.kind = TaskKind::send,
        .stream = tensor.micro_batch >= 0 ? StreamKind::send : StreamKind::d2h,
        .unit = tensor.unit,
        .micro_batch = tensor.micro_batch,
        .stage = stage,
        .bytes = tensor.bytes},
       {{device, Access::read}, {box, Access::write}});
  if (tensor.micro_batch >= 0) {
    hold_over_visit(rank, device);
  } else {
    hold_over_run(rank, device);
  }
  return box;
}

std::uint32_t Pipeline::recv(std::uint32_t box, const Tensor& tensor, int rank, std::uint16_t stage, bool reserve) {
  const std::uint32_t target = device(rank, tensor);
  // What arrives during a visit does not take its bytes.
  if (reserve && options_.prefetch > 0) builder_.buffer_at(target).reserved_from = rank_at(rank).visit_begin;
  task(rank,
       {.kind = TaskKind::recv,
        .stream = tensor.micro_batch >= 0 ? StreamKind::recv : StreamKind::h2d,
        .unit = tensor.unit,
        .micro_batch = tensor.micro_batch,
        .stage = stage,
        .bytes = tensor.bytes},
       {{box, Access::read}, {target, Access::write}});
  return target;
}

std::uint32_t Pipeline::carry(const std::vector<Use>& sources, const Buffer& target, int from, int to, int unit,
                              int micro_batch, std::uint16_t stage) {
  const std::uint32_t wire = builder_.buffer({.kind = BufferKind::wire,
                                              .place = Place::network,
                                              .rank = narrow<std::uint16_t>(from),
                                              .unit = unit,
                                              .micro_batch = micro_batch,
                                              .bytes = target.bytes});
  const std::uint32_t filled = builder_.buffer(target);
  Task half{.kind = TaskKind::push,
            .stream = StreamKind::comm,
            .unit = unit,
            .micro_batch = micro_batch,
            .stage = stage,
            .bytes = target.bytes,
            .peer = builder_.tasks(),
            .peer_rank = narrow<std::uint16_t>(to)};
  std::vector<Use> uses = sources;
  uses.push_back({wire, Access::write});
  task(from, half, uses);
  half.kind = TaskKind::pull;
  half.peer_rank = narrow<std::uint16_t>(from);
  task(to, half, {{wire, Access::read}, {filled, Access::write}});
  return filled;
}

// Sends a tensor that `rank` made to the hosts of those who read it, unless it is the only one.
void Pipeline::publish(Copies& copies, const Tensor& tensor, int rank, std::uint16_t stage, const std::vector<int>& readers) {
  std::map<int, int> first_reader;  // by host
  for (const int reader : readers) {
    if (reader != rank) first_reader.try_emplace(host(reader), reader);
  }
  if (first_reader.empty()) return;
  const std::uint32_t box = send(found(copies.device, rank), tensor, rank, stage);
  copies.mailbox.emplace_back(host(rank), box);
  for (const auto& [other, reader] : first_reader) {
    if (other == host(rank)) continue;
    Buffer target = builder_.buffer_at(box);
    target.host = narrow<std::uint16_t>(other);
    copies.mailbox.emplace_back(other,
                                carry({{box, Access::read}}, target, rank, reader, tensor.unit, tensor.micro_batch, stage));
  }
}

// The tensor on the rank's device; kNone if nobody has made it yet (only `ahead`).
std::uint32_t Pipeline::acquire(Copies& copies, const Tensor& tensor, int rank, std::uint16_t stage, bool ahead) {
  const std::uint32_t here = found(copies.device, rank);
  if (here != kNone) return here;
  std::uint32_t target = kNone;
  if (const std::uint32_t parked = found(copies.parked, rank); parked != kNone) {
    target = device(rank, tensor);
    task(rank,
         {.kind = TaskKind::unpark,
          .stream = StreamKind::recv,
          .unit = tensor.unit,
          .micro_batch = tensor.micro_batch,
          .stage = stage,
          .bytes = tensor.bytes},
         {{parked, Access::read}, {target, Access::write}});
  } else if (const std::uint32_t box = found(copies.mailbox, host(rank)); box != kNone) {
    target = recv(box, tensor, rank, stage, !ahead);
  } else {
    SPIPE_CHECK(ahead, "a visit comes after those that make what it reads");
    return kNone;
  }
  copies.device.emplace_back(rank, target);
  return target;
}

// After a visit: keeps the tensor on the device for the rank's next reader, puts it into host memory until then, or drops it.
void Pipeline::settle(Copies& copies, const Tensor& tensor, int rank, std::uint16_t stage, std::size_t next_place) {
  const std::uint32_t here = found(copies.device, rank);
  if (here == kNone) return;
  const bool needed = next_place != kNever;
  const bool far = needed && options_.park && next_place - rank_at(rank).place >= kWorthParking;
  if (needed && !far) return;
  if (far && found(copies.mailbox, host(rank)) == kNone && found(copies.parked, rank) == kNone) {
    const std::uint32_t parked = builder_.buffer({.kind = BufferKind::parked,
                                                  .place = Place::host,
                                                  .rank = narrow<std::uint16_t>(rank),
                                                  .unit = tensor.unit,
                                                  .micro_batch = tensor.micro_batch,
                                                  .bytes = tensor.bytes,
                                                  .host = narrow<std::uint16_t>(host(rank))});
    task(rank,
         {.kind = TaskKind::park,
          .stream = StreamKind::send,
          .unit = tensor.unit,
          .micro_batch = tensor.micro_batch,
          .stage = stage,
          .bytes = tensor.bytes},
         {{here, Access::read}, {parked, Access::write}});
    hold_over_visit(rank, here);
    copies.parked.emplace_back(rank, parked);
  }
  std::erase_if(copies.device, [&](const auto& entry) { return entry.first == rank; });
}

void Pipeline::emit_input(int rank, int m) {
  std::uint32_t& buffer = rank_at(rank).inputs[static_cast<std::size_t>(m)];
  if (buffer != kNone) return;
  const std::uint32_t on_host = builder_.buffer({.kind = BufferKind::host_input,
                                                 .place = Place::host,
                                                 .rank = narrow<std::uint16_t>(rank),
                                                 .micro_batch = m,
                                                 .bytes = shape_.input_bytes,
                                                 .host = narrow<std::uint16_t>(host(rank))});
  buffer = device(rank, {BufferKind::input, -1, m, -1, shape_.input_bytes});
  task(rank, {.kind = TaskKind::input, .stream = StreamKind::recv, .micro_batch = m, .bytes = shape_.input_bytes},
       {{on_host, Access::read}, {buffer, Access::write}});
}

// Parameters.

// A unit that lives on another host is pulled once for all ranks of this host that fetch it in one direction.
std::uint32_t Pipeline::pulled_parameters(int rank, int s, bool backward) {
  const auto [entry, is_new] = pulled_.try_emplace({host(rank), s, backward}, kNone);
  if (is_new) {
    const Buffer target{.kind = BufferKind::mailbox,
                        .place = Place::host,
                        .unit = s,
                        .bytes = elements(s) * input_.compute_dtype_size,
                        .host = narrow<std::uint16_t>(host(rank))};
    entry->second = carry({{stored(BufferKind::store_compute, s), Access::read}}, target, home(s), rank, s, -1, 0);
  }
  return entry->second;
}

void Pipeline::emit_pulls(int rank, std::size_t run) {
  if (run >= rank_at(rank).runs.size()) return;
  const Run& wanted = rank_at(rank).runs[run];
  for (const int s : wanted.store_units) {
    const bool held = run > 0 && std::count(rank_at(rank).runs[run - 1].store_units.begin(),
                                            rank_at(rank).runs[run - 1].store_units.end(), s) > 0;
    if (!held && host(home(s)) != host(rank)) {
      static_cast<void>(pulled_parameters(rank, s, passes_[wanted.pass].backward));
    }
  }
}

// The fetches of a run that are due `visits` visits after they may start.
void Pipeline::emit_fetches(int rank, std::size_t run, std::size_t visits) {
  Rank& owner = rank_at(rank);
  if (run >= owner.runs.size()) return;
  Run& wanted = owner.runs[run];
  const Pass& pass = passes_[wanted.pass];
  const std::size_t count = wanted.store_units.size();
  const std::size_t during = run == 0 ? 1 : std::min(owner.runs[run - 1].count, kSpread);
  for (std::size_t i = 0; i < count; ++i) {
    const int s = wanted.store_units[i];
    std::uint32_t& buffer = wanted.fetched[static_cast<std::size_t>(s)];
    if (buffer != kNone || i * during / count > visits) continue;
    // A unit that the run before holds is not fetched twice.
    if (run > 0) buffer = owner.runs[run - 1].fetched[static_cast<std::size_t>(s)];
    if (buffer != kNone) continue;
    const std::uint64_t bytes = elements(s) * input_.compute_dtype_size;
    const std::uint32_t source =
        host(home(s)) == host(rank) ? stored(BufferKind::store_compute, s) : pulled_parameters(rank, s, pass.backward);
    buffer = device(rank, {BufferKind::parameters, s, -1, -1, bytes});
    task(rank,
         {.kind = TaskKind::fetch,
          .stream = StreamKind::h2d,
          .unit = s,
          .stage = narrow<std::uint16_t>(pass.number),
          .bytes = bytes},
         {{source, Access::read}, {buffer, Access::write}});
  }
}

// The drive.

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
    emit_updates();
  }
  Plan plan = builder_.take();
  plan.host_of_rank = host_of_rank_;
  plan.home_of_unit = homes_;
  return plan;
}

Plan emit_pipeline(const Schedule& schedule, const PipelineInput& input) { return Pipeline(schedule, input).emit(); }

}  // namespace spipe::plan
