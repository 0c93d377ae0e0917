#include <algorithm>

#include "schema.h"
#include "spipe/base/units.h"

namespace spipe::config {
namespace {

std::string in_quotes(std::string_view path) { return "'" + std::string(path) + "'"; }

std::string joined_path(std::string_view section, std::string_view name) {
  return section.empty() ? std::string(name) : std::string(section) + "." + std::string(name);
}

// Every way to name a key: its last name, or another engine's name for it.
struct Name {
  std::string name, path;
};

std::vector<Name> all_names() {
  std::vector<Name> names;
  for (const Key& key : keys()) {
    names.push_back({std::string(key.last_name()), key.info.path});
    for (const std::string& other : key.other_names) names.push_back({other, key.info.path});
    const std::string_view section = key.section();
    const std::string_view last = section.substr(section.rfind('.') + 1);
    if (std::ranges::none_of(names, [&](const Name& one) { return one.path == section; })) {
      names.push_back({std::string(last), std::string(section)});
    }
  }
  return names;
}

constexpr std::size_t kMostSuggestions = 4;

}  // namespace

std::string suggestion_for(std::string_view path) {
  const std::size_t dot = path.rfind('.');
  const std::string_view section = dot == std::string_view::npos ? std::string_view() : path.substr(0, dot);
  const std::string_view name = path.substr(dot == std::string_view::npos ? 0 : dot + 1);
  const std::vector<Name> names = all_names();

  // The right name at the wrong level.
  std::vector<std::string> exact;
  for (const Name& one : names) {
    if (one.name == name) exact.push_back(one.path);
  }
  if (exact.size() == 1) return "did you mean " + in_quotes(exact.front()) + "?";
  if (!exact.empty() && exact.size() <= kMostSuggestions) {
    std::string text = "did you mean one of";
    for (std::size_t i = 0; i < exact.size(); ++i) text += (i == 0 ? " " : ", ") + in_quotes(exact[i]);
    return text + "?";
  }
  // A misspelt name, here or elsewhere.
  const std::vector<std::string> siblings = names_in(section);
  const std::string sibling = nearest_word(name, siblings);
  if (!sibling.empty()) return "did you mean " + in_quotes(joined_path(section, sibling)) + "?";
  std::vector<std::string> words;
  for (const Name& one : names) words.push_back(one.name);
  const std::string elsewhere = nearest_word(name, words);
  if (!elsewhere.empty() && edit_distance(name, elsewhere) <= static_cast<int>(name.size()) / 3) {
    return "did you mean " + in_quotes(std::ranges::find(names, elsewhere, &Name::name)->path) + "?";
  }
  std::string text = siblings.empty() ? "the top-level keys are" : "the keys here are";
  const std::vector<std::string> known = siblings.empty() ? names_in("") : siblings;
  for (std::size_t i = 0; i < known.size(); ++i) text += (i == 0 ? " " : ", ") + known[i];
  return text;
}

}  // namespace spipe::config
