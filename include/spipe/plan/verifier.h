// The verifier: proves the six invariants of DESIGN section 5 on a plan, or names the task that breaks one. It trusts nothing
// but tasks, uses, waits, buffers and offsets, and shares no code with the passes that made them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "spipe/model/shape.h"
#include "spipe/plan/plan.h"

namespace spipe::plan {

struct Violation {
  int invariant = 0;       // 1..6 as numbered in docs/tour.md
  std::uint32_t task = 0;  // the task named in the message
  std::string message;     // "invariant 1: task 17 (forward layer 2, micro-batch 0) reads parameters of unit 2 that ..."
};

struct Limits {
  std::uint64_t device_bytes = UINT64_MAX;  // budget per rank
  std::uint64_t host_bytes = UINT64_MAX;    // of a host: for its store, its mailboxes and the parking of its ranks together
  std::vector<std::uint64_t> store_bytes;   // of every host, second slots included; empty: none
};

// The first violation found, or nothing. Two consecutive steps are checked together, so cross-step edges are covered.
[[nodiscard]] std::optional<Violation> verify(const Plan& plan, const model::ModelShape& shape, const Limits& limits = {});

}  // namespace spipe::plan
