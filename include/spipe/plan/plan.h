// The plan: one training step (or evaluation pass) of every rank as data. Schedules emit it, passes complete it, the verifier
// proves it, the simulator predicts it, the executor runs it. Pure data: no device, no MPI.
//
// Sequential semantics. A schedule emits tasks in *program order* and says which buffers each task reads and writes. The order
// in which tasks of one stream run is program order; everything between streams and ranks is derived (plan/passes.h): a task
// waits for the last writer of what it reads, and for the readers and the writer of what it overwrites; memory is placed by the
// lifetimes that follow, and reuse of bytes adds the waits it needs. So a schedule never writes an event, an offset or a wait.
//
// Ranks and hosts. A rank's device is its own; ranks of a host share its store and its mailboxes, and may wait for each other's
// tasks. Between hosts there are only messages: a `push` on one rank's comm stream and its `pull` on another's, linked by a
// `wire`; no other wait crosses hosts. A pull follows its push directly in program order, so that even a transport that makes
// both ends meet cannot deadlock. A store unit lives on one host (that of its home, the rank that offloads and updates it).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace spipe::plan {

enum class TaskKind : std::uint8_t {
  input,     // tokens and targets of a micro-batch, host -> device
  fetch,     // parameters of a store unit, store -> device
  forward,   // one compute unit, one micro-batch; saves activations when it has a `saved` buffer (also used to recompute)
  loss,      // the head: forward, loss and, when training, its backward
  backward,  // one compute unit (embedding, layer), one micro-batch, from saved activations
  reduce,    // gradient += group partial, when batch.sum_groups > 1
  park,      // a boundary or a kept gradient, device -> host
  unpark,    // and back
  offload,   // last add and rounding of a store unit's gradient into the store, with its norm blocks
  result,    // token losses of a micro-batch, device -> host
  norm,      // global norm and finite flag of the step; decides the clip factor or the skip
  optimize,  // update of a store unit
  commit,    // the updated unit becomes the committed version
  save,      // a store unit's state goes to the checkpoint being written
  send,      // a boundary or its gradient (stream send), or a gradient sum (d2h): device -> mailbox of this rank's host
  recv,      // mailbox of this rank's host -> device (streams recv, h2d); a mailbox may be received more than once
  push,      // to another host (stream comm): a mailbox, a store unit's parameters, or this host's norm parts -> wire
  pull,      // wire -> mailbox or norm parts of this rank's host (stream comm)
  load,      // a piece of a unit's state and gradient, store -> device, for an update there (stream update_in)
  unload,    // and what the update made of it, device -> store (stream update_out)
};
inline constexpr int kTaskKinds = 20;
[[nodiscard]] const char* task_kind_name(TaskKind kind);

// recv and send use the same link as h2d and d2h: boundaries, which somebody waits for, do not queue behind parameters and
// gradients, which nobody needs yet. So do update_in and update_out, between which `update` is where the device updates units.
// `decide` runs norms and commits: they must not queue behind the updates of units that nobody needs yet (stream cpu).
enum class StreamKind : std::uint8_t { compute, h2d, d2h, cpu, io, comm, recv, send, update_in, update, update_out, decide };
inline constexpr int kStreamCount = 12;
[[nodiscard]] const char* stream_name(StreamKind stream);

enum class BufferKind : std::uint8_t {
  // on the device
  constants,
  parameters,
  gradient,
  gradient_partial,
  boundary,
  boundary_gradient,
  saved,
  workspace,
  input,
  token_loss,
  // in the store (per store unit), used in place or by copies
  store_compute,
  store_grad,
  store_state,
  store_shadow,  // the other slot of a unit that has two: parameters and state as its update leaves them (UpdateWay)
  // state on the device
  state_piece,     // of a unit whose state comes and goes: a piece of all its planes
  resident_state,  // master and moments of a unit that keeps them here, over all steps; in an area of its own
  // on the host
  parked,
  host_input,
  host_result,
  norm_value,
  checkpoint_file,
  mailbox,     // shared by the ranks of a host: what sends, and pulls from other hosts, leave for receivers and fetches
  norm_parts,  // another host's share of the norm: block sums, non-finite flags, sums of token losses (`source`: that host)
  // on the way between two hosts: one writer and one reader a step, no bytes of memory
  wire,
};
inline constexpr int kBufferKinds = 24;
[[nodiscard]] const char* buffer_kind_name(BufferKind kind);

