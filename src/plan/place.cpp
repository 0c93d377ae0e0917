// Static offsets from lifetimes, and the waits that reuse of bytes needs.
//
// A buffer lives from its first to its last access in program order, longer if the schedule wishes so. Several placements are
// tried, the smallest is taken:
//  - largest first, each at the lowest offset that is free during its whole life: nearly always as small as the bytes alive
//    at once, but its work grows with the square of those alive at once, so it gives up on very large plans;
//  - best fit in order of birth, for plans of any size.
#include <algorithm>
#include <bit>
#include <map>
#include <set>
#include <tuple>

#include "memory.h"
#include "spipe/base/checked.h"
#include "spipe/plan/builder.h"
#include "waits.h"

namespace spipe::plan {

namespace {

constexpr std::uint32_t kNever = UINT32_MAX;
constexpr std::uint64_t kGivenUp = UINT64_MAX;
constexpr std::uint64_t kMostWork = 100'000'000;  // steps of the placements largest first
constexpr std::uint64_t kMostRoundsWork = 1'000'000;
constexpr int kRounds = 60;

struct Life {
  std::uint32_t buffer = 0, first = kNever, last = 0;  // inclusive
  std::uint32_t access = kNever;                       // the first one
  std::uint64_t bytes = 0, offset = 0;
};

// Bytes alive at once at the worst moment: no placement can be smaller.
std::uint64_t live_bound(const std::vector<Life>& lives) {
  std::vector<std::pair<std::uint32_t, std::int64_t>> events;
  events.reserve(lives.size() * 2);
  for (const Life& life : lives) {
    events.emplace_back(life.first, static_cast<std::int64_t>(life.bytes));
    events.emplace_back(life.last + 1, -static_cast<std::int64_t>(life.bytes));
  }
  std::sort(events.begin(), events.end());  // at one moment ends come first (negative)
  std::int64_t now = 0, peak = 0;
  for (const auto& [time, change] : events) {
    now += change;
    peak = std::max(peak, now);
  }
  return static_cast<std::uint64_t>(peak);
}

// Free bytes below a growing top, with the smallest sufficient hole found in logarithmic time.
class Holes {
 public:
  std::uint64_t take(std::uint64_t bytes) {
    const auto best = by_size_.lower_bound({bytes, 0});
    if (best != by_size_.end()) {
      const auto [size, offset] = *best;
      remove(offset, size);
      if (size > bytes) insert(offset + bytes, size - bytes);
      return offset;
    }
    std::uint64_t offset = top_;
    if (!by_offset_.empty()) {
      const auto [last_offset, last_size] = *by_offset_.rbegin();
      if (last_offset + last_size == top_) {
        offset = last_offset;
        remove(last_offset, last_size);
      }
    }
    top_ = offset + bytes;
    return offset;
  }
  void give(std::uint64_t offset, std::uint64_t bytes) {
    auto next = by_offset_.lower_bound(offset);
    if (next != by_offset_.end() && next->first == offset + bytes) {
      const auto [next_offset, next_size] = *next;
      bytes += next_size;
      remove(next_offset, next_size);
    }
    const auto after = by_offset_.lower_bound(offset);
    if (after != by_offset_.begin()) {
      const auto [before_offset, before_size] = *std::prev(after);
      if (before_offset + before_size == offset) {
        remove(before_offset, before_size);
        offset = before_offset;
        bytes += before_size;
      }
    }
    insert(offset, bytes);
  }
  [[nodiscard]] std::uint64_t top() const { return top_; }

