#include "tensors.h"

#include <array>
#include <string_view>

#include "spipe/base/checked.h"
#include "spipe/model/families.h"

namespace spipe::model {
namespace {

// What a family calls its tensors.
struct Names {
  const char* prefix;       // of everything but the head
  const char* token_table;  // after the prefix, like all below
  const char* position_table;
  const char* layers;  // "layers." + index + "."
  const char* norm1;
  const char* attention;  // prefix of q, k, v and the output projection
  const char* out;
  const char* norm2;
  const char* gate;  // null when the MLP is not gated
  const char* up;
  const char* down;
  const char* final_norm;
};

constexpr Names kGpt2{"transformer.", "wte",  "wpe",   "h.",       "ln_1",       "attn.",
                      "c_proj",       "ln_2", nullptr, "mlp.c_fc", "mlp.c_proj", "ln_f"};
constexpr Names kOpt{"model.decoder.",
                     "embed_tokens",
                     "embed_positions",
                     "layers.",
                     "self_attn_layer_norm",
                     "self_attn.",
                     "out_proj",
                     "final_layer_norm",
                     nullptr,
                     "fc1",
                     "fc2",
                     "final_layer_norm"};
constexpr Names kLlama{"model.",          "embed_tokens", nullptr,         "layers.",
                       "input_layernorm", "self_attn.",   "o_proj",        "post_attention_layernorm",
                       "mlp.gate_proj",   "mlp.up_proj",  "mlp.down_proj", "norm"};

const Names& names_of(const Architecture& architecture) {
  switch (architecture.family) {
    case Family::gpt2:
      return kGpt2;
    case Family::opt:
      return kOpt;
    case Family::llama:
    case Family::qwen2:
    case Family::qwen3:
    case Family::mistral:
      return kLlama;
  }
  SPIPE_CHECK(false, "unknown family");
}

struct Lister {
  const Architecture& a;
  const Names& names;
  std::vector<TensorSpec> list{};

  explicit Lister(const Architecture& architecture) : a(architecture), names(names_of(architecture)) {}

