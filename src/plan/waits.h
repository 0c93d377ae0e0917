// Inside of the passes: candidate waits and their pruning.
#pragma once

#include <vector>

#include "spipe/plan/plan.h"

namespace spipe::plan {

// Task `to` must not start before task `from` (of the step before, if `previous_step`) has ended.
struct Edge {
  std::uint32_t from = 0, to = 0;
  bool previous_step = false;
};

// Streams in which position orders tasks, numbered densely; kNoLane for tasks that end in any order.
inline constexpr std::uint32_t kNoLane = UINT32_MAX;
struct Lanes {
  explicit Lanes(const Plan& plan);
  std::vector<std::uint32_t> of_task;
  std::uint32_t count = 0;
};

// The last accesses of a buffer: the latest in every lane, and all that are in none.
struct Accesses {
  std::vector<std::uint32_t> tasks;
  void add(const Plan& plan, const Lanes& lanes, std::uint32_t task);
};

// Read-after-write, write-after-read and write-after-write, in a step and over its border.
void collect_dependences(const Plan& plan, const Lanes& lanes, std::vector<Edge>& edges);
// Offsets for one kind of memory, and the edges that reuse of bytes needs; fills arena_bytes or parking_bytes.
void place(Plan& plan, const Lanes& lanes, std::vector<Edge>& edges);
// Replaces the plan's waits by the smallest subset of `edges` that implies all of them together with stream order.
void set_waits(Plan& plan, const Lanes& lanes, const std::vector<Edge>& edges);
// The plan's waits as edges.
[[nodiscard]] std::vector<Edge> edges_of(const Plan& plan);

}  // namespace spipe::plan
