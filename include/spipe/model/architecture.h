// What a decoder-only model is, as data: one struct for all families. Layers (model/layers.h) are written against these fields,
// families (model/families.h) map Hugging Face configs to them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace spipe::model {

enum class Family : std::uint8_t { gpt2, opt, llama, qwen2, qwen3, mistral };
[[nodiscard]] std::string family_name(Family family);  // "gpt2", ... = model_type of Hugging Face

enum class NormKind : std::uint8_t { layernorm, rmsnorm };
enum class MlpKind : std::uint8_t { gelu_tanh, gelu_erf, relu, swiglu };
enum class PositionKind : std::uint8_t { learned, rope };
enum class RopeScaling : std::uint8_t { none, linear, llama3 };

// family: normal(0, init_std) as the family's paper says; fan_in: linear weights normal(0, 1/sqrt(inputs)), residual
// projections smaller by 1/sqrt(2 layers), token embeddings normal(0, 1) (tied ones 1/sqrt(hidden)): better for small models
// from scratch.
enum class InitKind : std::uint8_t { family, fan_in };

struct Rope {
  double theta = 10000.0;
  RopeScaling scaling = RopeScaling::none;
  double factor = 1.0, low_freq_factor = 1.0, high_freq_factor = 4.0;  // llama3
  std::int64_t original_max_positions = 8192;                          // llama3
  bool operator==(const Rope&) const = default;
};

struct Architecture {
  Family family = Family::llama;
  std::int64_t vocab_size = 0, hidden_size = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, ffn_size = 0;
  std::int64_t max_positions = 0;    // rows of a learned table without offset; advisory for rope
  std::int64_t position_offset = 0;  // OPT: 2
  std::int64_t sliding_window = 0;   // 0: none
  NormKind norm = NormKind::rmsnorm;
  MlpKind mlp = MlpKind::swiglu;
  PositionKind position = PositionKind::rope;
  Rope rope;
  double norm_eps = 1e-5;
  bool qkv_bias = false, out_bias = false, mlp_bias = false, qk_norm = false, tied_embeddings = false;
  bool fused_qkv = false;  // GPT-2: one [hidden, 3 hidden] Conv1D
  bool conv1d = false;     // GPT-2: linear weights stored [in, out]
  InitKind init = InitKind::family;
  double init_std = 0.02;
  double dropout_embedding = 0, dropout_attention_out = 0, dropout_mlp_out = 0;  // 0 unless configured
  // Keys of the source config that decide nothing here (token ids, dropout rates, ...), written back on export: JSON object
  // text.
  std::string carried_keys;

  [[nodiscard]] std::int64_t q_size() const { return heads * head_dim; }
  [[nodiscard]] std::int64_t kv_size() const { return kv_heads * head_dim; }
  [[nodiscard]] std::int64_t qkv_size() const { return q_size() + 2 * kv_size(); }
  bool operator==(const Architecture&) const = default;
};

// Shape rules (heads divide hidden unless head_dim is given, kv_heads divide heads, even head_dim for rope, all > 0, sizes
// whose products stay in 63 bits): throws Error naming both values and keys and the nearest legal value. `where` names the
// source file.
void check_architecture(const Architecture& architecture, const std::string& where);

// Checks seq_len against a learned position table (refused when longer) and warns past max_positions for rope.
void check_sequence_length(const Architecture& architecture, std::int64_t seq_len, const std::string& where);

}  // namespace spipe::model
