// Which keys of a Hugging Face config.json mean what: tables, so that the mapping in families.cpp has no special cases for
// them.
#pragma once

#include <span>
#include <string_view>

namespace spipe::model {

// A key whose value changes the math in a way the engine does not compute, unless it is absent, null or `neutral`.
struct RefusedKey {
  std::string_view key;
  std::string_view neutral;  // JSON text of the value that changes nothing; empty: only null
  std::string_view meaning;
};
[[nodiscard]] std::span<const RefusedKey> refused_keys();

// Keys that decide nothing here, but that other programs read: kept as they are and written back on export.
[[nodiscard]] std::span<const std::string_view> carried_keys();
// Dropout rates among the carried keys (announced when they are not zero).
[[nodiscard]] std::span<const std::string_view> dropout_keys();
// Keys known not to matter for training and not worth keeping.
[[nodiscard]] std::span<const std::string_view> ignored_keys();

}  // namespace spipe::model
