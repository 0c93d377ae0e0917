#include "group_key.h"

#include <algorithm>

#include "key_makers.h"
#include "spipe/base/units.h"

namespace spipe::config {
namespace {

const std::vector<std::string> kNames = {"pattern", "weight_decay", "lr_scale", "frozen"};

ParameterGroupConfig read_group(const Node& node, const std::string& name, const std::string& place) {
  if (node.kind != Node::Kind::map) {
    throw Error("'" + name + "' must be a map, not " + describe(node), place,
                "write it as {pattern: \"*.bias\", weight_decay: 0}");
  }
  ParameterGroupConfig group;
  for (const Entry& entry : node.entries) {
    const std::string key = name + "." + entry.key;
    const Value value{entry.value, key, place};
    if (entry.key == "pattern") {
      group.pattern = read_scalar(value, "a pattern");
    } else if (entry.key == "weight_decay") {
      group.weight_decay = read_number(value, at_least(0));
    } else if (entry.key == "lr_scale") {
      group.lr_scale = read_number(value, above(0));
    } else if (entry.key == "frozen") {
      group.frozen = read_boolean(value);
    } else {
      const std::string near = nearest_word(entry.key, kNames);
      throw Error("unknown key '" + key + "'", place,
                  near.empty() ? "a group has pattern, weight_decay, lr_scale and frozen" : "did you mean '" + near + "'?");
    }
  }
  if (group.pattern.empty()) throw Error("'" + name + "' has no pattern", place, "name tensors, as in pattern: \"*.bias\"");
  if (group.frozen && (group.weight_decay || group.lr_scale != 1)) {
    throw Error("'" + name + "' is frozen, so it has no weight_decay or lr_scale", place, "remove them, or frozen");
  }
  return group;
}

std::string text_of(const ParameterGroupConfig& group) {
  std::string text = "{pattern: " + yaml_scalar(group.pattern);
  if (group.weight_decay) text += ", weight_decay: " + number_text(*group.weight_decay);
  if (group.lr_scale != 1) text += ", lr_scale: " + number_text(group.lr_scale);
  if (group.frozen) text += ", frozen: true";
  return text + "}";
}

}  // namespace

Key groups_key() {
  Key made =
      key("optimizer.groups", "list of maps", "each {pattern, weight_decay, lr_scale, frozen}",
          "Tensors whose update has settings of their own, picked by patterns of their Hugging Face names (* and ?); the "
          "first group that matches wins.");
  made.read = [](Config& config, const Value& value) {
    if (value.node.kind != Node::Kind::list) {
      throw Error("'" + value.key + "' must be a list of maps, not " + describe(value.node), value.place,
                  "write it as [{pattern: \"*.bias\", weight_decay: 0}]");
    }
    std::vector<ParameterGroupConfig> groups;
    for (std::size_t i = 0; i < value.node.items.size(); ++i) {
      groups.push_back(read_group(value.node.items[i], value.key + "[" + std::to_string(i) + "]", value.place));
    }
    config.optimizer.groups = std::move(groups);
  };
  made.write = [](const Config& config) {
    std::string text;
    for (const ParameterGroupConfig& group : config.optimizer.groups) text += (text.empty() ? "" : ", ") + text_of(group);
    return "[" + text + "]";
  };
  return named_also(std::move(made), {"param_groups", "parameter_groups", "no_decay"});
}

}  // namespace spipe::config
