// The published rows (bench/data/figures.csv) and how their runs are planned here.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "spipe/model/shape.h"
#include "spipe/plan/plan.h"
#include "spipe/plan/simulator.h"

namespace spipe::bench {

struct Row {
  int figure = 0;
  std::string cluster, system;
  int size_b = 0, layers = 0, hidden = 0, ffn = 0, heads = 0, seq_len = 0, nodes = 0, gpus_per_node = 0;
  int micro_batch = 0, global_batch = 0;
  std::optional<double> elapsed_ms, latency_ms;  // of the step, and of the devices' part of it
  std::string failure;
  [[nodiscard]] int ranks() const { return nodes * gpus_per_node; }
  [[nodiscard]] int micro_batches() const { return global_batch / micro_batch; }
};

[[nodiscard]] std::vector<Row> read_rows(const std::string& file);
// Figures 9 and 10, without DeepSpeed, which is no schedule here, and without the 110B/1024 row of figure 10: its TFLOPS show
// that an 88B model ran.
[[nodiscard]] bool is_evaluation(const Row& row);

// The model of a row; attention computes the full square of scores, as the published runs did.
[[nodiscard]] model::ModelShape published_shape(const Row& row);
// Two forward stages a rank and six backward ones (SPipe) or two (Mobius, 1F1B-offload), a barrier between steps; SPipe updates
// a stage as soon as its gradients have landed, the others after the pass.
[[nodiscard]] plan::Plan published_plan(const Row& row, const model::ModelShape& shape);

// The steps of figure 15.
struct Ablation {
  const char* text;
  const char* schedule;
  int backward_stages;
  int prefetch;
  bool checkpoints_late;  // sent one visit before their use instead of when made
  bool early_updates;
};
[[nodiscard]] std::optional<Ablation> ablation_of(const std::string& system);
[[nodiscard]] plan::Plan ablation_plan(const Row& row, const model::ModelShape& shape, const Ablation& ablation);

// Device memory that the published implementation needs, by the rules of its code.
[[nodiscard]] double published_device_bytes(const Row& row);

}  // namespace spipe::bench
