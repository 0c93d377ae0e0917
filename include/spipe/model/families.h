// Hugging Face config.json <-> Architecture, and the tensor names and layouts of every family.
#pragma once

#include <filesystem>
#include <string>

#include "spipe/model/architecture.h"
#include "spipe/model/shape.h"

namespace spipe::model {

// Reads a Hugging Face config.json. Keys that change the math and are not supported (unknown rope types, quantization, MoE,
// ...) are refused by name; unknown keys that are known not to matter are ignored; missing ones take the family's defaults.
[[nodiscard]] Architecture architecture_from_hf(const std::filesystem::path& config_json);
[[nodiscard]] Architecture architecture_from_hf_text(const std::string& json, const std::string& where);
// Writes the config.json that Hugging Face (and architecture_from_hf) reads back to the same architecture.
// `dtype` is the stored weights' type ("float32", "bfloat16").
[[nodiscard]] std::string hf_config_text(const Architecture& architecture, const std::string& dtype);

// The store units with parameter names and shapes in Hugging Face layout (linear [out, in]; GPT-2 Conv1D [in, out]); offsets
// filled.
[[nodiscard]] std::vector<StoreUnit> store_units_of(const Architecture& architecture);

// The name under which a file's tensor `name` is known to us: GPT-2 with or without "transformer." prefix, OPT with or without
// "model." ...; empty when the tensor is a buffer to ignore quietly (GPT-2 attn.bias masks, rotary inv_freq).
[[nodiscard]] std::string canonical_tensor_name(const Architecture& architecture, const std::string& name);

}  // namespace spipe::model