enum class Place : std::uint8_t { device, store, host, network };

// `unit`: the store unit (parameters, gradient*, store_*) or the compute unit (boundary: the unit that consumes it; saved); -1
// none. Device buffers live within one step: the first access of a step must be a write. Store and norm buffers persist across
// steps.
struct Buffer {
  BufferKind kind = BufferKind::workspace;
  Place place = Place::device;
  std::uint16_t rank = 0;
  std::int32_t unit = -1;
  std::int32_t micro_batch = -1;
  std::int32_t source = -1;  // gradient*: the compute unit whose contributions it sums (a tied matrix has two)
  std::uint64_t bytes = 0;   // device and parked buffers; multiple of 256
  std::uint64_t offset = 0;  // in the arena (device), the parking area (parked) or the host's mailboxes, after placement
  std::uint16_t host = 0;    // of store, mailbox and other host buffers
  // Wishes to the placement: the bytes are kept free from this task on, and until that one, though no access needs it; so
  // that what uses them next, or before, does not wait for a copy. 0: none.
  std::uint32_t reserved_from = 0, held_until = 0;
};

enum class Access : std::uint8_t {
  read,
  write,
  update
};  // write: every byte that is read later is overwritten; update: read and write
struct Use {
  std::uint32_t buffer = 0;
  Access access = Access::read;
};

// A wait for a task of this step, or (previous_step) for the same plan's task in the step before.
struct Wait {
  std::uint32_t task = 0;
  bool previous_step = false;
};

enum TaskFlag : std::uint16_t {
  kAccumulate = 1,   // backward, loss: add to the gradients (not the first contribution)
  kEvaluate = 2,     // loss: token losses only
  kRecompute = 4,    // forward: repeats an earlier forward of the same unit and micro-batch
  kLastOfStage = 8,  // for timelines and counters
  kSpeculate =
      16,  // load, optimize, unload: before the norm is known, into the unit's other slot; its commit: may take it back
};

inline constexpr std::uint32_t kNoPeer = UINT32_MAX;

struct Task {
  std::uint32_t id = 0;  // index in Plan::tasks = program order
  TaskKind kind = TaskKind::forward;
  StreamKind stream = StreamKind::compute;
  std::uint16_t rank = 0;
  std::int32_t unit = -1;  // compute unit (forward, loss, backward, park/unpark of boundaries) or store unit
  std::int32_t micro_batch = -1;
  std::uint16_t flags = 0;
  std::uint16_t stage = 0;  // forward or backward stage it belongs to (for people)
  std::uint32_t first_use = 0, first_wait = 0;
  std::uint16_t use_count = 0, wait_count = 0;
  std::uint64_t bytes = 0;  // moved over link or memory
  double flops = 0;
  std::uint32_t peer = kNoPeer;  // push, pull: the push's id, which tags the message
  std::uint16_t peer_rank = 0;   // push, pull: the rank at the other end
  std::uint16_t piece = 0;  // load, unload, optimize on the device: elements [piece, piece + 1) * piece_elements of the unit
};
static_assert(sizeof(Task) <= 64);

// Such tasks are submitted in program order but may end in any: they order nothing by position (only by waits). Messages
// between hosts are posted, not waited for in turn: parameters on their way must not hold up boundaries.
[[nodiscard]] constexpr bool ends_in_any_order(const Task& task) {
  return (task.kind == TaskKind::optimize && task.stream == StreamKind::cpu) || task.kind == TaskKind::push ||
         task.kind == TaskKind::pull;
}

enum class Residency : std::uint8_t { in_place, streamed };

// Where a unit is updated: by the host's cores; by the device, whose link brings its state in pieces and takes it back; or by
// the device, where its state stays (its parameters go to the store after every update).
enum class Placement : std::uint8_t { cpu, device, resident };
[[nodiscard]] const char* placement_name(Placement placement);

