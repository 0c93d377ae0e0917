// Runs a golden model on some Ops and holds everything it gives against the reference.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "golden_model.h"
#include "kernels/ops.h"

namespace spipe::test {

// The table "Comparing" of data/README.md; gradients also by direction, updates by the file's own figures.
struct Tolerances {
  double loss, grad_norm, activations, gradient, cosine;
  bool updates;
};
[[nodiscard]] Tolerances float32_tolerances();
[[nodiscard]] Tolerances bfloat16_tolerances(const model::Architecture& architecture);

struct Comparison {
  std::map<std::string, double> worst;  // error by quantity
  std::vector<std::string> failures;    // one line each
  void check(const std::string& quantity, const std::string& what, double error, double tolerance);
  [[nodiscard]] std::string text() const;
};

struct GoldenRun {
  Ops* ops = nullptr;
  DType compute = DType::f32;
  Tolerances tolerances = float32_tolerances();
  std::int64_t head_chunk = 10;  // does not divide the rows of any default model
};
// `architecture`: the model's own, or one with a mistake in it.
[[nodiscard]] Comparison compare_with_golden(const GoldenModel& golden, const model::Architecture& architecture,
                                             const GoldenRun& run);

}  // namespace spipe::test
