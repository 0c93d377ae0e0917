// Happens-before of two unrolled steps, races, and memory.
#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "verify_parts.h"

namespace spipe::plan::verification {

namespace {
constexpr std::uint32_t kNobody = UINT32_MAX;
}

Order::Order(const Subject& subject) : tasks_(static_cast<std::uint32_t>(subject.plan.tasks.size())), line_(tasks_, -1) {
  std::map<std::pair<int, int>, int> numbers;
  for (const Task& task : subject.plan.tasks) {
    if (ends_in_any_order(task)) continue;
    const std::pair key{static_cast<int>(task.rank), static_cast<int>(task.stream)};
    line_[task.id] = numbers.emplace(key, static_cast<int>(numbers.size())).first->second;
  }
  lines_ = static_cast<std::uint32_t>(numbers.size());
  seen_.assign(std::size_t{2} * tasks_ * lines_, 0);
  loose_number_.assign(std::size_t{2} * tasks_, kNobody);
  std::vector<std::uint32_t> last(lines_, kNobody);
  for (std::uint32_t node = 0; node < 2 * tasks_; ++node) {
    const Task& task = subject.plan.tasks[node % tasks_];
    const int own = line_[task.id];
    if (own < 0) {
      loose_number_[node] = static_cast<std::uint32_t>(loose_.size());
      loose_.push_back({std::vector<std::uint32_t>(lines_, kNobody), {}});
    } else {
      std::uint32_t& latest = last[static_cast<std::size_t>(own)];
      if (latest != kNobody) absorb(node, latest);
      latest = node;
    }
    for (const Wait& wait : subject.waits(task)) {
      const bool first_step = node < tasks_;
      if (wait.previous_step && first_step) continue;
      absorb(node, wait.previous_step || first_step ? wait.task : tasks_ + wait.task);
    }
  }
}

void Order::absorb(std::uint32_t node, std::uint32_t earlier) {
  std::uint32_t* mine = &seen_[std::size_t{node} * lines_];
  const std::uint32_t* theirs = &seen_[std::size_t{earlier} * lines_];
  for (std::uint32_t l = 0; l < lines_; ++l) mine[l] = std::max(mine[l], theirs[l]);
  const int own = line(node), other = line(earlier);
  if (other >= 0) {
    mine[other] = std::max(mine[other], earlier + 1);
    return;
  }
  // `earlier` is unordered: remember the way out of it, for itself and for the unordered ones before it.
  const std::vector<std::uint32_t> chain = [&] {
    std::vector<std::uint32_t> list = loose_[loose_number_[earlier]].predecessors;
    list.push_back(earlier);
    return list;
  }();
  for (const std::uint32_t unordered : chain) {
    if (own >= 0) {
      std::uint32_t& first = loose_[loose_number_[unordered]].first_on_line[static_cast<std::size_t>(own)];
      first = std::min(first, node);
    } else {
      auto& before_me = loose_[loose_number_[node]].predecessors;
      if (std::find(before_me.begin(), before_me.end(), unordered) == before_me.end()) before_me.push_back(unordered);
    }
  }
}

bool Order::before(std::uint32_t earlier, std::uint32_t later) const {
  const int from = line(earlier);
  if (from >= 0) return seen(later, from) > earlier;
  const Loose& start = loose_[loose_number_[earlier]];
  if (line(later) < 0) {
    const auto& list = loose_[loose_number_[later]].predecessors;
    if (std::find(list.begin(), list.end(), earlier) != list.end()) return true;
  } else if (start.first_on_line[static_cast<std::size_t>(line(later))] <= later) {
    return true;
  }
  for (std::uint32_t l = 0; l < lines_; ++l) {
    if (start.first_on_line[l] != kNobody && seen(later, static_cast<int>(l)) > start.first_on_line[l]) return true;
  }
  return false;
}

namespace {

// Which memory a buffer is: store planes are shared by all ranks and by the gradients that live in them.
std::vector<std::uint32_t> same_memory(const Plan& plan) {
  std::map<std::tuple<int, int, int>, std::uint32_t> planes;
  std::vector<std::uint32_t> memory;
  memory.reserve(plan.buffers.size());
  for (const Buffer& buffer : plan.buffers) {
    auto self = static_cast<std::uint32_t>(memory.size());
    if (buffer.place == Place::store) {
      const BufferKind plane = buffer.kind == BufferKind::store_compute || buffer.kind == BufferKind::store_state ||
                                       buffer.kind == BufferKind::store_shadow
                                   ? buffer.kind
                                   : BufferKind::store_grad;
      self = planes.emplace(std::tuple{static_cast<int>(plane), buffer.unit, int{buffer.host}}, self).first->second;
    }
    memory.push_back(self);
  }
  return memory;
}

// The invariant that a missing order between two accesses of `buffer` breaks.
int raced_invariant(const Buffer& buffer, const Task& earlier, const Task& later, bool over_border, bool later_writes) {
  switch (buffer.kind) {
    case BufferKind::parameters:
      return over_border ? 6 : 1;
    case BufferKind::store_compute:
    case BufferKind::store_state:
      if (!later_writes) return over_border ? 4 : 1;
      return earlier.kind == TaskKind::optimize && later.kind == TaskKind::commit ? 3 : 1;
    case BufferKind::gradient:
    case BufferKind::gradient_partial:
      return over_border && buffer.place == Place::device ? 6 : 3;
    case BufferKind::store_shadow:
    case BufferKind::resident_state:
      return 3;
    case BufferKind::state_piece:
      return over_border ? 6 : 3;
    case BufferKind::store_grad:
    case BufferKind::norm_value:
    case BufferKind::checkpoint_file:
    case BufferKind::norm_parts:
      return 3;
    case BufferKind::mailbox:
      return over_border ? 6 : 5;
    case BufferKind::wire:
      return 5;
    default:
      return over_border && buffer.place == Place::device ? 6 : 2;
  }
}

}  // namespace

Finding check_races(const Subject& subject, const Order& order) {
  const Plan& plan = subject.plan;
  const std::uint32_t tasks = order.tasks();
  const std::vector<std::uint32_t> memory = same_memory(plan);
  struct History {
    std::uint32_t writer = kNobody;
    std::vector<std::uint32_t> readers;
  };
  std::vector<History> histories(plan.buffers.size());
  for (std::uint32_t node = 0; node < 2 * tasks; ++node) {
    const Task& task = plan.tasks[node % tasks];
    for (const Use& use : subject.uses(task)) {
      History& history = histories[memory[use.buffer]];
      const bool writes = use.access != Access::read;
      const auto raced = [&](std::uint32_t earlier) -> Finding {
        if (earlier == kNobody || earlier == node || order.before(earlier, node)) return std::nullopt;
        const Task& other = plan.tasks[earlier % tasks];
        const Buffer& buffer = subject.buffer(use);
        const bool over_border = earlier / tasks != node / tasks;
        if (over_border && buffer.kind == BufferKind::wire) return std::nullopt;  // messages queue
        return subject.violation(
            raced_invariant(buffer, other, task, over_border, writes), task,
            fmt::format("{} {} of unit {}{} without waiting for {}{}", writes ? "overwrites" : "reads",
                        buffer_kind_name(buffer.kind), buffer.unit,
                        buffer.micro_batch >= 0 ? fmt::format(", micro-batch {},", buffer.micro_batch) : std::string(),
                        subject.name(other), over_border ? " of the step before" : ""));
      };
      if (auto found = raced(history.writer)) return found;
      if (!writes) {
        history.readers.push_back(node);
        continue;
      }
      for (const std::uint32_t reader : history.readers) {
        if (auto found = raced(reader)) return found;
      }
      history.readers.clear();
      history.writer = node;
    }
  }
  return std::nullopt;
}

namespace {

// When a buffer is in use, and its last accesses: one of every line is enough.
struct Tenancy {
  std::uint32_t first = kNobody, last = 0;
  std::vector<std::uint32_t> last_accesses;
};

std::vector<Tenancy> tenancies(const Subject& subject, const Order& order) {
  std::vector<Tenancy> all(subject.plan.buffers.size());
  for (const Task& task : subject.plan.tasks) {
    for (const Use& use : subject.uses(task)) {
      Tenancy& tenancy = all[use.buffer];
      tenancy.first = std::min(tenancy.first, task.id);
      tenancy.last = task.id;
      auto& accesses = tenancy.last_accesses;
      const int line = order.line(task.id);
      if (line >= 0) std::erase_if(accesses, [&](std::uint32_t access) { return order.line(access) == line; });
      accesses.push_back(task.id);
    }
  }
  return all;
}

// Where a buffer has its offset: a rank's device, the part of it for state that stays there, or parking; or a host's mailboxes.
enum class Area : std::uint8_t { device, residents, parking, mailboxes, none };

Area area_of(const Buffer& buffer) {
  if (buffer.kind == BufferKind::resident_state) return Area::residents;
  if (buffer.place == Place::device) return Area::device;
  if (buffer.place != Place::host) return Area::none;
  if (buffer.kind == BufferKind::parked) return Area::parking;
  return buffer.kind == BufferKind::mailbox || buffer.kind == BufferKind::norm_parts ? Area::mailboxes : Area::none;
}

// Bytes of the store that a rank's compute uses in place, by unit and plane.
std::uint64_t in_place_bytes(const Subject& subject, int rank) {
  std::set<std::pair<BufferKind, int>> seen;
  std::uint64_t bytes = 0;
  for (const Task& task : subject.plan.tasks) {
    if (task.rank != rank || task.stream != StreamKind::compute) continue;
    for (const Use& use : subject.uses(task)) {
      const Buffer& buffer = subject.buffer(use);
      if (buffer.place != Place::store || !seen.emplace(buffer.kind, buffer.unit).second) continue;
      const std::uint64_t size = buffer.kind == BufferKind::store_compute ? dtype_size(subject.shape.compute) : 4;
      bytes += subject.elements(buffer.unit) * size;
    }
  }
  return bytes;
}

Finding check_bounds(const Subject& subject, const std::vector<Tenancy>& all, const Limits& limits) {
  const Plan& plan = subject.plan;
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    const Buffer& buffer = plan.buffers[b];
    const Area area = area_of(buffer);
    if (all[b].first == kNobody || area == Area::none) continue;
    const Task& task = plan.tasks[all[b].first];
    const std::uint64_t mailboxes = buffer.host < plan.mailbox_bytes.size() ? plan.mailbox_bytes[buffer.host] : 0;
    const std::uint64_t end = area == Area::device      ? plan.arena_bytes
                              : area == Area::residents ? plan.resident_bytes
                              : area == Area::parking   ? plan.parking_bytes
                                                        : mailboxes;
    if (buffer.offset % 256 != 0 || buffer.bytes % 256 != 0) {
      return subject.violation(6, task,
                               fmt::format("uses a buffer at {}+{}, which is not aligned", buffer.offset, buffer.bytes));
    }
    if (buffer.bytes > end || buffer.offset > end - buffer.bytes) {
      return subject.violation(
          6, task, fmt::format("uses a buffer at {}+{}, outside the planned {} bytes", buffer.offset, buffer.bytes, end));
    }
  }
  const Task none = plan.tasks.empty() ? Task{} : plan.tasks.front();
  for (int rank = 0; rank < plan.ranks; ++rank) {
    const std::uint64_t used = in_place_bytes(subject, rank);
    if (used > plan.in_place_bytes) {
      return Violation{6, none.id,
                       fmt::format("invariant 6: the plan counts {} bytes used in place, but rank {} uses {}",
                                   plan.in_place_bytes, rank, used)};
    }
  }
  const std::uint64_t beside = plan.in_place_bytes + plan.resident_bytes;
  if (plan.arena_bytes > limits.device_bytes || beside > limits.device_bytes - plan.arena_bytes) {
    return Violation{6, none.id,
                     fmt::format("invariant 6: the plan needs {} + {} bytes of the device's {}", plan.arena_bytes, beside,
                                 limits.device_bytes)};
  }
  for (int host = 0; host < plan.hosts(); ++host) {
    const auto ranks = static_cast<std::uint64_t>(std::count(plan.host_of_rank.begin(), plan.host_of_rank.end(), host));
    const std::uint64_t mailboxes =
        static_cast<std::size_t>(host) < plan.mailbox_bytes.size() ? plan.mailbox_bytes[static_cast<std::size_t>(host)] : 0;
    const std::uint64_t store = limits.store_bytes.empty() ? 0 : limits.store_bytes.at(static_cast<std::size_t>(host));
    const std::uint64_t room = limits.host_bytes - std::min(limits.host_bytes, store);
    if (store <= limits.host_bytes && mailboxes <= room && plan.parking_bytes <= (room - mailboxes) / ranks) continue;
    return Violation{
        6, none.id,
        fmt::format("invariant 6: on host {} the store, the plan's mailboxes and the parking of its {} ranks need {} "
                    "+ {} + {} * {} bytes of the host's {}",
                    host, ranks, store, mailboxes, ranks, plan.parking_bytes, limits.host_bytes)};
  }
  return std::nullopt;
}

// Walks two steps in the order of first accesses and keeps, for every byte, who had it last.
Finding check_sharing(const Subject& subject, const Order& order, const std::vector<Tenancy>& all, Area area,
                      int owner_number) {
  const Plan& plan = subject.plan;
  std::vector<std::uint32_t> buffers;
  for (std::uint32_t b = 0; b < plan.buffers.size(); ++b) {
    const Buffer& buffer = plan.buffers[b];
    const bool here = area_of(buffer) == area && (area == Area::mailboxes ? buffer.host : buffer.rank) == owner_number;
    if (here && all[b].first != kNobody && buffer.bytes > 0) buffers.push_back(b);
  }
  // Constants are in use before any task is, and so is state that stays.
  const auto constant = [&](std::uint32_t b) {
    return plan.buffers[b].kind == BufferKind::constants || plan.buffers[b].kind == BufferKind::resident_state;
  };
  std::sort(buffers.begin(), buffers.end(), [&](std::uint32_t a, std::uint32_t b) {
    return std::tuple(!constant(a), all[a].first, a) < std::tuple(!constant(b), all[b].first, b);
  });
  struct Owner {
    std::uint64_t end = 0;
    std::uint32_t buffer = 0, step = 0;
  };
  std::map<std::uint64_t, Owner> owners;  // by first byte, disjoint
  for (std::uint32_t step = 0; step < 2; ++step) {
    for (const std::uint32_t b : buffers) {
      if (step == 1 && constant(b)) continue;
      const Buffer& buffer = plan.buffers[b];
      const std::uint64_t begin = buffer.offset, end = buffer.offset + buffer.bytes;
      const Task& task = plan.tasks[all[b].first];
      const std::uint32_t node = step * order.tasks() + task.id;
      auto at = owners.lower_bound(begin);
      if (at != owners.begin() && std::prev(at)->second.end > begin) --at;
      while (at != owners.end() && at->first < end) {
        const std::uint64_t start = at->first;
        const Owner owner = at->second;
        const Tenancy& other = all[owner.buffer];
        const auto told = [&](const char* finding) {
          const Buffer& neighbour = plan.buffers[owner.buffer];
          return subject.violation(6, task,
                                   fmt::format("takes bytes {}+{} ({}) from {} at {}+{} {}", buffer.offset, buffer.bytes,
                                               buffer_kind_name(buffer.kind), buffer_kind_name(neighbour.kind),
                                               neighbour.offset, neighbour.bytes, finding));
        };
        if (constant(owner.buffer)) return told("which is always in use");
        if (owner.step == step && other.last >= task.id) return told("while it is in use");
        for (const std::uint32_t access : other.last_accesses) {
          if (!order.before(owner.step * order.tasks() + access, node)) {
            return told(fmt::format("without waiting for {}{}", subject.name(plan.tasks[access]),
                                    owner.step == step ? "" : " of the step before")
                            .c_str());
          }
        }
        at = owners.erase(at);
        if (start < begin) owners.emplace(start, Owner{begin, owner.buffer, owner.step});
        if (owner.end > end) at = owners.emplace(end, owner).first;
      }
      owners[begin] = {end, b, step};
    }
  }
  return std::nullopt;
}

}  // namespace

Finding check_memory(const Subject& subject, const Order& order, const Limits& limits) {
  const std::vector<Tenancy> all = tenancies(subject, order);
  if (auto found = check_bounds(subject, all, limits)) return found;
  for (int rank = 0; rank < subject.plan.ranks; ++rank) {
    for (const Area area : {Area::device, Area::residents, Area::parking}) {
      if (auto found = check_sharing(subject, order, all, area, rank)) return found;
    }
  }
  for (int host = 0; host < subject.plan.hosts(); ++host) {
    if (auto found = check_sharing(subject, order, all, Area::mailboxes, host)) return found;
  }
  return std::nullopt;
}

}  // namespace spipe::plan::verification
