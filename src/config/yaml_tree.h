// A YAML document as a plain tree with line numbers. Stricter than YAML: one document, no duplicate keys, no anchors, aliases,
// tags or tabs; so that nothing in a config is silently dropped or overwritten.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace spipe::config {

struct Entry;

struct Node {
  enum class Kind : std::uint8_t { null, scalar, list, map };
  Kind kind = Kind::null;
  int line = 0;         // from 1
  std::string text;     // scalar
  bool quoted = false;  // scalar in quotes or a text block: never a number, boolean or null
  std::vector<Node> items;
  std::vector<Entry> entries;  // in file order
};

struct Entry {
  std::string key;
  int line = 0;
  Node value;
};

// "a list", "a map", "text 'x'", "nothing (null)": for messages.
[[nodiscard]] std::string describe(const Node& node);

// "run.yaml:12"; a command-line option ("--set") has no lines.
[[nodiscard]] std::string place_of(const std::string& name, int line);

// Parses `text`; throws Error with "name:line" for everything refused. An empty document is refused.
[[nodiscard]] Node parse_yaml(const std::string& text, const std::string& name);

}  // namespace spipe::config
