// Inside of the planner: tasks of the updates, for every emitter. Speculative ones follow their unit's offload; the others come
// when the norm is known, in the order in which the next step needs them; commits last. Pieces that the device updates go
// through three buffers: one comes, one is updated, one leaves.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "spipe/plan/builder.h"

namespace spipe::plan {

class Updates {
 public:
  // What an emitter knows: its buffers in the store, homes of units, and how it adds a task to a rank.
  struct Emitter {
    std::function<std::uint32_t(BufferKind kind, int store_unit)> stored;
    std::function<int(int store_unit)> home;
    std::function<int(int rank)> host;
    std::function<void(int rank, Task task, const std::vector<Use>& uses)> task;
  };
  Updates(Builder& builder, const model::ModelShape& shape, const ScheduleOptions& options, const UpdateBytes& bytes,
          Emitter emitter);

  // The buffers of state that stays on devices, in every plan of a run. Once, before any task.
  void add_residents();
  // After the offload of a unit's gradient.
  void offloaded(int store_unit);
  // After the norms: by host the buffers of their values.
  void finish(const std::vector<std::uint32_t>& norm_values);

 private:
  static constexpr std::uint32_t kNone = UINT32_MAX;
  static constexpr std::size_t kPiecesOnDevice = 3;
  struct Piece {
    int unit = 0;
    std::uint16_t number = 0;
    std::uint32_t buffer = kNone;
  };
  void emit(int store_unit);
  void emit_on_cpu(int store_unit);
  void emit_on_device(int store_unit);
  void emit_load(const Piece& piece);
  void emit_rest(const Piece& piece);
  void drain(int rank, std::size_t most);
  void emit_commit(int store_unit);
  void add_norm(std::vector<Use>& uses, int store_unit) const;
  [[nodiscard]] std::uint64_t elements(int s) const { return shape_.store_units[static_cast<std::size_t>(s)].elements; }
  [[nodiscard]] std::uint64_t piece_length(int store_unit, std::uint16_t number) const;
  [[nodiscard]] std::vector<int> in_forward_order() const;
  [[nodiscard]] UpdateWay way(int s) const { return options_.way(s); }
  [[nodiscard]] std::uint16_t flags(int s) const { return way(s).speculate ? kSpeculate : 0; }

  Builder& builder_;
  const model::ModelShape& shape_;
  const ScheduleOptions& options_;
  const UpdateBytes bytes_;
  const Emitter emitter_;
  std::vector<std::uint32_t> residents_;      // per store unit
  std::vector<std::deque<Piece>> on_device_;  // per rank: loaded, not yet updated
  const std::vector<std::uint32_t>* norm_values_ = nullptr;
};

}  // namespace spipe::plan
