// Runs a model unit by unit on any Ops, the way an executor does but in the plainest order, with every buffer of exactly the
// size the shape says and guarded.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "guarded_buffer.h"
#include "kernels/ops.h"
#include "spipe/model/layers.h"
#include "spipe/model/shape.h"

namespace spipe::test {

struct RunnerOptions {
  bool recompute = false;            // layers forward twice: first saving nothing, then (before backward) saving
  bool alias_gradients = true;       // input_gradient is output_gradient's buffer
  std::uint64_t seed = 1, step = 1;  // dropout
};

struct AdamW {
  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0, clip = 1;
  int step = 1;
};

class UnitRunner {
 public:
  UnitRunner(model::ModelShape shape, Ops& ops, RunnerOptions options = {});

  [[nodiscard]] const model::ModelShape& shape() const { return shape_; }
  void set_parameter(const std::string& name, std::span<const float> values);  // masters; compute copies follow
  [[nodiscard]] std::span<const float> parameter(const std::string& name) const;

  // Forward of all layers; then the losses, and the gradients unless `loss_scale` is 0. `first`: nothing accumulated yet.
  void run_micro_batch(std::span<const std::int32_t> tokens, std::span<const std::int32_t> targets, float loss_scale,
                       std::uint64_t first_sequence, bool first);
  [[nodiscard]] std::span<const float> nll() const { return nll_; }
  [[nodiscard]] std::vector<float> boundary(int after_unit) const;  // widened; the last micro-batch's
  [[nodiscard]] std::vector<float> final_norm() const;
  [[nodiscard]] std::vector<float> logits(std::int64_t row);

  // Ends accumulation: sums of all contributions, by name; then they are readable and `global_norm` is known.
  void finish_gradients();
  [[nodiscard]] const std::map<std::string, std::vector<float>>& gradients() const { return gradients_; }
  [[nodiscard]] double global_norm() const { return global_norm_; }
  void update(const AdamW& settings);

 private:
  struct Unit {
    std::vector<float> master, m, v;
    GuardedBuffer compute;
    std::map<int, GuardedBuffer> accumulators;  // by source
  };
  struct Found {
    int unit;
    const model::Parameter* parameter;
  };
  [[nodiscard]] Found find(const std::string& name) const;
  void refresh_compute(int unit);
  [[nodiscard]] model::UnitCall call(int unit, bool accumulate, bool gradients);
  void forward(int unit, bool save);
  void check_guards() const;

  model::ModelShape shape_;
  Ops& ops_;
  RunnerOptions options_;
  std::vector<Unit> units_;
  GuardedBuffer constants_memory_;
  model::Constants constants_;
  std::vector<GuardedBuffer> boundaries_;  // output of unit i
  std::vector<GuardedBuffer> saved_;       // by unit
  GuardedBuffer gradient_, other_gradient_;
  std::vector<float> nll_;
  std::vector<model::UnitMemory> memory_;
  std::vector<std::int32_t> tokens_, targets_;
  std::uint64_t first_sequence_ = 0;
  std::map<std::string, std::vector<float>> gradients_;
  double global_norm_ = 0;
};

}  // namespace spipe::test
