// Scalars of a config, read by the type their key asks for (not by YAML's guess): 1e-5 is a number, 010, 1_000, 12:30, nan and
// yes are not anything. Each function throws Error with the value's place, key and the way to write it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "yaml_tree.h"

namespace spipe::config {

// A value on its way into a Config: the node, the dotted key it is for, and where it stands ("run.yaml:12", "--set").
struct Value {
  const Node& node;
  const std::string& key;
  std::string place;
};

// Bounds of a number; text() is what the schema prints (">= 1", "0..1", "> 0").
struct Range {
  double low = 0;
  bool low_open = false;  // > low rather than >= low
  std::optional<double> high{};
  bool high_open = false;
  [[nodiscard]] bool holds(double value) const;
  [[nodiscard]] std::string text() const;
};

[[nodiscard]] const std::string& read_scalar(const Value& value, std::string_view type);
[[nodiscard]] std::int64_t read_integer(const Value& value, const Range& range);
[[nodiscard]] std::uint64_t read_seed(const Value& value);
[[nodiscard]] double read_number(const Value& value, const Range& range);
[[nodiscard]] double read_power_of_two(const Value& value, const Range& range);
[[nodiscard]] bool read_boolean(const Value& value);
[[nodiscard]] std::uint64_t read_bytes(const Value& value);
[[nodiscard]] bool is_auto(const Value& value);

// Whether `text` is a decimal integer / number as we accept them.
[[nodiscard]] bool is_integer_text(std::string_view text);
[[nodiscard]] bool is_number_text(std::string_view text);
// The number, or nothing when it is none or outside double's range.
[[nodiscard]] std::optional<double> parse_number(std::string_view text);

// Shortest text that reads back to the same double.
[[nodiscard]] std::string number_text(double value);

}  // namespace spipe::config
