// Which tokens end a text, as a model's folder says.
#pragma once

#include <cstdint>
#include <vector>

#include "spipe/base/file.h"

namespace spipe::io {

// eos_token_id of config.json and generation_config.json (a number, a list of numbers, null or absent): ascending, each once.
// Error when it is something else or negative.
[[nodiscard]] std::vector<std::int32_t> end_ids_of(const Path& folder);

}  // namespace spipe::io
