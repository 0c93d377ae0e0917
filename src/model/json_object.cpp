#include "json_object.h"

#include <cmath>

#include "spipe/base/error.h"

namespace spipe::model {
namespace {

// Copying and printing JSON values recurse, so nesting is bounded before anything is parsed.
void check_depth(const std::string& text, const std::string& where) {
  constexpr int kDeepest = 64;
  int depth = 0;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted && c == '\\') ++i;
    if (c == '"') quoted = !quoted;
    if (quoted) continue;
    if (c == '[' || c == '{') ++depth;
    if (c == ']' || c == '}') --depth;
    if (depth > kDeepest) throw Error("JSON nested deeper than " + std::to_string(kDeepest) + " levels", where);
  }
}

}  // namespace

JsonObject::JsonObject(nlohmann::json value, std::string where) : value_(std::move(value)), where_(std::move(where)) {
  if (!value_.is_object()) throw Error("not a JSON object", where_, "a config.json holds {\"key\": value, ...}");
}

JsonObject JsonObject::parse(const std::string& text, const std::string& where) {
  check_depth(text, where);
  try {
    return {nlohmann::json::parse(text), where};
  } catch (const nlohmann::json::parse_error& error) {
    std::size_t line = 1;
    for (std::size_t i = 0; i < text.size() && i + 1 < error.byte; ++i) line += text[i] == '\n' ? 1 : 0;
    throw Error("not valid JSON", where + ":" + std::to_string(line),
                "the parser stopped at byte " + std::to_string(error.byte));
  }
}

bool JsonObject::present(std::string_view key) {
  asked_.emplace(key);
  return value_.contains(key);
}

bool JsonObject::has(std::string_view key) { return present(key) && !value_.find(key)->is_null(); }

const nlohmann::json& JsonObject::at(std::string_view key) {
  if (!present(key)) missing(key);
  return *value_.find(key);
}

std::int64_t JsonObject::required_integer(std::string_view key) {
  if (!has(key)) missing(key);
  const nlohmann::json& found = at(key);
  if (found.is_number_unsigned() && found.get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX))
    wrong_type(key, "an integer below 2^63");
  if (!found.is_number_integer()) wrong_type(key, "an integer");
  return found.get<std::int64_t>();
}

std::int64_t JsonObject::integer(std::string_view key, std::int64_t otherwise) {
  return has(key) ? required_integer(key) : otherwise;
}

double JsonObject::required_number(std::string_view key) {
  if (!has(key)) missing(key);
  const nlohmann::json& found = at(key);
  if (!found.is_number() || !std::isfinite(found.get<double>())) wrong_type(key, "a finite number");
  return found.get<double>();
}

double JsonObject::number(std::string_view key, double otherwise) { return has(key) ? required_number(key) : otherwise; }

bool JsonObject::boolean(std::string_view key, bool otherwise) {
  if (!has(key)) return otherwise;
  if (!at(key).is_boolean()) wrong_type(key, "true or false");
  return at(key).get<bool>();
}

std::string JsonObject::text(std::string_view key, std::string_view otherwise) {
  if (!has(key)) return std::string(otherwise);
  if (!at(key).is_string()) wrong_type(key, "text");
  return at(key).get<std::string>();
}

void JsonObject::wrong_type(std::string_view key, const char* wanted) {
  constexpr std::size_t kShown = 60;
  const nlohmann::json& value = *value_.find(key);
  std::string found = !value.is_structured() ? value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace)
                      : value.is_array()     ? "a list"
                                             : "an object";
  if (found.size() > kShown) found = found.substr(0, kShown) + "...";
  throw Error("'" + std::string(key) + "' is " + found, where_, std::string("it must be ") + wanted);
}

void JsonObject::missing(std::string_view key) {
  throw Error("'" + std::string(key) + "' is missing", where_, "add the key; it has no default that could be right");
}

}  // namespace spipe::model
