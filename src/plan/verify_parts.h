// Inside of the verifier. Nothing here is shared with the passes that make plans.
//
// The proof has two halves. Meaning: run one task after another in program order, with symbols for the contents of buffers,
// the plan computes exactly one step. Order: whatever the streams do, every access comes after those it must follow, so
// that any execution has the meaning of the sequential one.
#pragma once

#include <fmt/format.h>

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "spipe/plan/verifier.h"

namespace spipe::plan::verification {

using Finding = std::optional<Violation>;

struct Subject {
  const Plan& plan;
  const model::ModelShape& shape;
  [[nodiscard]] std::span<const Use> uses(const Task& task) const {
    return {plan.uses.data() + task.first_use, task.use_count};
  }
  [[nodiscard]] std::span<const Wait> waits(const Task& task) const {
    return {plan.waits.data() + task.first_wait, task.wait_count};
  }
  [[nodiscard]] const Buffer& buffer(const Use& use) const { return plan.buffers[use.buffer]; }
  [[nodiscard]] std::uint64_t elements(int store_unit) const {
    return shape.store_units[static_cast<std::size_t>(store_unit)].elements;
  }
  [[nodiscard]] int host(const Task& task) const { return plan.host_of_rank[task.rank]; }
  // "task 17 (forward layer 2, micro-batch 0)"
  [[nodiscard]] std::string name(const Task& task) const;
  [[nodiscard]] std::string store_name(int store_unit) const;
  [[nodiscard]] Violation violation(int invariant, const Task& task, const std::string& finding) const;
};

// Indices in range, waits for earlier tasks of the program or for the step before (invariant 5: with every wait pointing back
// in program order and streams running in program order, no order of arrival can deadlock).
[[nodiscard]] Finding check_structure(const Subject& subject);
// How often each thing happens (invariants 2 and 3).
[[nodiscard]] Finding check_counts(const Subject& subject);
// Mailboxes and wires between ranks, waits between hosts, homes of units (invariants 3 and 5).
[[nodiscard]] Finding check_messages(const Subject& subject);
// What the sequential program computes (invariants 1 to 4) and whether buffers are large enough for it (6).
[[nodiscard]] Finding check_meaning(const Subject& subject);
// Races over two steps (the invariant of what is raced for).
class Order;
[[nodiscard]] Finding check_races(const Subject& subject, const Order& order);
// Bytes shared by buffers, and budgets (6).
[[nodiscard]] Finding check_memory(const Subject& subject, const Order& order, const Limits& limits);

// Happens-before over two unrolled steps: task i of step s is node s * tasks + i.
class Order {
 public:
  explicit Order(const Subject& subject);
  // `earlier` has ended before `later` starts, in every execution.
  [[nodiscard]] bool before(std::uint32_t earlier, std::uint32_t later) const;
  // Tasks of one line follow each other; -1 for a task that position does not order.
  [[nodiscard]] int line(std::uint32_t node) const { return line_[node % tasks_]; }
  [[nodiscard]] std::uint32_t tasks() const { return tasks_; }

 private:
  [[nodiscard]] std::uint32_t seen(std::uint32_t node, int line) const {
    return seen_[std::size_t{node} * lines_ + static_cast<std::size_t>(line)];
  }
  void absorb(std::uint32_t node, std::uint32_t earlier);

  std::uint32_t tasks_ = 0, lines_ = 0;
  std::vector<int> line_;
  // seen_[node][line]: 1 + the latest node of the line that ended before `node` starts; 0 none.
  std::vector<std::uint32_t> seen_;
  // Unordered nodes: the number of each in `loose_`, and what directly follows or precedes it.
  struct Loose {
    std::vector<std::uint32_t> first_on_line;  // earliest node of each line that comes after; UINT32_MAX none
    std::vector<std::uint32_t> predecessors;   // unordered nodes that ended before it starts
  };
  std::vector<std::uint32_t> loose_number_;  // per node; UINT32_MAX for ordered ones
  std::vector<Loose> loose_;
};

}  // namespace spipe::plan::verification
