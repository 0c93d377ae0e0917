// The schema: one table of keys. Parsing, defaults, --dry-run, "did you mean" and docs/config.md are all read from it.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "scalars.h"
#include "spipe/config/config.h"

namespace spipe::config {

struct Key {
  KeyInfo info;
  std::vector<std::string> other_names;              // what other engines call it, for "did you mean"
  std::function<void(Config&, const Value&)> read;   // throws Error
  std::function<std::string(const Config&)> write;   // YAML text of the value; "" when there is nothing to print
  [[nodiscard]] std::string_view section() const;    // "optimizer.schedule"
  [[nodiscard]] std::string_view last_name() const;  // "type"
};

// In the order of printing.
[[nodiscard]] const std::vector<Key>& keys();
[[nodiscard]] const Key* find_key(std::string_view path);
// Whether `path` is a map of keys ("optimizer", "optimizer.schedule").
[[nodiscard]] bool is_section(std::string_view path);
// The names directly below a section ("" for the top level), in schema order.
[[nodiscard]] std::vector<std::string> names_in(std::string_view section);

// "did you mean 'optimizer.lr'?" for the unknown key `path`, or the list of the names that may stand there.
[[nodiscard]] std::string suggestion_for(std::string_view path);

// Text as a YAML scalar, quoted where plain text would be read as something else.
[[nodiscard]] std::string yaml_scalar(const std::string& text);

// The rules between keys. `place` gives where a key was set ("run.yaml:12"), or the file's name for a default.
void check_rules(const Config& config, const std::function<std::string(std::string_view)>& place);

}  // namespace spipe::config