 private:
  void insert(std::uint64_t offset, std::uint64_t size) {
    by_offset_.emplace(offset, size);
    by_size_.emplace(size, offset);
  }
  void remove(std::uint64_t offset, std::uint64_t size) {
    by_offset_.erase(offset);
    by_size_.erase({size, offset});
  }
  std::map<std::uint64_t, std::uint64_t> by_offset_;
  std::set<std::pair<std::uint64_t, std::uint64_t>> by_size_;
  std::uint64_t top_ = 0;
};

// `lives` in order of birth.
std::uint64_t place_in_order_of_birth(std::vector<Life>& lives) {
  std::vector<std::uint32_t> by_end(lives.size());
  for (std::uint32_t i = 0; i < lives.size(); ++i) by_end[i] = i;
  std::sort(by_end.begin(), by_end.end(),
            [&](std::uint32_t a, std::uint32_t b) { return std::tuple(lives[a].last, a) < std::tuple(lives[b].last, b); });
  Holes holes;
  std::size_t ended = 0;
  for (Life& life : lives) {
    // All that ended before this birth were born before it, so they are placed.
    for (; ended < by_end.size() && lives[by_end[ended]].last < life.first; ++ended) {
      holes.give(lives[by_end[ended]].offset, lives[by_end[ended]].bytes);
    }
    life.offset = holes.take(life.bytes);
  }
  return holes.top();
}

// Lives that have been given the same bytes, one after another.
struct Track {
  std::uint64_t offset = 0, bytes = 0;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> lives;  // first, last; ascending

  [[nodiscard]] bool busy(const Life& life) const {
    const auto after = std::upper_bound(lives.begin(), lives.end(), std::pair(life.last, kNever));
    return after != lives.begin() && std::prev(after)->second >= life.first;
  }
  void add(const Life& life) {
    const std::pair span(life.first, life.last);
    lives.insert(std::upper_bound(lives.begin(), lives.end(), span), span);
  }
};

// Places in the given order, each at the lowest offset that is free during its whole life. Gives up when it has looked at too
// much (counted, not timed: the same plan always gets the same offsets).
std::uint64_t place_lowest(std::vector<Life>& lives, const std::vector<std::uint32_t>& order, std::uint64_t& work) {
  std::vector<Track> tracks;  // by offset
  std::uint64_t top = 0;
  for (const std::uint32_t index : order) {
    Life& life = lives[index];
    std::uint64_t free_from = 0;
    for (const Track& track : tracks) {
      ++work;
      if (!track.busy(life)) continue;
      if (track.offset >= free_from && track.offset - free_from >= life.bytes) break;
      free_from = std::max(free_from, track.offset + track.bytes);
    }
    life.offset = free_from;
    top = std::max(top, free_from + life.bytes);
    if (work > kMostWork) return kGivenUp;
    const auto at =
        std::lower_bound(tracks.begin(), tracks.end(), std::pair(life.offset, life.bytes),
                         [](const Track& track, const auto& key) { return std::pair(track.offset, track.bytes) < key; });
    const bool found = at != tracks.end() && at->offset == life.offset && at->bytes == life.bytes;
    (found ? at : tracks.insert(at, {life.offset, life.bytes, {}}))->add(life);
  }
  return top;
}

// `lives` in order of birth. Large before small (or, by volume, much memory for long before little for short), long before
// short, early before late.
std::vector<std::uint32_t> placement_order(const std::vector<Life>& lives, bool by_volume) {
  std::vector<std::tuple<double, int, std::uint32_t>> ranking;
  ranking.reserve(lives.size());
  for (std::uint32_t i = 0; i < lives.size(); ++i) {
    const std::uint32_t length = lives[i].last - lives[i].first + 1;
    const double weight = static_cast<double>(lives[i].bytes) * (by_volume ? static_cast<double>(length) : 1.0);
    ranking.emplace_back(-weight, -std::bit_width(length), i);
  }
  std::sort(ranking.begin(), ranking.end());
  std::vector<std::uint32_t> order;
  order.reserve(lives.size());
  for (const auto& entry : ranking) order.push_back(std::get<2>(entry));
  return order;
}

std::uint64_t top_of(const std::vector<Life>& lives) {
  std::uint64_t top = 0;
  for (const Life& life : lives) top = std::max(top, life.offset + life.bytes);
  return top;
}

std::uint64_t place_lives(std::vector<Life>& lives) {
  const std::uint64_t bound = live_bound(lives);
  std::uint64_t best = place_in_order_of_birth(lives), work = 0;
  std::vector<Life> trial = lives;
  for (const bool by_volume : {false, true}) {
    std::vector<std::uint32_t> order = placement_order(lives, by_volume);
    // Small plans: whatever ends highest is placed first next time, which settles most of what is left.
    for (int round = 0; round < kRounds && best > bound && work <= kMostWork; ++round) {
      if (round > 0 && work > kMostRoundsWork) break;
      const std::uint64_t top = place_lowest(trial, order, work);
      if (top < best) {
        best = top;
        lives = trial;
      }
      const std::uint64_t highest = top_of(trial);
      std::stable_partition(order.begin(), order.end(),
                            [&](std::uint32_t i) { return trial[i].offset + trial[i].bytes == highest; });
    }
  }
  return best;
}

// Who used each byte last, as the lives of two steps pass.
class LastOwners {
 public:
  // Buffers that owned bytes of [offset, offset + bytes) before; now `owner` does. Owners are numbered buffer + step * buffers.
  void take(std::uint64_t offset, std::uint64_t bytes, std::uint64_t owner, std::vector<std::uint64_t>& before) {
    before.clear();
    const std::uint64_t end = offset + bytes;
    auto at = segments_.upper_bound(offset);
    if (at != segments_.begin()) --at;
    while (at != segments_.end() && at->first < end) {
      const auto [start, segment] = *at;
      if (segment.end <= offset) {
        ++at;
        continue;
      }
      before.push_back(segment.owner);
      at = segments_.erase(at);
      if (start < offset) segments_[start] = {offset, segment.owner};
      if (segment.end > end) at = segments_.insert({end, {segment.end, segment.owner}}).first;
    }
    segments_[offset] = {end, owner};
    std::sort(before.begin(), before.end());
    before.erase(std::unique(before.begin(), before.end()), before.end());
  }

