#include "spipe/model/families.h"

#include <algorithm>
#include <array>
#include <vector>

#include "hf_keys.h"
#include "json_object.h"
#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/base/log.h"
#include "spipe/base/units.h"

namespace spipe::model {
namespace {

constexpr std::array kFamilies = {Family::gpt2, Family::opt, Family::llama, Family::qwen2, Family::qwen3, Family::mistral};

Family family_of(JsonObject& object) {
  const std::string found = object.text("model_type", "");
  std::vector<std::string> names;
  for (const Family family : kFamilies) {
    names.push_back(family_name(family));
    if (names.back() == found) return family;
  }
  std::string known;
  for (const std::string& name : names) known += (known.empty() ? "" : ", ") + name;
  if (found.empty()) throw Error("'model_type' is missing", object.where(), "one of " + known);
  const std::string nearest = nearest_word(found, names);
  throw Error("model_type '" + found + "' is not supported", object.where(),
              nearest.empty() ? "supported are " + known : "did you mean '" + nearest + "'? Supported are " + known);
}

void refuse(const JsonObject& object, std::string_view key, std::string_view value, std::string_view meaning) {
  throw Error("'" + std::string(key) + "'" + (value.empty() ? "" : " " + std::string(value)) + " means " +
                  std::string(meaning) + ", which is not supported",
              object.where(), "train another model, or remove the key if it does not apply");
}

void refuse_unsupported(JsonObject& object) {
  for (const RefusedKey& refused : refused_keys()) {
    if (!object.has(refused.key)) continue;
    const bool neutral = !refused.neutral.empty() && object.at(refused.key) == nlohmann::json::parse(refused.neutral);
    const nlohmann::json& value = object.at(refused.key);
    if (!neutral) refuse(object, refused.key, value.is_structured() ? "" : value.dump(), refused.meaning);
  }
}

// Dropout rates are read by nobody: dropout is off unless our own config asks for it.
void announce_dropout(JsonObject& object) {
  std::string asked;
  for (const std::string_view key : dropout_keys()) {
    if (!object.has(key) || object.number(key, 0) == 0) continue;
    asked += (asked.empty() ? "" : ", ") + std::string(key) + " " + object.at(key).dump();
  }
  if (!asked.empty()) log_info(object.where() + ": dropout is off (the file has " + asked + ", kept for export only)");
}

std::string carry(JsonObject& object) {
  nlohmann::json carried = nlohmann::json::object();
  for (const std::string_view key : carried_keys()) {
    if (object.present(key)) carried[std::string(key)] = object.at(key);
  }
  return carried.empty() ? "" : carried.dump();
}

// Keys nobody asked for: a near miss of one that matters is a spelling mistake; others are named once.
void judge_unknown(const JsonObject& object) {
  constexpr int kNear = 2;
  constexpr std::size_t kLongEnough = 6;
  std::string unknown;
  for (const auto& item : object.value().items()) {
    const std::string& key = item.key();
    const auto ignored = ignored_keys();
    if (object.asked(key) || std::find(ignored.begin(), ignored.end(), key) != ignored.end()) continue;
    const std::string nearest = nearest_word(key, object.asked_keys());
    if (!nearest.empty() && key.size() >= kLongEnough && edit_distance(key, nearest) <= kNear) {
      throw Error("unknown key '" + key + "'", object.where(), "did you mean '" + nearest + "'?");
    }
    unknown += (unknown.empty() ? "'" : ", '") + key + "'";
  }
  if (!unknown.empty()) log_warning(object.where() + ": unknown keys are not used: " + unknown);
}

MlpKind plain_activation(JsonObject& object, std::string_view key, std::string_view otherwise) {
  const std::string name = object.text(key, otherwise);
  if (name == "gelu_new" || name == "gelu_pytorch_tanh" || name == "gelu_fast") return MlpKind::gelu_tanh;
  if (name == "gelu") return MlpKind::gelu_erf;
  if (name == "relu") return MlpKind::relu;
  throw Error("'" + std::string(key) + "' \"" + name + "\" is not supported", object.where(),
              "supported are gelu_new, gelu_pytorch_tanh, gelu_fast, gelu and relu");
}

// One "rope_scaling" or "rope_parameters" object.
Rope rope_section(JsonObject& object, std::string_view key, double theta) {
  JsonObject section(object.at(key), object.where() + ": " + std::string(key));
  Rope rope;
  rope.theta = section.number("rope_theta", theta);
  const std::string type = section.text("rope_type", section.text("type", "default"));
  if (section.text("type", type) != type) throw Error("'type' and 'rope_type' differ", section.where(), "keep one of them");
  if (type == "linear") {
    rope.scaling = RopeScaling::linear;
    rope.factor = section.required_number("factor");
  } else if (type == "llama3") {
    rope.scaling = RopeScaling::llama3;
    rope.factor = section.required_number("factor");
    rope.low_freq_factor = section.required_number("low_freq_factor");
    rope.high_freq_factor = section.required_number("high_freq_factor");
    rope.original_max_positions = section.required_integer("original_max_position_embeddings");
  } else if (type != "default") {
    throw Error("rope type '" + type + "' is not supported", section.where(), "supported are default, linear and llama3");
  }
  if (section.number("partial_rotary_factor", 1) != 1)
    refuse(section, "partial_rotary_factor", "", "rotary positions on a part of the head");
  if (section.number("factor", 1) != 1 && type == "default") refuse(section, "factor", "", "a scaling without a type");
  for (const auto& item : section.value().items()) {
    if (!section.asked(item.key()) && !item.value().is_null() && item.key() != "original_max_position_embeddings") {
      refuse(section, item.key(), "", "something this rope type does not have");
    }
  }
  return rope;
}

Rope rope_from(JsonObject& object) {
  Rope rope;
  rope.theta = object.number("rope_theta", rope.theta);
  const Rope plain = rope;
  const bool scaling = object.has("rope_scaling"), parameters = object.has("rope_parameters");
  if (scaling) rope = rope_section(object, "rope_scaling", plain.theta);
  if (parameters) {
    const Rope nested = rope_section(object, "rope_parameters", plain.theta);
    if (scaling && nested != rope)
      throw Error("'rope_scaling' and 'rope_parameters' differ", object.where(), "keep one of them");
    rope = nested;
  }
  if (object.has("rope_theta") && rope.theta != plain.theta) {
    throw Error("'rope_theta' is given twice with different values", object.where(), "keep one of them");
  }
  return rope;
}

std::int64_t given_window(JsonObject& object, std::int64_t otherwise) {
  const std::int64_t window = object.integer("sliding_window", otherwise);
  if (window < 1)
    throw Error("'sliding_window' " + std::to_string(window) + " is not allowed", object.where(), "at least 1, or null");
  return window;
}

// The one window of all layers, 0 for none; layers that differ are refused.
std::int64_t window_from(JsonObject& object, const Architecture& a) {
  std::int64_t window = 0, full_layers = 0;
  if (a.family == Family::mistral) {
    if (!object.present("sliding_window")) window = 4096;
    if (object.has("sliding_window")) window = given_window(object, 4096);
  } else if (a.family == Family::qwen2 || a.family == Family::qwen3) {
    static_cast<void>(object.present("sliding_window"));  // kept in configs that switch it off
    full_layers = object.integer("max_window_layers", 28);
    if (object.boolean("use_sliding_window", false)) window = given_window(object, 4096);
  }
  if (object.has("layer_types")) {
    const nlohmann::json& types = object.at("layer_types");
    if (!types.is_array() || types.size() != static_cast<std::size_t>(a.layers)) {
      throw Error("'layer_types' must list a type for each of the " + std::to_string(a.layers) + " layers", object.where());
    }
    full_layers = 0;
    for (const nlohmann::json& type : types) {
      if (type != "full_attention" && type != "sliding_attention")
        refuse(object, "layer_types", "", "layers other than full or sliding attention");
      full_layers += type == "full_attention" ? 1 : 0;
    }
    if (window == 0 && full_layers != a.layers) refuse(object, "layer_types", "", "sliding attention without a window");
  }
  if (window == 0 || full_layers >= a.layers) return 0;
  if (full_layers > 0) {
    throw Error("a window on " + std::to_string(a.layers - full_layers) + " of " + std::to_string(a.layers) +
                    " layers is not supported ('max_window_layers' or 'layer_types')",
                object.where(), "all layers must have the window, or none");
  }
  return window;
}

Architecture gpt2_from(JsonObject& object) {
  Architecture a;
  a.family = Family::gpt2;
  a.vocab_size = object.required_integer("vocab_size");
  a.hidden_size = object.required_integer("n_embd");
  a.layers = object.required_integer("n_layer");
  a.heads = a.kv_heads = object.required_integer("n_head");
  constexpr std::int64_t kMostHidden = INT64_MAX / 4;
  a.ffn_size = object.integer("n_inner", a.hidden_size < kMostHidden ? 4 * a.hidden_size : 0);
  a.max_positions = object.integer("n_positions", 1024);
  a.norm = NormKind::layernorm;
  a.mlp = plain_activation(object, "activation_function", "gelu_new");
  a.position = PositionKind::learned;
  a.norm_eps = object.number("layer_norm_epsilon", 1e-5);
  a.qkv_bias = a.out_bias = a.mlp_bias = a.fused_qkv = a.conv1d = true;
  a.tied_embeddings = object.boolean("tie_word_embeddings", true);
  a.init_std = object.number("initializer_range", 0.02);
  return a;
}

Architecture opt_from(JsonObject& object) {
  Architecture a;
  a.family = Family::opt;
  a.vocab_size = object.required_integer("vocab_size");
  a.hidden_size = object.required_integer("hidden_size");
  a.layers = object.required_integer("num_hidden_layers");
  a.heads = a.kv_heads = object.required_integer("num_attention_heads");
  a.ffn_size = object.required_integer("ffn_dim");
  a.max_positions = object.integer("max_position_embeddings", 2048);
  a.position_offset = 2;
  a.norm = NormKind::layernorm;
  a.mlp = plain_activation(object, "activation_function", "relu");
  a.position = PositionKind::learned;
  a.qkv_bias = a.out_bias = a.mlp_bias = object.boolean("enable_bias", true);
  a.tied_embeddings = object.boolean("tie_word_embeddings", true);
  a.init_std = object.number("init_std", 0.02);
  const std::int64_t projected = object.integer("word_embed_proj_dim", a.hidden_size);
  if (projected != a.hidden_size) {
    throw Error("'word_embed_proj_dim' " + std::to_string(projected) + " differs from 'hidden_size' " +
                    std::to_string(a.hidden_size) + " (OPT 350M), which is not supported",
                object.where(), "use another OPT size");
  }
  return a;
}

// The head count of keys and values. LLaMA's default is one per query head; the others have defaults that only fit one size.
std::int64_t kv_heads_from(JsonObject& object, const Architecture& a) {
  const bool may_lack = a.family == Family::llama || object.present("num_key_value_heads");
  return may_lack ? object.integer("num_key_value_heads", a.heads) : object.required_integer("num_key_value_heads");
}

Architecture llama_like_from(JsonObject& object, Family family) {
  Architecture a;
  a.family = family;
  a.vocab_size = object.required_integer("vocab_size");
  a.hidden_size = object.required_integer("hidden_size");
  a.layers = object.required_integer("num_hidden_layers");
  a.heads = object.required_integer("num_attention_heads");
  a.kv_heads = kv_heads_from(object, a);
  a.ffn_size = object.required_integer("intermediate_size");
  const bool is_llama = family == Family::llama, is_mistral = family == Family::mistral;
  a.max_positions = object.integer("max_position_embeddings", is_llama ? 2048 : is_mistral ? 131072 : 32768);
  a.norm_eps = object.number("rms_norm_eps", 1e-6);
  a.rope = rope_from(object);
  a.tied_embeddings = object.boolean("tie_word_embeddings", false);
  a.init_std = object.number("initializer_range", 0.02);
  const std::string activation = object.text("hidden_act", "silu");
  if (activation != "silu" && activation != "swish") {
    throw Error("'hidden_act' \"" + activation + "\" is not supported", object.where(), "this family's MLP needs silu");
  }
  const bool attention_bias = object.boolean("attention_bias", false), mlp_bias = object.boolean("mlp_bias", false);
  if (attention_bias && (family == Family::qwen2 || is_mistral))
    refuse(object, "attention_bias", "true", "biases this family does not have");
  if (mlp_bias && !is_llama) refuse(object, "mlp_bias", "true", "biases this family does not have");
  a.qkv_bias = attention_bias || family == Family::qwen2;
  a.out_bias = attention_bias;
  a.mlp_bias = mlp_bias;
  a.qk_norm = family == Family::qwen3;
  a.sliding_window = window_from(object, a);
  return a;
}

// The head size: as given, else hidden / heads; 0 (which check_architecture refuses) when that leaves a rest.
std::int64_t head_dim_from(JsonObject& object, const Architecture& a) {
  const bool fixed = a.family == Family::gpt2 || a.family == Family::opt;
  if (!fixed && object.has("head_dim")) {
    const std::int64_t given = object.required_integer("head_dim");
    if (given < 1)
      throw Error("'head_dim' " + std::to_string(given) + " is not allowed", object.where(), "at least 1, or null");
    return given;
  }
  return a.heads > 0 && a.hidden_size % a.heads == 0 ? a.hidden_size / a.heads : 0;
}

}  // namespace

Architecture architecture_from_hf_text(const std::string& json, const std::string& where) {
  JsonObject object = JsonObject::parse(json, where);
  const Family family = family_of(object);
  refuse_unsupported(object);
  Architecture a = family == Family::gpt2  ? gpt2_from(object)
                   : family == Family::opt ? opt_from(object)
                                           : llama_like_from(object, family);
  a.head_dim = head_dim_from(object, a);
  a.carried_keys = carry(object);
  judge_unknown(object);
  check_architecture(a, where);
  announce_dropout(object);
  return a;
}

Architecture architecture_from_hf(const std::filesystem::path& config_json) {
  return architecture_from_hf_text(read_text(config_json), config_json.string());
}

}  // namespace spipe::model
