// Names, hash, summary and memory table of a plan.
#include "spipe/plan/plan.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include "spipe/base/error.h"
#include "spipe/base/units.h"

namespace spipe::plan {

const char* task_kind_name(TaskKind kind) {
  static constexpr std::array kNames = {"input",  "fetch",   "forward", "loss", "backward", "reduce", "park",
                                        "unpark", "offload", "result",  "norm", "optimize", "commit", "save",
                                        "send",   "recv",    "push",    "pull", "load",     "unload"};
  static_assert(kNames.size() == kTaskKinds);
  return kNames.at(static_cast<std::size_t>(kind));
}

const char* stream_name(StreamKind stream) {
  static constexpr std::array kNames = {"compute", "h2d",  "d2h",       "cpu",    "io",         "comm",
                                        "recv",    "send", "update_in", "update", "update_out", "decide"};
  static_assert(kNames.size() == kStreamCount);
  return kNames.at(static_cast<std::size_t>(stream));
}

const char* buffer_kind_name(BufferKind kind) {
  static constexpr std::array kNames = {
      "constants",   "parameters",   "gradient",        "gradient_partial", "boundary",      "boundary_gradient",
      "saved",       "workspace",    "input",           "token_loss",       "store_compute", "store_grad",
      "store_state", "store_shadow", "state_piece",     "resident_state",   "parked",        "host_input",
      "host_result", "norm_value",   "checkpoint_file", "mailbox",          "norm_parts",    "wire"};
  static_assert(kNames.size() == kBufferKinds);
  return kNames.at(static_cast<std::size_t>(kind));
}

const char* placement_name(Placement placement) {
  static constexpr std::array kNames = {"cpu", "device", "resident"};
  return kNames.at(static_cast<std::size_t>(placement));
}

namespace {

constexpr std::uint32_t kNever = UINT32_MAX;

}  // namespace

int Plan::hosts() const { return 1 + *std::max_element(host_of_rank.begin(), host_of_rank.end()); }

namespace {

// A simple multiply-xorshift chain: the hash tells plans apart in tests and logs, nothing depends on its strength.
class Hasher {
 public:
  template <typename T>
  void add(T value) {
    std::uint64_t bits = 0;
    if constexpr (std::is_floating_point_v<T>) {
      static_assert(sizeof(T) == 8);
      std::memcpy(&bits, &value, sizeof bits);
    } else {
      bits = static_cast<std::uint64_t>(value);
    }
    state_ = (state_ ^ bits) * 0x9E3779B97F4A7C15ULL;
    state_ ^= state_ >> 29;
  }
  void add_text(const std::string& text) {
    add(text.size());
    for (const char c : text) add(static_cast<unsigned char>(c));
  }
  void add_list(const std::vector<int>& values) {
    add(values.size());
    for (const int value : values) add(value);
  }
  [[nodiscard]] std::uint64_t value() const { return state_; }

