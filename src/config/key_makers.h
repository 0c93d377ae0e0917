// How keys of the schema are made: one maker for each type of value.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "schema.h"
#include "spipe/base/error.h"

// A member of Config, readable from a const one and writable in another.
#define SPIPE_FIELD(name) \
  [](auto& config) -> auto& { return config.name; }

namespace spipe::config {

inline constexpr double kIntMax = 2147483647;  // sizes whose products must stay in 63 bits

inline Range at_least(double low) { return {.low = low, .high = {}}; }
inline Range above(double low) { return {.low = low, .low_open = true, .high = {}}; }
inline Range between(double low, double high) { return {.low = low, .high = high}; }
inline Range from_to_below(double low, double high) { return {.low = low, .high = high, .high_open = true}; }

inline std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " | ") + word;
  return text;
}

// Exact, in the largest unit that divides.
inline std::string bytes_text(std::uint64_t bytes) {
  for (const auto& [shift, unit] : {std::pair{40, " TiB"}, {30, " GiB"}, {20, " MiB"}, {10, " KiB"}}) {
    if (bytes % (std::uint64_t{1} << shift) == 0) return std::to_string(bytes >> shift) + unit;
  }
  return std::to_string(bytes);
}

inline std::string path_text(const std::filesystem::path& path) { return path.empty() ? "" : yaml_scalar(path.string()); }

inline Key key(std::string path, std::string type, std::string allowed, std::string help) {
  Key made;
  made.info = {.path = std::move(path),
               .type = std::move(type),
               .default_value = {},
               .allowed = std::move(allowed),
               .help = std::move(help)};
  return made;
}

template <class Field>
Key integer(std::string path, Field field, Range range, std::string help) {
  Key made = key(std::move(path), "integer", range.text(), std::move(help));
  made.read = [field, range](Config& config, const Value& value) { field(config) = read_integer(value, range); };
  made.write = [field](const Config& config) { return std::to_string(field(config)); };
  return made;
}

template <class Field>
Key seed(std::string path, Field field, std::string help) {
  Key made = key(std::move(path), "integer", "0..2^64-1", std::move(help));
  made.read = [field](Config& config, const Value& value) { field(config) = read_seed(value); };
  made.write = [field](const Config& config) { return std::to_string(field(config)); };
  return made;
}

template <class Field>
Key auto_integer(std::string path, Field field, Range range, std::string help) {
  Key made = key(std::move(path), "integer or auto", range.text(), std::move(help));
  made.read = [field, range](Config& config, const Value& value) {
    field(config).reset();
    if (!is_auto(value)) field(config) = read_integer(value, range);
  };
  made.write = [field](const Config& config) { return field(config) ? std::to_string(*field(config)) : std::string("auto"); };
  return made;
}

template <class Field>
Key auto_bytes(std::string path, Field field, std::string help) {
  Key made = key(std::move(path), "bytes or auto", "as in 8 GiB, 512 MiB, 1.5 GB", std::move(help));
  made.read = [field](Config& config, const Value& value) {
    field(config).reset();
    if (!is_auto(value)) field(config) = read_bytes(value);
  };
  made.write = [field](const Config& config) { return field(config) ? bytes_text(*field(config)) : std::string("auto"); };
  return made;
}

template <class Field>
Key number(std::string path, Field field, Range range, std::string help) {
  Key made = key(std::move(path), "number", range.text(), std::move(help));
  made.read = [field, range](Config& config, const Value& value) { field(config) = read_number(value, range); };
  made.write = [field](const Config& config) { return number_text(field(config)); };
  return made;
}

// A number that is a power of two within the range.
template <class Field>
Key power_of_two(std::string path, Field field, Range range, std::string help) {
  Key made = key(std::move(path), "number", "a power of two " + range.text(), std::move(help));
  made.read = [field, range](Config& config, const Value& value) { field(config) = read_power_of_two(value, range); };
  made.write = [field](const Config& config) { return number_text(field(config)); };
  return made;
}

template <class Field>
Key boolean(std::string path, Field field, std::string help) {
  Key made = key(std::move(path), "true | false", "", std::move(help));
  made.read = [field](Config& config, const Value& value) { field(config) = read_boolean(value); };
  made.write = [field](const Config& config) { return std::string(field(config) ? "true" : "false"); };
  return made;
}

template <class Field>
Key path_key(std::string path, Field field, std::string help) {
  Key made = key(std::move(path), "path", "", std::move(help));
  made.read = [field](Config& config, const Value& value) {
    const std::string& text = read_scalar(value, "a path");
    if (text.empty()) throw Error("'" + value.key + "' is empty", value.place, "give a path or remove the key");
    field(config) = text;
  };
  made.write = [field](const Config& config) { return path_text(field(config)); };
  return made;
}

