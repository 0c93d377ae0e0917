// Small models and edits of plans for the tests of plan/.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "spipe/model/shape.h"
#include "spipe/plan/builder.h"
#include "spipe/plan/verifier.h"

namespace spipe::plan::testing {

struct SmallModel {
  int layers = 3;
  bool tied = false;
  bool learned_positions = false;  // then no rope constants, and the embedding unit of a tied model is not empty
  std::int64_t vocab = 300, hidden = 32, ffn = 64, micro = 2, seq_len = 16;
};
[[nodiscard]] model::ModelShape small_shape(const SmallModel& small);

// Seeded choices of random tests.
class Dice {
 public:
  explicit Dice(std::uint32_t seed) : engine_(seed) {}
  int from(int low, int high) { return low + static_cast<int>(engine_() % static_cast<std::uint32_t>(high - low + 1)); }
  bool coin() { return from(0, 1) == 1; }
  std::vector<int> cuts(int end) {
    std::vector<int> list = {0};
    const int density = from(1, 4);
    for (int u = 1; u < end; ++u) {
      if (from(1, density) == 1) list.push_back(u);
    }
    return list;
  }
  // Any way for every unit; one time in three the plain ones.
  std::vector<UpdateWay> ways(const model::ModelShape& shape) {
    if (from(0, 2) == 0) return {};
    std::vector<UpdateWay> list(shape.store_units.size());
    for (UpdateWay& way : list) {
      way.placement = static_cast<Placement>(from(0, 2));
      way.speculate = way.placement != Placement::resident && coin();
    }
    return list;
  }

 private:
  std::mt19937 engine_;
};

// A streamed training step: cuts at every `backward_step` units, forward at every `forward_step`.
[[nodiscard]] ScheduleOptions streamed(const model::ModelShape& shape, int forward_step, int backward_step, int micro_batches,
                                       bool recompute);
[[nodiscard]] ScheduleOptions in_place(int micro_batches, bool recompute);
[[nodiscard]] std::vector<int> every(int step, int end);

// The first task that `matches`, or a failed test.
[[nodiscard]] std::uint32_t find_task(const Plan& plan, const std::function<bool(const Task&)>& matches);
[[nodiscard]] std::uint32_t find_task(const Plan& plan, TaskKind kind, int unit, int micro_batch = -1);
[[nodiscard]] std::uint32_t last_task(const Plan& plan, TaskKind kind);

// Edits. Waits follow the tasks they name; waits for a removed task go with it.
void remove_task(Plan& plan, std::uint32_t id);
void insert_copy(Plan& plan, std::uint32_t id, std::uint32_t at);  // without waits
void move_task(Plan& plan, std::uint32_t id, std::uint32_t at);    // without waits
void swap_tasks(Plan& plan, std::uint32_t a, std::uint32_t b);     // all but their ids and waits
void drop_wait(Plan& plan, std::uint32_t id, std::uint32_t index);
void drop_waits(Plan& plan, std::uint32_t id, const std::function<bool(const Wait&)>& matches);  // there must be one
void add_wait(Plan& plan, std::uint32_t id, Wait wait);
[[nodiscard]] Use& use_of(Plan& plan, std::uint32_t id, BufferKind kind);

}  // namespace spipe::plan::testing
