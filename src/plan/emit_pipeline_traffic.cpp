// Everything that moves: boundaries and their gradients between ranks and hosts, inputs, parameters.
#include <algorithm>

#include "emit_pipeline.h"
#include "spipe/base/checked.h"

namespace spipe::plan {

namespace {

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

// Buffers.

std::uint32_t Pipeline::stored(BufferKind kind, int s) {
  std::uint32_t& buffer = stored_[static_cast<std::size_t>(kind)][static_cast<std::size_t>(s)];
  if (buffer == kNone) {
    const std::uint64_t size = kind == BufferKind::store_compute  ? input_.compute_dtype_size
                               : kind == BufferKind::store_grad   ? input_.grad_dtype_size
                               : kind == BufferKind::store_shadow ? input_.update_bytes().slot()
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

}  // namespace spipe::plan
