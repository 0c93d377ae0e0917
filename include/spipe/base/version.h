#pragma once

#include <string_view>

namespace spipe {

[[nodiscard]] std::string_view version();     // "0.1.0"
[[nodiscard]] std::string_view git_commit();  // short hash at configure time, "+dirty" when the tree was, or "unknown"
[[nodiscard]] std::string_view build_text();  // compiler, build type, oneDNN version

}  // namespace spipe
