// Hugging Face configs for tests: real models' and tiny ones.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>

#include "spipe/model/architecture.h"

namespace spipe::test {

// A tiny config of a family ("gpt2", "opt", "llama", "qwen2", "qwen3", "mistral"): hidden 32, 2 layers, 4 heads, 2 kv heads
// where the family has them, vocab 97, 16 positions. `changes` set keys to JSON values; an empty value removes the key.
using Changes = std::initializer_list<std::pair<const char*, const char*>>;
[[nodiscard]] std::string tiny_config(const std::string& family, Changes changes = {});
[[nodiscard]] model::Architecture tiny_architecture(const std::string& family, Changes changes = {});
// The message of the Error that reading the config throws; empty when it is accepted.
[[nodiscard]] std::string refusal(const std::string& config);

}  // namespace spipe::test