 private:
  struct Segment {
    std::uint64_t end = 0, owner = 0;
  };
  std::map<std::uint64_t, Segment> segments_;
};

// The first access of a buffer waits for all accesses of those whose bytes it takes.
void collect_reuse(const std::vector<Life>& lives, const std::vector<Accesses>& accesses, std::vector<Edge>& edges) {
  const std::uint64_t buffers = accesses.size();
  LastOwners owners;
  std::vector<std::uint64_t> before;
  for (std::uint64_t step = 0; step < 2; ++step) {
    for (const Life& life : lives) {
      owners.take(life.offset, life.bytes, life.buffer + step * buffers, before);
      if (step == 0) continue;
      for (const std::uint64_t owner : before) {
        const bool previous = owner < buffers;
        for (const std::uint32_t task : accesses[owner % buffers].tasks) edges.push_back({task, life.access, previous});
      }
    }
  }
}

// The memories in which buffers have offsets: a rank's device and parking, a host's mailboxes.
enum class Memory : std::uint8_t { device, parking, mailboxes, none };

Memory memory_of(const Buffer& buffer) {
  if (buffer.kind == BufferKind::resident_state) return Memory::none;  // in an area of its own, over all steps
  if (buffer.place == Place::device) return Memory::device;
  if (buffer.kind == BufferKind::parked) return Memory::parking;
  if (buffer.kind == BufferKind::mailbox || buffer.kind == BufferKind::norm_parts) return Memory::mailboxes;
  return Memory::none;
}

bool has_offset(const Buffer& buffer) { return memory_of(buffer) != Memory::none; }

// Lives of all buffers; those that no task uses, or that have no offset, are left at kNever.
std::vector<Life> lives_of(const Plan& plan) {
  std::vector<Life> lives(plan.buffers.size());
  for (const Task& task : plan.tasks) {
    for (std::uint32_t i = 0; i < task.use_count; ++i) {
      const std::uint32_t b = plan.uses[task.first_use + i].buffer;
      if (!has_offset(plan.buffers[b])) continue;
      lives[b].first = std::min(lives[b].first, task.id);
      lives[b].last = task.id;
    }
  }
  for (std::uint32_t b = 0; b < lives.size(); ++b) {
    const Buffer& buffer = plan.buffers[b];
    lives[b].buffer = b;
    lives[b].bytes = buffer.bytes;
    lives[b].access = lives[b].first;
    if (lives[b].first == kNever) continue;
    if (buffer.reserved_from > 0) lives[b].first = std::min(lives[b].first, buffer.reserved_from);
    lives[b].last = std::max(lives[b].last, buffer.held_until);
  }
  return lives;
}

// One memory. Constants are written once, before the first step: they stay, at the lowest offsets of every plan. Pieces of
// state on their way follow, in slots that nothing else uses: they come and go beside the passes for much longer than their
// place in program order says, and whoever was given their bytes would wait for them.
struct Area {
  std::vector<Life> lives;  // in order of birth, large before small
  std::vector<std::uint32_t> constants;
  std::vector<Life> pieces;  // in order of birth, placed
  std::uint64_t constant_bytes = 0, piece_bytes = 0;
  [[nodiscard]] std::uint64_t fixed_bytes() const { return constant_bytes + piece_bytes; }
};

// Pieces take turns over as many slots as are alive at once, each as large as the largest.
void place_pieces(Area& area) {
  std::uint64_t largest = 0;
  for (const Life& piece : area.pieces) largest = std::max(largest, piece.bytes);
  std::vector<std::uint32_t> busy_until;  // last access, by slot
  for (Life& piece : area.pieces) {
    const auto oldest = std::min_element(busy_until.begin(), busy_until.end());
    const bool is_free = oldest != busy_until.end() && *oldest < piece.first;
    const auto slot = static_cast<std::size_t>((is_free ? oldest : busy_until.end()) - busy_until.begin());
    if (!is_free) busy_until.push_back(0);
    busy_until[slot] = piece.last;
    piece.offset = area.constant_bytes + slot * largest;
  }
  area.piece_bytes = busy_until.size() * largest;
}

Area area_of(const Plan& plan, const std::vector<Life>& all, Memory memory, int owner) {
  Area area;
  for (const Life& life : all) {
    const Buffer& buffer = plan.buffers[life.buffer];
    if (life.first == kNever || life.bytes == 0 || memory_of(buffer) != memory) continue;
    if ((memory == Memory::mailboxes ? buffer.host : buffer.rank) != owner) continue;
    if (buffer.kind == BufferKind::constants) {
      area.constants.push_back(life.buffer);
      area.constant_bytes += life.bytes;
    } else {
      (buffer.kind == BufferKind::state_piece ? area.pieces : area.lives).push_back(life);
    }
  }
  for (std::vector<Life>* list : {&area.lives, &area.pieces}) {
    std::sort(list->begin(), list->end(), [](const Life& a, const Life& b) {
      return std::tuple(a.first, b.bytes, a.buffer) < std::tuple(b.first, a.bytes, b.buffer);
    });
  }
  place_pieces(area);
  return area;
}

std::vector<Accesses> accesses_of(const Plan& plan, const Lanes& lanes) {
  std::vector<Accesses> accesses(plan.buffers.size());
  for (const Task& task : plan.tasks) {
    for (std::uint32_t i = 0; i < task.use_count; ++i) {
      const std::uint32_t b = plan.uses[task.first_use + i].buffer;
      if (has_offset(plan.buffers[b])) accesses[b].add(plan, lanes, task.id);
    }
  }
  return accesses;
}

// What the device uses of the store in place counts against its budget as if it were there.
std::uint64_t in_place_bytes_of(const Plan& plan, const model::ModelShape& shape, std::uint64_t bytes_per_gradient) {
  std::set<std::tuple<std::uint16_t, BufferKind, std::int32_t>> seen;
  std::vector<std::uint64_t> bytes(static_cast<std::size_t>(plan.ranks), 0);
  for (const Task& task : plan.tasks) {
    if (task.stream != StreamKind::compute) continue;
    for (std::uint32_t i = 0; i < task.use_count; ++i) {
      const Buffer& buffer = plan.buffers[plan.uses[task.first_use + i].buffer];
      if (buffer.place != Place::store || !seen.insert({task.rank, buffer.kind, buffer.unit}).second) continue;
      const std::uint64_t elements = shape.store_units[static_cast<std::size_t>(buffer.unit)].elements;
      const std::uint64_t size = buffer.kind == BufferKind::store_compute ? dtype_size(shape.compute) : bytes_per_gradient;
      bytes[task.rank] = checked_add(bytes[task.rank], checked_mul(elements, size));
    }
  }
  return *std::max_element(bytes.begin(), bytes.end());
}

// Offsets of the state that stays on each device: the same in all plans with the same units there. Returns the most of a rank.
std::uint64_t place_residents(std::vector<Buffer>& buffers, int ranks) {
  std::vector<std::uint64_t> tops(static_cast<std::size_t>(ranks), 0);
  for (Buffer& buffer : buffers) {
    if (buffer.kind != BufferKind::resident_state) continue;
    buffer.offset = tops[buffer.rank];
    tops[buffer.rank] = checked_add(buffer.offset, buffer.bytes);
  }
  return *std::max_element(tops.begin(), tops.end());
}

}  // namespace

MemoryBound memory_bound(const Plan& plan, const model::ModelShape& shape, std::uint64_t bytes_per_gradient) {
  const std::vector<Life> all = lives_of(plan);
  MemoryBound bound;
  for (int rank = 0; rank < plan.ranks; ++rank) {
    const Area device = area_of(plan, all, Memory::device, rank), parking = area_of(plan, all, Memory::parking, rank);
    bound.arena = std::max(bound.arena, device.fixed_bytes() + live_bound(device.lives));
    bound.parking = std::max(bound.parking, live_bound(parking.lives));
  }
  bound.in_place = in_place_bytes_of(plan, shape, bytes_per_gradient);
  std::vector<Buffer> buffers = plan.buffers;
  bound.resident = place_residents(buffers, plan.ranks);
  return bound;
}

void place(Plan& plan, const Lanes& lanes, std::vector<Edge>& edges) {
  const std::vector<Life> all = lives_of(plan);
  const std::vector<Accesses> accesses = accesses_of(plan, lanes);
  const auto place_one = [&](Memory memory, int owner) {
    Area area = area_of(plan, all, memory, owner);
    std::uint64_t offset = 0;
    for (const std::uint32_t b : area.constants) {
      plan.buffers[b].offset = offset;
      offset += plan.buffers[b].bytes;
    }
    const std::uint64_t top = area.fixed_bytes() + place_lives(area.lives);
    for (Life& life : area.lives) {
      life.offset += area.fixed_bytes();
      plan.buffers[life.buffer].offset = life.offset;
    }
    for (const Life& life : area.pieces) plan.buffers[life.buffer].offset = life.offset;
    collect_reuse(area.lives, accesses, edges);
    collect_reuse(area.pieces, accesses, edges);
    return top;
  };
  plan.resident_bytes = place_residents(plan.buffers, plan.ranks);
  plan.arena_bytes = 0;
  plan.parking_bytes = 0;
  for (int rank = 0; rank < plan.ranks; ++rank) {
    plan.arena_bytes = std::max(plan.arena_bytes, place_one(Memory::device, rank));
    plan.parking_bytes = std::max(plan.parking_bytes, place_one(Memory::parking, rank));
  }
  plan.mailbox_bytes.clear();
  for (int host = 0; host < plan.hosts(); ++host) plan.mailbox_bytes.push_back(place_one(Memory::mailboxes, host));
}

void place_buffers(Plan& plan) {
  const Lanes lanes(plan);
  std::vector<Edge> edges = edges_of(plan);
  place(plan, lanes, edges);
  set_waits(plan, lanes, edges);
}

void complete(Plan& plan, const model::ModelShape& shape, std::uint64_t bytes_per_gradient) {
  const Lanes lanes(plan);
  std::vector<Edge> edges;
  collect_dependences(plan, lanes, edges);
  place(plan, lanes, edges);
  set_waits(plan, lanes, edges);
  plan.in_place_bytes = in_place_bytes_of(plan, shape, bytes_per_gradient);
}

}  // namespace spipe::plan
