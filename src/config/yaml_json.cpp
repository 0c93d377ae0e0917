#include "spipe/config/yaml_json.h"

#include <array>
#include <charconv>
#include <nlohmann/json.hpp>

#include "scalars.h"
#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "yaml_tree.h"

namespace spipe::config {
namespace {

using Json = nlohmann::ordered_json;

std::string lower(std::string text) {
  for (char& c : text) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return text;
}

// Plain text that YAML 1.1 readers take for a number or boolean and others for text.
bool is_ambiguous(const std::string& text) {
  const std::string word = lower(text);
  for (const std::string_view trap :
       {"yes", "no", "on", "off", "y", "n", ".inf", "-.inf", "+.inf", ".nan", "inf", "-inf", "nan"}) {
    if (word == trap) return true;
  }
  if (word == "true" || word == "false") return true;  // in other letters than these
  const std::string_view digits = std::string_view(text).substr(text.starts_with('-') || text.starts_with('+') ? 1 : 0);
  if (digits.empty() || digits[0] < '0' || digits[0] > '9') return false;
  return digits.find_first_not_of("0123456789_:.,xXoObBeE+-abcdefABCDEF") == std::string_view::npos;
}

Json scalar(const Node& node, const std::string& name) {
  const std::string& text = node.text;
  if (node.quoted) return text;
  if (text == "true") return true;
  if (text == "false") return false;
  if (is_integer_text(text)) {
    std::int64_t number = 0;
    if (std::from_chars(text.data(), text.data() + text.size(), number).ec == std::errc{}) return number;
  } else if (const auto number = parse_number(text)) {
    return *number;
  } else if (!is_ambiguous(text)) {
    return text;
  }
  throw Error("'" + text + "' can be read in more than one way", place_of(name, node.line),
              "write true or false, a plain decimal number, or quote it if it is text");
}

Json convert(const Node& node, const std::string& name) {
  switch (node.kind) {
    case Node::Kind::null:
      return nullptr;
    case Node::Kind::scalar:
      return scalar(node, name);
    case Node::Kind::list: {
      Json list = Json::array();
      for (const Node& item : node.items) list.push_back(convert(item, name));
      return list;
    }
    case Node::Kind::map:
      break;
  }
  Json map = Json::object();
  for (const Entry& entry : node.entries) map[entry.key] = convert(entry.value, name);
  return map;
}

}  // namespace

std::string yaml_to_json_text(const std::filesystem::path& path) {
  const std::string name = path.string();
  const Node root = parse_yaml(read_text(path), name);
  if (root.kind != Node::Kind::map) throw Error("must be a map of keys, not " + describe(root), place_of(name, root.line));
  // Invalid UTF-8 becomes U+FFFD, so that a broken name is refused as an unknown one rather than by an exception of dump().
  return convert(root, name).dump(2, ' ', false, Json::error_handler_t::replace);
}

}  // namespace spipe::config