  void matrix(Role role, const std::string& name, std::int64_t out, std::int64_t in) {
    list.push_back({role, name + ".weight", a.conv1d ? Shape{in, out} : Shape{out, in}});
  }
  void bias(Role role, const std::string& name, std::int64_t size, bool present) {
    if (present) list.push_back({role, name + ".bias", Shape{size}});
  }
  void norm(Role weight, Role bias_role, const std::string& name) {
    list.push_back({weight, name + ".weight", Shape{a.hidden_size}});
    bias(bias_role, name, a.hidden_size, a.norm == NormKind::layernorm);
  }
};

void add_attention(Lister& lister) {
  const Architecture& a = lister.a;
  const std::string prefix = lister.names.attention;
  if (a.fused_qkv) {
    lister.matrix(Role::qkv_weight, prefix + "c_attn", a.qkv_size(), a.hidden_size);
    lister.bias(Role::qkv_bias, prefix + "c_attn", a.qkv_size(), a.qkv_bias);
  } else {
    lister.matrix(Role::q_weight, prefix + "q_proj", a.q_size(), a.hidden_size);
    lister.matrix(Role::k_weight, prefix + "k_proj", a.kv_size(), a.hidden_size);
    lister.matrix(Role::v_weight, prefix + "v_proj", a.kv_size(), a.hidden_size);
    lister.bias(Role::q_bias, prefix + "q_proj", a.q_size(), a.qkv_bias);
    lister.bias(Role::k_bias, prefix + "k_proj", a.kv_size(), a.qkv_bias);
    lister.bias(Role::v_bias, prefix + "v_proj", a.kv_size(), a.qkv_bias);
  }
  if (a.qk_norm) {
    lister.list.push_back({Role::q_norm, prefix + "q_norm.weight", Shape{a.head_dim}});
    lister.list.push_back({Role::k_norm, prefix + "k_norm.weight", Shape{a.head_dim}});
  }
  lister.matrix(Role::out_weight, prefix + lister.names.out, a.hidden_size, a.q_size());
  lister.bias(Role::out_bias, prefix + lister.names.out, a.hidden_size, a.out_bias);
}

void add_mlp(Lister& lister) {
  const Architecture& a = lister.a;
  const bool gated = a.mlp == MlpKind::swiglu;
  SPIPE_CHECK(gated == (lister.names.gate != nullptr), "this family's MLP has other tensors than its activation needs");
  if (gated) lister.matrix(Role::gate_weight, lister.names.gate, a.ffn_size, a.hidden_size);
  lister.matrix(Role::up_weight, lister.names.up, a.ffn_size, a.hidden_size);
  if (gated) lister.bias(Role::gate_bias, lister.names.gate, a.ffn_size, a.mlp_bias);
  lister.bias(Role::up_bias, lister.names.up, a.ffn_size, a.mlp_bias);
  lister.matrix(Role::down_weight, lister.names.down, a.hidden_size, a.ffn_size);
  lister.bias(Role::down_bias, lister.names.down, a.hidden_size, a.mlp_bias);
}

TensorSpec token_table(const Architecture& a) {
  const Names& names = names_of(a);
  return {Role::token_table, std::string(names.prefix) + names.token_table + ".weight", Shape{a.vocab_size, a.hidden_size}};
}

StoreUnit make_unit(std::string name, const std::string& prefix, const std::vector<TensorSpec>& specs) {
  StoreUnit unit;
  unit.name = std::move(name);
  for (const TensorSpec& spec : specs) {
    Parameter parameter{prefix + spec.name, spec.shape, unit.elements, spec.shape.rank() >= 2};
    unit.elements = checked_add(unit.elements, parameter.elements());
    unit.elements = checked_add(unit.elements, kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
    unit.parameters.push_back(std::move(parameter));
  }
  return unit;
}

bool starts_with_any(std::string_view name, std::initializer_list<std::string_view> starts) {
  for (const std::string_view start : starts) {
    if (name.starts_with(start)) return true;
  }
  return false;
}

}  // namespace

std::vector<TensorSpec> embedding_tensors(const Architecture& a) {
  const Names& names = names_of(a);
  std::vector<TensorSpec> list;
  if (!a.tied_embeddings) list.push_back(token_table(a));
  if (a.position == PositionKind::learned) {
    SPIPE_CHECK(names.position_table != nullptr, "this family has no position table");
    list.push_back({Role::position_table, std::string(names.prefix) + names.position_table + ".weight",
                    Shape{a.max_positions + a.position_offset, a.hidden_size}});
  }
  return list;
}

std::vector<TensorSpec> layer_tensors(const Architecture& a) {
  Lister lister(a);
  lister.norm(Role::norm1_weight, Role::norm1_bias, lister.names.norm1);
  add_attention(lister);
  lister.norm(Role::norm2_weight, Role::norm2_bias, lister.names.norm2);
  add_mlp(lister);
  return std::move(lister.list);
}

std::vector<TensorSpec> head_tensors(const Architecture& a) {
  Lister lister(a);
  lister.norm(Role::final_norm_weight, Role::final_norm_bias, std::string(lister.names.prefix) + lister.names.final_norm);
  if (!a.tied_embeddings) lister.list.push_back({Role::head_weight, "lm_head.weight", Shape{a.vocab_size, a.hidden_size}});
  return std::move(lister.list);
}

std::vector<TensorSpec> tied_tensors(const Architecture& a) {
  if (!a.tied_embeddings) return {};
  return {token_table(a)};
}

std::vector<StoreUnit> store_units_of(const Architecture& a) {
  const Names& names = names_of(a);
  std::vector<StoreUnit> units;
  units.push_back(make_unit("embedding", "", embedding_tensors(a)));
  const std::vector<TensorSpec> layer = layer_tensors(a);
  for (std::int64_t i = 0; i < a.layers; ++i) {
    const std::string index = std::to_string(i);
    units.push_back(make_unit("layer " + index, std::string(names.prefix) + names.layers + index + ".", layer));
  }
  units.push_back(make_unit("head", "", head_tensors(a)));
  if (a.tied_embeddings) units.push_back(make_unit("tied", "", tied_tensors(a)));
  return units;
}

std::string canonical_tensor_name(const Architecture& a, const std::string& name) {
  switch (a.family) {
    case Family::gpt2: {
      const bool buffer =
          name.find("h.") != std::string::npos && (name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias"));
      if (buffer) return "";
      return starts_with_any(name, {"wte.", "wpe.", "h.", "ln_f."}) ? "transformer." + name : name;
    }
    case Family::opt:
      return name.starts_with("decoder.") ? "model." + name : name;
    case Family::llama:
    case Family::qwen2:
    case Family::qwen3:
    case Family::mistral:
      if (name.ends_with("rotary_emb.inv_freq")) return "";
      return starts_with_any(name, {"embed_tokens.", "layers.", "norm."}) ? "model." + name : name;
  }
  SPIPE_CHECK(false, "unknown family");
}

}  // namespace spipe::model