// How a store unit is updated. It decides no bits.
struct UpdateWay {
  // As soon as its gradient is offloaded, as if nothing were to be clipped or skipped, into the unit's other slot; its commit
  // makes that the current one, or takes it back and does the right thing. Otherwise when the norm is known. Resident units do
  // not speculate.
  bool speculate = false;
  Placement placement = Placement::cpu;
  // Copies of parameters and state in the store. With two the update goes out of place and the commit changes which is current:
  // speculation needs the old state until the norm is known; pieces on the device would otherwise wait for each other.
  [[nodiscard]] int slots() const { return speculate || placement == Placement::device ? 2 : 1; }
  bool operator==(const UpdateWay&) const = default;
};

// What a schedule was asked to emit; kept in the plan for printing, hashing and re-planning.
struct ScheduleOptions {
  std::string schedule = "streaming";
  Residency residency = Residency::in_place;
  std::vector<int> forward_cuts;   // first compute unit of every forward stage, ascending, [0] = 0
  std::vector<int> backward_cuts;  // the same for backward stages
  int micro_batches = 1;
  int sum_groups = 1;
  bool recompute = false;  // false: forward saves activations of every unit; true: only boundaries at backward cuts are kept
  bool park = false;       // kept boundaries (and a tied matrix's kept gradient) wait in host memory
  int prefetch = 1;        // stages fetched ahead (0: a stage is fetched when the one before is done)
  bool evaluate = false;   // forward and loss only
  bool save = false;       // with save tasks for the state before this step's updates
  // Several ranks (plan/schedules.h).
  int ranks = 1;          // all of them: replicas x pipeline ranks; replica k has the ranks from k * ranks / replicas on
  int replicas = 1;       // pipelines side by side; replica k runs the micro-batches of its share of the sum groups
  bool fuse_last = true;  // the last backward stage's forward is its recompute; false: forward stages cover all but the head
  // A step starts when the one before has ended everywhere: the policy `sync`, and the published method.
  bool barrier_between_steps = false;
  std::vector<UpdateWay> updates;           // per store unit; empty: by the host's cores, when the norm is known
  std::uint64_t piece_elements = 1U << 22;  // of updates on the device; a multiple of 4096
  [[nodiscard]] UpdateWay way(int store_unit) const {
    return updates.empty() ? UpdateWay{} : updates[static_cast<std::size_t>(store_unit)];
  }
};

struct Plan {
  ScheduleOptions options;
  int ranks = 1;
  int store_units = 0, compute_units = 0;
  std::vector<Task> tasks;
  std::vector<Use> uses;
  std::vector<Wait> waits;
  std::vector<Buffer> buffers;
  std::uint64_t arena_bytes = 0;     // per rank, after placement
  std::uint64_t in_place_bytes = 0;  // store bytes a budget must also cover: parameters and gradients used in place
  std::uint64_t parking_bytes = 0;   // per rank
  std::uint64_t resident_bytes = 0;  // per rank: of the area for state that stays on the device, the same in all plans of a run
  std::vector<int> host_of_rank = {0};
  std::vector<int> home_of_unit;             // rank that offloads, updates and saves a store unit; -1: unit without elements
  std::vector<std::uint64_t> mailbox_bytes;  // per host (several ranks only)
  [[nodiscard]] int hosts() const;
  [[nodiscard]] std::uint64_t device_bytes() const { return arena_bytes + in_place_bytes + resident_bytes; }
};

// Bytes of device buffers by kind at the moment of the peak, and each kind's own peak: the start-up memory table.
struct MemoryUse {
  BufferKind kind;
  std::uint64_t at_peak = 0, own_peak = 0;
};

// Text dump: one line a task, with stream, waits, buffers and offsets; stable, diffable.
[[nodiscard]] std::string dump(const Plan& plan);
// 64-bit hash of everything above (two different plans were really run: tests).
[[nodiscard]] std::uint64_t plan_hash(const Plan& plan);
// One paragraph for people: stages, recompute, bytes fetched and offloaded a step.
[[nodiscard]] std::string summary(const Plan& plan);
[[nodiscard]] std::vector<MemoryUse> memory_by_kind(const Plan& plan);

}  // namespace spipe::plan
