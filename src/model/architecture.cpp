#include "spipe/model/architecture.h"

#include <algorithm>
#include <cstdlib>

#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/base/log.h"

namespace spipe::model {
namespace {

// The keys of a family's config.json, for messages.
struct Keys {
  const char *vocab, *hidden, *layers, *heads, *ffn, *positions;
};

Keys keys_of(Family family) {
  if (family == Family::gpt2) return {"vocab_size", "n_embd", "n_layer", "n_head", "n_inner", "n_positions"};
  const char* const ffn = family == Family::opt ? "ffn_dim" : "intermediate_size";
  return {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", ffn, "max_position_embeddings"};
}

std::string assignment(const char* key, std::int64_t value) { return std::string(key) + " " + std::to_string(value); }

// The divisors of `number` next to `value`, for hints: "40 or 50".
std::string nearest_divisors(std::int64_t number, std::int64_t value) {
  constexpr std::int64_t kFarthest = 1'000'000;  // a hint is not worth more steps
  std::int64_t below = std::min(value, number), above = std::max<std::int64_t>(value, 1);
  while (below > std::max<std::int64_t>(0, value - kFarthest) && number % below != 0) --below;
  while (above < std::min(number, value + kFarthest) && number % above != 0) ++above;
  if (below <= 0 || number % below != 0) below = 0;
  if (above > number || number % above != 0) above = 0;
  if (below == 0 && above == 0) return "1";
  if (below == 0) return std::to_string(above);
  if (above == 0 || above == below) return std::to_string(below);
  return std::to_string(below) + " or " + std::to_string(above);
}

void check_positive(const char* key, std::int64_t value, const std::string& where) {
  if (value <= 0) throw Error(assignment(key, value) + " is not allowed", where, std::string(key) + " must be at least 1");
}

void check_heads(const Architecture& a, const Keys& keys, const std::string& where) {
  const bool derived = a.head_dim == 0;  // no head_dim given: hidden / heads, which leaves a rest
  if ((derived || a.family == Family::gpt2 || a.family == Family::opt) && a.hidden_size % a.heads != 0) {
    throw Error(assignment(keys.heads, a.heads) + " does not divide " + assignment(keys.hidden, a.hidden_size), where,
                std::string("the nearest legal ") + keys.heads + " is " + nearest_divisors(a.hidden_size, a.heads));
  }
  if (a.head_dim <= 0) {
    throw Error(assignment("head_dim", a.head_dim) + " is not allowed", where, "head_dim must be at least 1, or absent");
  }
  if (a.heads % a.kv_heads != 0) {
    throw Error(assignment("num_key_value_heads", a.kv_heads) + " does not divide " + assignment(keys.heads, a.heads), where,
                "the nearest legal num_key_value_heads is " + nearest_divisors(a.heads, a.kv_heads));
  }
  if (a.position == PositionKind::rope && a.head_dim % 2 != 0) {
    throw Error("the head size is " + std::to_string(a.head_dim) + " (" + assignment(keys.hidden, a.hidden_size) + ", " +
                    assignment(keys.heads, a.heads) + "), but rotary positions need an even one",
                where,
                "the nearest legal head_dim is " + std::to_string(a.head_dim - 1 > 0 ? a.head_dim - 1 : 2) + " or " +
                    std::to_string(a.head_dim + 1));
  }
}

// Element counts of the largest tensors, so that nothing later can wrap.
void check_sizes(const Architecture& a, const std::string& where) {
  const auto product = [&](std::int64_t x, std::int64_t y) {
    std::int64_t result = 0;
    constexpr std::int64_t kLargest = std::int64_t{1} << 56;  // times 16 bytes a parameter still fits 63 bits
    if (__builtin_mul_overflow(x, y, &result) || result > kLargest) {
      throw Error("a tensor of " + std::to_string(x) + " x " + std::to_string(y) + " elements is too large", where,
                  "check the sizes of the model");
    }
    return result;
  };
  const std::int64_t row = product(a.heads, a.head_dim);
  static_cast<void>(product(a.vocab_size, a.hidden_size));
  static_cast<void>(product(product(a.ffn_size, 2), a.hidden_size));
  static_cast<void>(product(product(row, 3), a.hidden_size));
  static_cast<void>(product(a.layers, product(row, a.hidden_size)));
  if (a.position == PositionKind::learned) static_cast<void>(product(a.max_positions + a.position_offset, a.hidden_size));
}

void check_numbers(const Architecture& a, const std::string& where) {
  if (!(a.norm_eps > 0 && a.norm_eps < 1)) throw Error("the norm's epsilon must be between 0 and 1", where);
  if (a.position == PositionKind::rope) {
    if (!(a.rope.theta > 0)) throw Error("rope_theta must be greater than 0", where);
    if (a.rope.scaling != RopeScaling::none && !(a.rope.factor > 0))
      throw Error("the rope factor must be greater than 0", where);
    if (a.rope.scaling == RopeScaling::llama3) {
      if (!(a.rope.low_freq_factor > 0 && a.rope.high_freq_factor > a.rope.low_freq_factor)) {
        throw Error("llama3 rope needs 0 < low_freq_factor < high_freq_factor", where);
      }
      check_positive("original_max_position_embeddings", a.rope.original_max_positions, where);
    }
  }
  for (const double p : {a.dropout_embedding, a.dropout_attention_out, a.dropout_mlp_out}) {
    if (!(p >= 0 && p < 1)) throw Error("a dropout probability must be at least 0 and less than 1", where);
  }
  if (a.sliding_window < 0) throw Error("sliding_window must be at least 1, or absent", where);
}

}  // namespace

std::string family_name(Family family) {
  switch (family) {
    case Family::gpt2:
      return "gpt2";
    case Family::opt:
      return "opt";
    case Family::llama:
      return "llama";
    case Family::qwen2:
      return "qwen2";
    case Family::qwen3:
      return "qwen3";
    case Family::mistral:
      return "mistral";
  }
  SPIPE_CHECK(false, "unknown family");
}

void check_architecture(const Architecture& a, const std::string& where) {
  const Keys keys = keys_of(a.family);
  check_positive(keys.vocab, a.vocab_size, where);
  check_positive(keys.hidden, a.hidden_size, where);
  check_positive(keys.layers, a.layers, where);
  check_positive(keys.heads, a.heads, where);
  check_positive("num_key_value_heads", a.kv_heads, where);
  check_positive(keys.ffn, a.ffn_size, where);
  if (a.position == PositionKind::learned) check_positive(keys.positions, a.max_positions, where);
  constexpr std::int64_t kMostLayers = 100'000;
  if (a.layers > kMostLayers) throw Error(assignment(keys.layers, a.layers) + " is not allowed", where, "at most 100000");
  check_heads(a, keys, where);
  check_sizes(a, where);
  check_numbers(a, where);
}

void check_sequence_length(const Architecture& a, std::int64_t seq_len, const std::string& where) {
  if (seq_len <= a.max_positions || (a.position == PositionKind::rope && a.max_positions <= 0)) return;
  const std::string finding = "sequences of " + std::to_string(seq_len) + " tokens are longer than the model's " +
                              assignment(keys_of(a.family).positions, a.max_positions);
  if (a.position == PositionKind::learned) {
    throw Error(finding, where, "its position table has no more rows; use seq_len <= " + std::to_string(a.max_positions));
  }
  log_warning(where + (where.empty() ? "" : ": ") + finding + "; rotary positions go on, but the model was not made for it");
}

}  // namespace spipe::model
