// Inside of the single-rank schedule: schedule_streaming.cpp decides what comes when, streaming_tasks.cpp what each task uses.
#pragma once

#include <algorithm>
#include <vector>

#include "emit_updates.h"
#include "spipe/plan/builder.h"

namespace spipe::plan::streaming {

inline constexpr std::uint32_t kNone = UINT32_MAX;

struct Range {
  int begin = 0, end = 0;
};

// One pass over one stage; a visit is one micro-batch of it.
struct Pass {
  bool backward = false;
  int stage = 0;
  Range units;
};

class Streaming {
 public:
  Streaming(const ScheduleInput& input, const ScheduleOptions& options);
  Plan emit();

 private:
  // A tensor that outlives the visit that made it: on the device, parked, or both.
  struct Kept {
    std::uint32_t device = kNone, parked = kNone;
  };
  struct Gradient {
    Kept total;
    std::uint32_t partial = kNone;
  };

  // Emission.
  void emit_inputs(int micro_batch);
  void emit_fetches(std::size_t pass, int visits);
  void emit_forward_visit(const Pass& pass, int micro_batch);
  void emit_backward_visit(const Pass& pass, int micro_batch);
  void emit_forward(const Pass& pass, int unit, int micro_batch, bool saves, bool repeats);
  void emit_loss(const Pass& pass, int micro_batch);
  void emit_backward(const Pass& pass, int unit, int micro_batch);
  void emit_reduces(const Pass& pass, int unit, int micro_batch);
  void emit_offload(int store_unit, int stage);
  void emit_norm();
  void emit_saves();
  void park(Kept& kept, int unit, int micro_batch, int stage);
  void unpark(Kept& kept, int unit, int micro_batch, int stage);
  void unpark_for(const Pass& pass, int micro_batch);
  void park_boundary(const Pass& pass, int unit, int micro_batch);
  bool worth_parking(std::size_t passes_until_use) const;
  void end_of_visit(std::size_t pass, int micro_batch);

  // Uses.
  void use_parameters(std::vector<Use>& uses, int unit);
  void use_gradients(std::vector<Use>& uses, int unit, int micro_batch);
  void use_workspace(std::vector<Use>& uses, std::uint64_t bytes);
  void use_constants(std::vector<Use>& uses);
  std::uint32_t stored(BufferKind kind, int unit);
  std::uint32_t device(BufferKind kind, int unit, int micro_batch, std::uint64_t bytes, int source = -1);
  Gradient& gradient(int store_unit, int source);

  // Facts.
  const model::ComputeUnit& unit(int u) const { return shape_.units[static_cast<std::size_t>(u)]; }
  std::uint64_t elements(int s) const { return shape_.store_units[static_cast<std::size_t>(s)].elements; }
  int head() const { return shape_.unit_count() - 1; }
  bool in_place() const { return options_.residency == Residency::in_place; }
  bool training() const { return !options_.evaluate; }
  bool last_visit(int micro_batch) const { return micro_batch + 1 == options_.micro_batches; }
  int group_of(int micro_batch) const;
  bool first_of_group(int m) const { return m == 0 || group_of(m) != group_of(m - 1); }
  bool last_of_group(int m) const { return last_visit(m) || group_of(m) != group_of(m + 1); }
  bool is_first_group(int m) const { return group_of(m) == group_of(0); }
  bool has_forward_in_backward(const Pass& pass, int u) const;
  bool needs_parameters(const Pass& pass, int u) const;
  std::vector<int> store_units_of(const Pass& pass) const;
  std::size_t number(const Pass& pass) const { return static_cast<std::size_t>(&pass - passes_.data()); }
  std::uint16_t last_flag(bool last_unit, int m) const { return last_unit && last_visit(m) ? kLastOfStage : 0; }
  Kept& boundary(int u, int m) { return boundaries_[index(u, m)]; }
  std::size_t index(int u, int m) const {
    return static_cast<std::size_t>(u) * static_cast<std::size_t>(options_.micro_batches) + static_cast<std::size_t>(m);
  }

  const ScheduleInput& input_;
  const model::ModelShape& shape_;
  const ScheduleOptions options_;
  Builder builder_;
  Updates updates_;
  std::vector<Pass> passes_;
  std::uint32_t constants_ = kNone;
  std::vector<std::vector<std::uint32_t>> fetched_;  // per pass and store unit: the parameters' buffer
  const std::vector<std::uint32_t>* parameters_ = nullptr;
  std::vector<Kept> boundaries_;                  // into unit u, micro-batch m
  std::vector<std::uint32_t> saved_, inputs_;     // per (unit, micro-batch), per micro-batch
  std::vector<Kept> boundary_gradients_;          // per micro-batch
  std::vector<std::vector<Gradient>> gradients_;  // per store unit, per source in canonical order
  std::vector<std::size_t> sources_left_;
  std::vector<std::vector<std::uint32_t>> stored_;  // per kind and unit
  std::uint32_t norm_value_ = kNone;
  std::vector<std::uint32_t> results_;  // per micro-batch
  struct Offload {
    int store_unit = 0, stage = 0;
  };
  std::vector<Offload> offloads_, late_offloads_;
  struct Parking {
    Kept* kept = nullptr;
    int unit = 0, micro_batch = 0, stage = 0;
  };
  std::vector<Parking> parkings_, late_parkings_;
};

}  // namespace spipe::plan::streaming
