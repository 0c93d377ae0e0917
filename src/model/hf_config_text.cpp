// Architecture -> the config.json Hugging Face reads.
#include <nlohmann/json.hpp>

#include "spipe/base/error.h"
#include "spipe/model/families.h"

namespace spipe::model {
namespace {

using Json = nlohmann::ordered_json;

const char* class_name(Family family) {
  switch (family) {
    case Family::gpt2:
      return "GPT2LMHeadModel";
    case Family::opt:
      return "OPTForCausalLM";
    case Family::llama:
      return "LlamaForCausalLM";
    case Family::qwen2:
      return "Qwen2ForCausalLM";
    case Family::qwen3:
      return "Qwen3ForCausalLM";
    case Family::mistral:
      return "MistralForCausalLM";
  }
  SPIPE_CHECK(false, "unknown family");
}

const char* activation_name(const Architecture& a) {
  switch (a.mlp) {
    case MlpKind::gelu_tanh:
      return a.family == Family::gpt2 ? "gelu_new" : "gelu_pytorch_tanh";
    case MlpKind::gelu_erf:
      return "gelu";
    case MlpKind::relu:
      return "relu";
    case MlpKind::swiglu:
      return "silu";
  }
  SPIPE_CHECK(false, "unknown activation");
}

Json rope_scaling(const Rope& rope) {
  if (rope.scaling == RopeScaling::none) return nullptr;
  if (rope.scaling == RopeScaling::linear) return {{"rope_type", "linear"}, {"factor", rope.factor}};
  return {{"rope_type", "llama3"},
          {"factor", rope.factor},
          {"low_freq_factor", rope.low_freq_factor},
          {"high_freq_factor", rope.high_freq_factor},
          {"original_max_position_embeddings", rope.original_max_positions}};
}

void write_gpt2(Json& json, const Architecture& a) {
  json["activation_function"] = activation_name(a);
  json["n_embd"] = a.hidden_size;
  json["n_layer"] = a.layers;
  json["n_head"] = a.heads;
  json["n_inner"] = a.ffn_size;
  json["n_positions"] = a.max_positions;
  json["n_ctx"] = a.max_positions;
  json["layer_norm_epsilon"] = a.norm_eps;
  json["initializer_range"] = a.init_std;
}

void write_opt(Json& json, const Architecture& a) {
  json["activation_function"] = activation_name(a);
  json["hidden_size"] = a.hidden_size;
  json["word_embed_proj_dim"] = a.hidden_size;
  json["num_hidden_layers"] = a.layers;
  json["num_attention_heads"] = a.heads;
  json["ffn_dim"] = a.ffn_size;
  json["max_position_embeddings"] = a.max_positions;
  json["do_layer_norm_before"] = true;
  json["_remove_final_layer_norm"] = false;
  json["layer_norm_elementwise_affine"] = true;
  json["enable_bias"] = a.mlp_bias;
  json["init_std"] = a.init_std;
}

void write_llama_like(Json& json, const Architecture& a) {
  json["hidden_act"] = activation_name(a);
  json["hidden_size"] = a.hidden_size;
  json["num_hidden_layers"] = a.layers;
  json["num_attention_heads"] = a.heads;
  json["num_key_value_heads"] = a.kv_heads;
  json["head_dim"] = a.head_dim;
  json["intermediate_size"] = a.ffn_size;
  json["max_position_embeddings"] = a.max_positions;
  json["rms_norm_eps"] = a.norm_eps;
  json["rope_theta"] = a.rope.theta;
  json["rope_scaling"] = rope_scaling(a.rope);
  json["initializer_range"] = a.init_std;
  if (a.family == Family::llama || a.family == Family::qwen3) json["attention_bias"] = a.out_bias;
  if (a.family == Family::llama) json["mlp_bias"] = a.mlp_bias;
  if (a.family == Family::llama) return;
  json["sliding_window"] = a.sliding_window > 0 ? Json(a.sliding_window) : Json(nullptr);
  if (a.family == Family::mistral) return;
  json["use_sliding_window"] = a.sliding_window > 0;
  json["max_window_layers"] = a.sliding_window > 0 ? 0 : a.layers;
}

}  // namespace

std::string hf_config_text(const Architecture& a, const std::string& dtype) {
  Json json;
  json["architectures"] = {class_name(a.family)};
  json["model_type"] = family_name(a.family);
  json["vocab_size"] = a.vocab_size;
  json["tie_word_embeddings"] = a.tied_embeddings;
  json["torch_dtype"] = dtype;
  if (a.family == Family::gpt2) {
    write_gpt2(json, a);
  } else if (a.family == Family::opt) {
    write_opt(json, a);
  } else {
    write_llama_like(json, a);
  }
  if (!a.carried_keys.empty()) json.update(Json::parse(a.carried_keys));
  return json.dump(2) + "\n";
}

}  // namespace spipe::model