 private:
  std::uint64_t state_ = 0x243F6A8885A308D3ULL;
};

void hash_options(Hasher& hash, const ScheduleOptions& options) {
  hash.add_text(options.schedule);
  hash.add(options.residency);
  hash.add_list(options.forward_cuts);
  hash.add_list(options.backward_cuts);
  hash.add(options.micro_batches);
  hash.add(options.sum_groups);
  hash.add(options.recompute);
  hash.add(options.park);
  hash.add(options.prefetch);
  hash.add(options.evaluate);
  hash.add(options.save);
  hash.add(options.ranks);
  hash.add(options.replicas);
  hash.add(options.fuse_last);
  hash.add(options.barrier_between_steps);
  hash.add(options.updates.size());
  for (const UpdateWay& way : options.updates) {
    hash.add(way.speculate);
    hash.add(way.placement);
  }
  hash.add(options.piece_elements);
}

}  // namespace

std::uint64_t plan_hash(const Plan& plan) {
  Hasher hash;
  hash_options(hash, plan.options);
  hash.add(plan.ranks);
  hash.add(plan.store_units);
  hash.add(plan.compute_units);
  hash.add(plan.tasks.size());
  for (const Task& task : plan.tasks) {
    hash.add(task.kind);
    hash.add(task.stream);
    hash.add(task.rank);
    hash.add(task.unit);
    hash.add(task.micro_batch);
    hash.add(task.flags);
    hash.add(task.stage);
    hash.add(task.bytes);
    hash.add(task.flops);
    hash.add(task.peer);
    hash.add(task.peer_rank);
    hash.add(task.piece);
    hash.add(task.use_count);
    for (std::uint32_t i = 0; i < task.use_count; ++i) {
      hash.add(plan.uses[task.first_use + i].buffer);
      hash.add(plan.uses[task.first_use + i].access);
    }
    hash.add(task.wait_count);
    for (std::uint32_t i = 0; i < task.wait_count; ++i) {
      hash.add(plan.waits[task.first_wait + i].task);
      hash.add(plan.waits[task.first_wait + i].previous_step);
    }
  }
  hash.add(plan.buffers.size());
  for (const Buffer& buffer : plan.buffers) {
    hash.add(buffer.kind);
    hash.add(buffer.place);
    hash.add(buffer.rank);
    hash.add(buffer.unit);
    hash.add(buffer.micro_batch);
    hash.add(buffer.source);
    hash.add(buffer.bytes);
    hash.add(buffer.offset);
    hash.add(buffer.host);
  }
  hash.add(plan.arena_bytes);
  hash.add(plan.in_place_bytes);
  hash.add(plan.parking_bytes);
  hash.add(plan.resident_bytes);
  hash.add_list(plan.host_of_rank);
  hash.add_list(plan.home_of_unit);
  hash.add(plan.mailbox_bytes.size());
  for (const std::uint64_t bytes : plan.mailbox_bytes) hash.add(bytes);
  return hash.value();
}

std::string summary(const Plan& plan) {
  const ScheduleOptions& options = plan.options;
  std::map<TaskKind, std::uint64_t> bytes;
  std::size_t recomputed = 0;
  for (const Task& task : plan.tasks) {
    bytes[task.kind] += task.bytes;
    if ((task.flags & kRecompute) != 0) ++recomputed;
  }
  std::string text = options.evaluate ? "evaluation" : "training step";
  text += ", " + std::to_string(options.micro_batches) + (options.micro_batches == 1 ? " micro-batch" : " micro-batches");
  if (options.residency == Residency::in_place) {
    text += ", parameters used in place";
  } else {
    text += ", streamed: " + std::to_string(options.forward_cuts.size()) + " forward";
    if (!options.evaluate) text += " and " + std::to_string(options.backward_cuts.size()) + " backward";
    text += " stages, " + std::to_string(options.prefetch) + " fetched ahead";
  }
  if (plan.ranks > 1) {
    text += "; " + options.schedule + " on " + std::to_string(plan.ranks) + " ranks";
    if (options.replicas > 1) text += " in " + std::to_string(options.replicas) + " replicas";
    if (plan.hosts() > 1) text += " of " + std::to_string(plan.hosts()) + " hosts";
  }
  if (!options.evaluate) {
    text += options.recompute ? ", recompute on" : ", recompute off";
    if (recomputed > 0) text += " (" + std::to_string(recomputed) + " forwards repeated)";
    if (options.park) text += ", boundaries parked in host memory";
    if (options.save) text += ", saving a checkpoint";
  }
  text += "; a step fetches " + format_bytes(bytes[TaskKind::fetch]) + ", offloads " + format_bytes(bytes[TaskKind::offload]);
  if (bytes[TaskKind::park] > 0) text += ", parks " + format_bytes(bytes[TaskKind::park]);
  if (bytes[TaskKind::send] > 0) text += ", sends " + format_bytes(bytes[TaskKind::send]) + " to mailboxes";
  if (bytes[TaskKind::push] > 0) text += " and " + format_bytes(bytes[TaskKind::push]) + " to other hosts";
  text += plan.ranks > 1 ? "; device memory of a rank " : "; device memory ";
  text += format_bytes(plan.device_bytes());
  if (plan.in_place_bytes > 0) {
    text += " (" + format_bytes(plan.arena_bytes) + " arena + " + format_bytes(plan.in_place_bytes) + " in place)";
  }
  if (plan.resident_bytes > 0) text += ", of which " + format_bytes(plan.resident_bytes) + " are resident state";
  if (!plan.mailbox_bytes.empty()) {
    const std::uint64_t most = *std::max_element(plan.mailbox_bytes.begin(), plan.mailbox_bytes.end());
    if (most > 0) text += ", mailboxes of a host " + format_bytes(most);
  }
  return text;
}

std::vector<MemoryUse> memory_by_kind(const Plan& plan) {
  // The rank whose live bytes peak highest is shown; a life runs from first to last access in program order.
  std::vector<std::uint32_t> first(plan.buffers.size(), kNever), last(plan.buffers.size(), 0);
  for (const Task& task : plan.tasks) {
    for (std::uint32_t i = 0; i < task.use_count; ++i) {
      const std::uint32_t b = plan.uses[task.first_use + i].buffer;
      first[b] = std::min(first[b], task.id);
      last[b] = task.id;
    }
  }
  // Slots of pieces are theirs all the time.
  std::vector<std::uint64_t> pieces_begin(static_cast<std::size_t>(plan.ranks), UINT64_MAX);
  std::vector<std::uint64_t> pieces_end(static_cast<std::size_t>(plan.ranks), 0);
  struct Event {
    std::uint32_t time = 0;
    bool begin = false;
    std::uint32_t buffer = 0;
  };
  std::vector<Event> events;
  for (std::uint32_t b = 0; b < plan.buffers.size(); ++b) {
    const bool stays = plan.buffers[b].kind == BufferKind::resident_state;  // also while plans run that do not use it
    if (plan.buffers[b].place != Place::device || (first[b] == kNever && !stays)) continue;
    if (plan.buffers[b].kind == BufferKind::state_piece) {
      const Buffer& piece = plan.buffers[b];
      pieces_begin[piece.rank] = std::min(pieces_begin[piece.rank], piece.offset);
      pieces_end[piece.rank] = std::max(pieces_end[piece.rank], piece.offset + piece.bytes);
      continue;
    }
    const bool always = stays || plan.buffers[b].kind == BufferKind::constants;
    events.push_back({always ? 0 : first[b], true, b});
    events.push_back({always ? static_cast<std::uint32_t>(plan.tasks.size()) : last[b] + 1, false, b});
  }
  std::sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
    return std::tuple(a.time, a.begin, a.buffer) < std::tuple(b.time, b.begin, b.buffer);  // ends before beginnings
  });
  constexpr auto kKinds = static_cast<std::size_t>(kBufferKinds);
  using ByKind = std::array<std::uint64_t, kKinds>;
  const auto ranks = static_cast<std::size_t>(plan.ranks);
  std::vector<ByKind> live(ranks, ByKind{}), at_peak(ranks, ByKind{}), own_peak(ranks, ByKind{});
  std::vector<std::uint64_t> total(ranks, 0), peak(ranks, 0);
  for (std::size_t r = 0; r < ranks; ++r) {
    if (pieces_end[r] == 0) continue;
    constexpr auto kPieces = static_cast<std::size_t>(BufferKind::state_piece);
    total[r] = live[r][kPieces] = own_peak[r][kPieces] = pieces_end[r] - pieces_begin[r];
  }
  for (const Event& event : events) {
    const Buffer& buffer = plan.buffers[event.buffer];
    const auto kind = static_cast<std::size_t>(buffer.kind);
    const std::size_t r = buffer.rank;
    if (!event.begin) {
      live[r][kind] -= buffer.bytes;
      total[r] -= buffer.bytes;
      continue;
    }
    live[r][kind] += buffer.bytes;
    total[r] += buffer.bytes;
    own_peak[r][kind] = std::max(own_peak[r][kind], live[r][kind]);
    if (total[r] > peak[r]) {
      peak[r] = total[r];
      at_peak[r] = live[r];
    }
  }
  const std::size_t top = static_cast<std::size_t>(std::max_element(peak.begin(), peak.end()) - peak.begin());
  std::vector<MemoryUse> rows;
  for (std::size_t k = 0; k < kBufferKinds; ++k) {
    if (own_peak[top][k] > 0) rows.push_back({static_cast<BufferKind>(k), at_peak[top][k], own_peak[top][k]});
  }
  return rows;
}

}  // namespace spipe::plan
