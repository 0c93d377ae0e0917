// The parameter tensors of every unit kind, in slab order, by role: names (families) and arithmetic (layers) read the same
// list.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spipe/model/shape.h"

namespace spipe::model {

// What a tensor does, whatever its family calls it. The first MLP matrix of an ungated MLP is `up`.
enum class Role : std::uint8_t {
  token_table,
  position_table,
  norm1_weight,
  norm1_bias,
  qkv_weight,  // GPT-2: q, k, v side by side
  qkv_bias,
  q_weight,
  k_weight,
  v_weight,
  q_bias,
  k_bias,
  v_bias,
  q_norm,
  k_norm,
  out_weight,
  out_bias,
  norm2_weight,
  norm2_bias,
  gate_weight,
  up_weight,
  gate_bias,
  up_bias,
  down_weight,
  down_bias,
  final_norm_weight,
  final_norm_bias,
  head_weight,
};
inline constexpr int kRoleCount = static_cast<int>(Role::head_weight) + 1;

// Every tensor starts at a multiple of this many elements: 256 bytes in a 16-bit plane.
inline constexpr std::uint64_t kTensorAlignment = 128;

struct TensorSpec {
  Role role;
  std::string name;  // without the layer's prefix; complete for the other units
  Shape shape;
};

// The tensors of one store unit in slab order. Matrices that read the same input stand next to each other, and so do their
// biases, so that q|k|v and gate|up are one matrix wherever sizes leave no padding between them.
[[nodiscard]] std::vector<TensorSpec> embedding_tensors(const Architecture& architecture);
[[nodiscard]] std::vector<TensorSpec> layer_tensors(const Architecture& architecture);
[[nodiscard]] std::vector<TensorSpec> head_tensors(const Architecture& architecture);
[[nodiscard]] std::vector<TensorSpec> tied_tensors(const Architecture& architecture);  // empty when nothing is tied

}  // namespace spipe::model
