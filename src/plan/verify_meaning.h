// The state of a plan that is run with symbols in place of numbers, and what each kind of task does to it. verify_meaning.cpp:
// the passes; verify_meaning_update.cpp: from gradients to the next step's parameters.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "verify_parts.h"

namespace spipe::plan::verification {

// What a buffer holds.
struct Content {
  enum class Kind : std::uint8_t {
    nothing,
    parameters,         // of store unit `unit`, this step's committed version
    input,              // tokens and targets of micro-batch m
    boundary,           // into compute unit `unit`, micro-batch m
    saved,              // of compute unit `unit`, micro-batch m
    boundary_gradient,  // of the boundary into compute unit `unit`, micro-batch m
    token_loss,         // of micro-batch m
    gradient,           // of store unit `unit` from compute unit `source`, micro-batches [from, to)
    final_gradient,     // of store unit `unit`: all sources, all micro-batches, rounded, with its norm blocks
    norm_part,          // what host `source` gives to the norm
    norm,
    state_piece,    // of store unit `unit`: its state as committed and its gradient, elements of piece `from`
    updated_piece,  // and as its update leaves them
    updated_slot,   // of store unit `unit`: pieces [0, to) as the update leaves them
  };
  Kind kind = Kind::nothing;
  int unit = -1, micro_batch = -1, source = -1, from = 0, to = 0;
  bool operator==(const Content&) const = default;
};

// A store unit's current slot in the course of a step. An update of units with two slots leaves it as it is until the commit.
enum class Stage : std::uint8_t { committed, updating, updated, committed_again };

class Meaning {
 public:
  explicit Meaning(const Subject& subject);
  Finding run();

 private:
  using Kind = Content::Kind;
  Finding step(const Task& task);
  Finding input(const Task& task);
  Finding fetch(const Task& task);
  Finding forward(const Task& task);
  Finding loss(const Task& task);
  Finding backward(const Task& task);
  Finding reduce(const Task& task);
  Finding move(const Task& task);
  Finding push(const Task& task);
  Finding pull(const Task& task);
  // The task reads all that host `host` gives to the norm: gradients of its units, and losses of its micro-batches.
  Finding needs_share(const Task& task, int host);
  Finding offload(const Task& task);
  Finding result(const Task& task);
  Finding norm(const Task& task);
  Finding load(const Task& task);
  Finding optimize(const Task& task);
  Finding optimize_piece(const Task& task);
  Finding unload(const Task& task);
  Finding may_update(const Task& task);
  Finding commit(const Task& task);
  Finding save(const Task& task);

  Finding needs_parameters(const Task& task);
  Finding needs_workspace(const Task& task, std::uint64_t bytes);
  Finding adds_gradients(const Task& task);
  Finding adds_gradient(const Task& task, int store_unit, const Use& use);
  Finding needs_place(const Task& task, const Use* use, std::uint64_t bytes, const char* what) const;

  // The task's use that reads (or updates) `content`; null if there is none.
  const Use* reads(const Task& task, const Content& content) const;
  const Use* use_of(const Task& task, BufferKind kind, Access access, int unit = -1) const;
  void put(const Use& use, const Content& content) {
    held_[memory_[use.buffer]] = content;
    put_.push_back(memory_[use.buffer]);
  }
  const Content& held(const Use& use) const { return held_[memory_[use.buffer]]; }
  Stage& stage(int store_unit) { return stages_[static_cast<std::size_t>(store_unit)]; }
  const model::ComputeUnit& unit(int u) const { return subject_.shape.units[static_cast<std::size_t>(u)]; }
  int head() const { return subject_.shape.unit_count() - 1; }
  // First micro-batch of the sum group that holds m, and one past its last.
  std::pair<int, int> group(int m) const;
  Violation bad(int invariant, const Task& task, const std::string& finding) const {
    return subject_.violation(invariant, task, finding);
  }

  const Subject& subject_;
  const ScheduleOptions& options_;
  std::vector<std::uint32_t> memory_;  // the gradient plane of the store stands for gradients that live in it
  std::vector<Content> held_;
  std::vector<std::uint32_t> put_;  // what the task at hand filled
  std::vector<Stage> stages_;
  std::vector<int> unloaded_;     // per store unit: pieces that are back in the store
  std::vector<bool> prepared_;    // per store unit: its other slot is complete
  std::vector<int> result_host_;  // per micro-batch: where its losses are brought to
};

}  // namespace spipe::plan::verification