template <class Field>
Key paths(std::string path, Field field, bool may_be_empty, std::string help) {
  Key made = key(std::move(path), "list of paths", "paths or patterns with * and ?", std::move(help));
  made.read = [field, may_be_empty](Config& config, const Value& value) {
    std::vector<std::string> found;
    const auto add = [&](const Node& node) {
      const std::string& text = read_scalar({node, value.key, value.place}, "a list of paths");
      if (text.empty()) throw Error("'" + value.key + "' holds an empty path", value.place);
      found.push_back(text);
    };
    if (value.node.kind == Node::Kind::list) {
      for (const Node& node : value.node.items) add(node);
    } else {
      add(value.node);  // one path needs no brackets
    }
    if (found.empty() && !may_be_empty)
      throw Error("'" + value.key + "' is an empty list", value.place, "name at least one file");
    field(config) = std::move(found);
  };
  made.write = [field](const Config& config) {
    std::string text;
    for (const std::string& item : field(config)) text += (text.empty() ? "" : ", ") + yaml_scalar(item);
    return "[" + text + "]";
  };
  return made;
}

// A list of any texts; one needs no brackets.
template <class Field>
Key texts(std::string path, Field field, std::string help) {
  Key made = key(std::move(path), "list of texts", "", std::move(help));
  made.read = [field](Config& config, const Value& value) {
    std::vector<std::string> found;
    if (value.node.kind == Node::Kind::list) {
      for (const Node& node : value.node.items) found.push_back(read_scalar({node, value.key, value.place}, "a list of texts"));
    } else {
      found.push_back(read_scalar(value, "a list of texts"));
    }
    field(config) = std::move(found);
  };
  made.write = [field](const Config& config) {
    std::string text;
    for (const std::string& item : field(config)) text += (text.empty() ? "" : ", ") + yaml_scalar(item);
    return "[" + text + "]";
  };
  return made;
}

// A value of an enumeration, or of a text, by name.
template <class T>
struct Choice {
  std::string name;
  T value;
};
// Names that a later version will know, and what to use today.
struct Planned {
  std::vector<std::string> names;
  std::string instead;
};

[[noreturn]] inline void refuse_planned(const Value& value, const std::string& instead) {
  throw Error("'" + value.key + ": " + value.node.text + "' is not built yet in this version", value.place, instead);
}

template <class T, class Field>
Key choice(std::string path, Field field, std::vector<Choice<T>> choices, Planned planned, std::string help) {
  std::vector<std::string> names;
  for (const auto& one : choices) names.push_back(one.name);
  Key made = key(std::move(path), "text", joined(names), std::move(help));
  made.read = [field, choices, planned, allowed = joined(names)](Config& config, const Value& value) {
    const std::string& text = read_scalar(value, "one of " + allowed);
    for (const auto& one : choices) {
      if (one.name != text) continue;
      field(config) = one.value;
      return;
    }
    if (std::ranges::find(planned.names, text) != planned.names.end()) refuse_planned(value, planned.instead);
    throw Error("'" + value.key + "' must be one of " + allowed + ", not '" + text + "'", value.place);
  };
  made.write = [field, choices](const Config& config) {
    for (const auto& one : choices) {
      if (one.value == field(config)) return one.name;
    }
    SPIPE_CHECK(false, "a config value without a name");
  };
  return made;
}

template <class Field>
Key text_choice(std::string path, Field field, const std::vector<std::string>& names, Planned planned, std::string help) {
  std::vector<Choice<std::string>> choices;
  for (const std::string& name : names) choices.push_back({name, name});
  return choice(std::move(path), field, std::move(choices), std::move(planned), std::move(help));
}

template <class Field>
Key switch_key(std::string path, Field field, std::string help) {
  return choice<Switch>(std::move(path), field, {{"auto", Switch::automatic}, {"true", Switch::on}, {"false", Switch::off}}, {},
                        std::move(help));
}

template <class First, class Second>
Key two_numbers(std::string path, First first, Second second, Range range, std::string help) {
  Key made = key(std::move(path), "two numbers", "each " + range.text(), std::move(help));
  made.read = [first, second, range](Config& config, const Value& value) {
    if (value.node.kind != Node::Kind::list || value.node.items.size() != 2) {
      throw Error("'" + value.key + "' must be a list of two numbers, not " + describe(value.node), value.place,
                  "write it as [0.9, 0.95]");
    }
    first(config) = read_number({value.node.items[0], value.key, value.place}, range);
    second(config) = read_number({value.node.items[1], value.key, value.place}, range);
  };
  made.write = [first, second](const Config& config) {
    return "[" + number_text(first(config)) + ", " + number_text(second(config)) + "]";
  };
  return made;
}

// A key whose value has no home yet: `accepted` is what may be written today ("" for nothing).
inline Key planned_key(std::string path, const std::string& accepted, std::string instead, std::string help) {
  Key made = key(std::move(path), "not built yet", accepted, std::move(help));
  made.read = [accepted, instead = std::move(instead)](Config&, const Value& value) {
    if (value.node.kind == Node::Kind::scalar && !accepted.empty()) {
      if (value.node.text == accepted) return;
      refuse_planned(value, instead);
    }
    throw Error("'" + value.key + "' is not built yet in this version", value.place, instead);
  };
  made.write = [](const Config&) { return std::string(); };
  return made;
}

inline Key named_also(Key made, std::vector<std::string> other_names) {
  made.other_names = std::move(other_names);
  return made;
}

}  // namespace spipe::config
