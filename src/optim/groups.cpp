#include "spipe/optim/groups.h"

#include <fmt/format.h>

#include <algorithm>

#include "spipe/base/error.h"
#include "spipe/base/units.h"

namespace spipe::optim {
namespace {

// A name with * for its numbers: what somebody who means all layers may have wanted to write.
std::string without_numbers(const std::string& name) {
  std::string text;
  for (const char c : name) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit) {
      text += c;
    } else if (!text.ends_with('*')) {
      text += '*';
    }
  }
  return text;
}

std::vector<std::string> names_of(const model::ModelShape& shape) {
  std::vector<std::string> names;
  for (const model::StoreUnit& unit : shape.store_units) {
    for (const model::Parameter& parameter : unit.parameters) names.push_back(parameter.name);
  }
  return names;
}

std::string hint_for(const std::string& pattern, const std::vector<std::string>& names) {
  std::vector<std::string> words;
  for (const std::string& name : names) {
    if (const std::string all = without_numbers(name); all != name && std::ranges::find(words, all) == words.end()) {
      words.push_back(all);
    }
  }
  words.insert(words.end(), names.begin(), names.end());
  if (const std::string near = nearest_word(pattern, words); !near.empty()) return fmt::format("did you mean '{}'?", near);
  return fmt::format("names are like '{}' and '{}'; * stands for any characters", names.front(), words.front());
}

}  // namespace

bool name_matches(std::string_view pattern, std::string_view name) {
  // Greedy with one way back: the last * takes one character more whenever what follows it does not match.
  std::size_t p = 0, n = 0, star = std::string_view::npos, taken = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      taken = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p;
      ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++taken;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

void assign_groups(model::ModelShape& shape, std::span<const ParameterGroup> groups, const std::string& where) {
  if (groups.empty()) return;
  const std::vector<std::string> names = names_of(shape);
  std::vector<bool> used(groups.size(), false);
  bool trains = false;
  for (model::StoreUnit& unit : shape.store_units) {
    for (model::Parameter& parameter : unit.parameters) {
      const auto found = std::ranges::find_if(
          groups, [&](const ParameterGroup& group) { return name_matches(group.pattern, parameter.name); });
      parameter.group = found == groups.end() ? -1 : static_cast<int>(found - groups.begin());
      if (parameter.group >= 0) used[static_cast<std::size_t>(parameter.group)] = true;
      trains = trains || !is_frozen(parameter, groups);
    }
  }
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (used[i]) continue;
    const std::string& pattern = groups[i].pattern;
    const bool late = std::ranges::any_of(names, [&](const std::string& name) { return name_matches(pattern, name); });
    throw Error(fmt::format("optimizer.groups[{}]: pattern '{}' {}", i, pattern,
                            late ? "only matches parameters of earlier groups" : "matches no parameter"),
                where, late ? "the first group that matches wins: put it before them" : hint_for(pattern, names));
  }
  if (!trains) throw Error("optimizer.groups freezes every parameter", where, "leave some to train");
}

ParameterRule rule_of(const model::Parameter& parameter, std::span<const ParameterGroup> groups, double weight_decay) {
  ParameterRule rule{parameter.decay ? weight_decay : 0, 1, false};
  if (parameter.group < 0) return rule;
  const ParameterGroup& group = groups[static_cast<std::size_t>(parameter.group)];
  if (group.weight_decay) rule.weight_decay = *group.weight_decay;
  rule.lr_scale = group.lr_scale;
  rule.frozen = group.frozen;
  return rule;
}

bool has_frozen(const model::StoreUnit& unit, std::span<const ParameterGroup> groups) {
  return std::ranges::any_of(unit.parameters,
                             [groups](const model::Parameter& parameter) { return is_frozen(parameter, groups); });
}

std::string settings_text(const ParameterGroup& group) {
  if (group.frozen) return "frozen";
  std::string text;
  if (group.weight_decay) text = fmt::format("weight decay {}", *group.weight_decay);
  if (group.lr_scale != 1) text += fmt::format("{}lr x {}", text.empty() ? "" : ", ", group.lr_scale);
  return text.empty() ? "as the rest" : text;
}

}  // namespace spipe::optim
