// One folder of golden vectors (data/README.md), read once.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "spipe/model/architecture.h"

namespace spipe::test {

struct GoldenStep {
  double loss = 0, lr = 0, grad_norm = 0, clip_coef = 0;
};
struct GoldenCase {
  std::string name;
  double beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0, max_grad_norm = 0;
  std::vector<GoldenStep> steps;
  std::vector<int> saved_steps;
  // float32_error by "stepN", then by tensor
  std::map<std::string, std::map<std::string, double>> update_error;
};
struct Slice {
  std::string tensor;
  std::size_t begin = 0, end = 0;
};
using Tensors = std::map<std::string, std::vector<float>>;

struct GoldenModel {
  std::string name;
  model::Architecture architecture;
  std::int64_t micro = 0, sequences = 0, seq_len = 0;      // micro-batches per step, sequences in each, tokens in each
  std::vector<std::vector<std::int32_t>> tokens, targets;  // by step * micro + micro-batch; targets are shifted, < 0 masked
  std::vector<std::int64_t> positions;                     // rows of micro-batch 0
  std::vector<double> loss_sums;
  double global_norm = 0;
  std::vector<GoldenCase> cases;
  std::vector<Slice> zero_gradients;
  Tensors parameters;  // initial, by our canonical name
  Tensors reference;   // golden.safetensors without the batch; tensor names canonical after "grad." and "CASE.stepN."

  [[nodiscard]] double targets_of(std::size_t step) const;  // unmasked targets of a step
  [[nodiscard]] bool zero_gradient(const std::string& tensor, std::size_t element) const;
};

// The folders below $SPIPE_GOLDEN_DIR, or tests/golden/data, that hold a golden.json; sorted.
[[nodiscard]] std::vector<std::filesystem::path> golden_folders();
// Nothing when the model's family is not built (its name is printed).
[[nodiscard]] std::optional<GoldenModel> read_golden(const std::filesystem::path& folder);

}  // namespace spipe::test
