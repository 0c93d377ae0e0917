#include "configs.h"

#include <nlohmann/json.hpp>

#include "spipe/base/error.h"
#include "spipe/model/families.h"

namespace spipe::test {
namespace {

constexpr const char* kGpt2 =
    R"({"model_type": "gpt2", "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 64,
  "n_positions": 16})";
constexpr const char* kOpt = R"({"model_type": "opt", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2,
  "num_attention_heads": 4, "ffn_dim": 64, "max_position_embeddings": 16})";
constexpr const char* kLlama = R"({"model_type": "llama", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2,
  "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 16})";

}  // namespace

std::string tiny_config(const std::string& family, Changes changes) {
  auto json = nlohmann::json::parse(family == "gpt2" ? kGpt2 : family == "opt" ? kOpt : kLlama);
  json["model_type"] = family;
  for (const auto& [key, value] : changes) {
    if (*value == '\0') {
      json.erase(key);
    } else {
      json[key] = nlohmann::json::parse(value);
    }
  }
  return json.dump();
}

model::Architecture tiny_architecture(const std::string& family, Changes changes) {
  return model::architecture_from_hf_text(tiny_config(family, changes), "config.json");
}

std::string refusal(const std::string& config) {
  try {
    static_cast<void>(model::architecture_from_hf_text(config, "config.json"));
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace spipe::test
