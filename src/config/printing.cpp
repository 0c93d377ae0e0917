// The resolved config and the documentation table, both written from the schema.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "schema.h"
#include "spipe/base/error.h"

namespace spipe::config {
namespace {

std::string_view origin_text(Origin origin) {
  switch (origin) {
    case Origin::defaulted:
      return "default";
    case Origin::file:
      return "file";
    case Origin::command_line:
      return "command line";
    case Origin::planner:
      return "planner";
  }
  SPIPE_CHECK(false, "unknown origin");
}

constexpr int kCommentColumn = 48;

bool is_plain(const std::string& text) {
  constexpr std::string_view kFirst = "_./";
  constexpr std::string_view kLater = "_./*@%+=~-";
  const auto letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9'); };
  if (text.empty() || (!letter(text[0]) && kFirst.find(text[0]) == std::string_view::npos)) return false;
  if (!std::ranges::all_of(text, [&](char c) { return letter(c) || kLater.find(c) != std::string_view::npos; })) return false;
  return text != "null" && text != "Null" && text != "NULL";
}

std::string markdown_cell(std::string text) {
  for (std::size_t at = 0; (at = text.find('|', at)) != std::string::npos; at += 2) text.insert(at, 1, '\\');
  return text;
}

}  // namespace

std::string yaml_scalar(const std::string& text) {
  if (is_plain(text)) return text;
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      quoted += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

std::string resolved_text(const Config& config) {
  std::string text;
  std::set<std::string> printed;  // sections that have their header
  for (const Key& key : keys()) {
    const std::string value = key.write(config);
    if (value.empty()) continue;
    std::string indent;
    for (std::size_t dot = key.info.path.find('.'); dot != std::string::npos; dot = key.info.path.find('.', dot + 1)) {
      const std::string section = key.info.path.substr(0, dot);
      if (printed.insert(section).second) text += indent + section.substr(section.rfind('.') + 1) + ":\n";
      indent += "  ";
    }
    const auto origin = config.origins.find(key.info.path);
    text += fmt::format("{:<{}} # {}\n", indent + std::string(key.last_name()) + ": " + value, kCommentColumn,
                        origin_text(origin == config.origins.end() ? Origin::defaulted : origin->second));
  }
  return text;
}

std::string schema_markdown() {
  std::string text = "| key | type | default | allowed | meaning |\n|---|---|---|---|---|\n";
  for (const KeyInfo& info : schema()) {
    const std::string value = info.default_value.empty() ? "" : "`" + info.default_value + "`";
    text += fmt::format("| `{}` | {} | {} | {} | {} |\n", info.path, markdown_cell(info.type), markdown_cell(value),
                        markdown_cell(info.allowed), markdown_cell(info.help));
  }
  return text;
}

}  // namespace spipe::config
