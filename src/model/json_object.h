// A JSON object read key by key with checked types; remembers which keys were asked for, so that the rest can be judged.
// Include only in .cpp files of this room (nlohmann is heavy).
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>

namespace spipe::model {

class JsonObject {
 public:
  JsonObject(nlohmann::json value, std::string where);  // throws Error when it is not an object
  static JsonObject parse(const std::string& text, const std::string& where);

  [[nodiscard]] const std::string& where() const { return where_; }
  [[nodiscard]] const nlohmann::json& value() const { return value_; }
  [[nodiscard]] bool asked(const std::string& key) const { return asked_.contains(key); }
  [[nodiscard]] const std::set<std::string>& asked_keys() const { return asked_; }

  // Whether the key is there with a value other than null.
  [[nodiscard]] bool has(std::string_view key);
  // Whether the key is there, null or not.
  [[nodiscard]] bool present(std::string_view key);
  [[nodiscard]] const nlohmann::json& at(std::string_view key);
  // The value, or `otherwise` when absent or null; a value of another type throws Error naming the key and what was found.
  [[nodiscard]] std::int64_t integer(std::string_view key, std::int64_t otherwise);
  [[nodiscard]] std::int64_t required_integer(std::string_view key);
  [[nodiscard]] double number(std::string_view key, double otherwise);
  [[nodiscard]] double required_number(std::string_view key);
  [[nodiscard]] bool boolean(std::string_view key, bool otherwise);
  [[nodiscard]] std::string text(std::string_view key, std::string_view otherwise);

 private:
  [[noreturn]] void wrong_type(std::string_view key, const char* wanted);
  [[noreturn]] void missing(std::string_view key);

  nlohmann::json value_;
  std::string where_;
  std::set<std::string> asked_;
};

}  // namespace spipe::model
