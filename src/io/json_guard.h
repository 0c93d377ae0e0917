// Reading JSON that came from a file: depth-limited, duplicates refused, one-line errors. Internal to io/.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "spipe/base/error.h"

namespace spipe::io {

// A name out of a file, quoted for a one-line message: control characters replaced, cut at 100 bytes.
[[nodiscard]] std::string quote_name(std::string_view name);

// Nesting allowed anywhere; every format read here needs four levels at most.
inline constexpr int kMaxJsonDepth = 32;

// A SAX handler that refuses everything; a reader derives from it and overrides what its format allows. Every refusal throws
// Error(finding, where).
class StrictSax {
 public:
  explicit StrictSax(std::string where) : where_(std::move(where)) {}
  virtual ~StrictSax() = default;
  virtual bool null() { return unexpected("null"); }
  virtual bool boolean(bool) { return unexpected("true or false"); }
  virtual bool number_integer(std::int64_t value) { return unexpected("negative number " + std::to_string(value)); }
  virtual bool number_unsigned(std::uint64_t value) { return unexpected("number " + std::to_string(value)); }
  virtual bool number_float(double, const std::string& text) { return unexpected("number " + quote_name(text)); }
  virtual bool string(std::string& value) { return unexpected("text " + quote_name(value)); }
  virtual bool binary(nlohmann::json::binary_t&) { return unexpected("binary value"); }
  virtual bool start_object(std::size_t) { return unexpected("'{'"); }
  virtual bool key(std::string& name) { return unexpected("key " + quote_name(name)); }
  virtual bool end_object() { return true; }
  virtual bool start_array(std::size_t) { return unexpected("'['"); }
  virtual bool end_array() { return true; }
  bool parse_error(std::size_t position, const std::string& last_token, const nlohmann::json::exception& error);

 protected:
  [[noreturn]] void refuse(const std::string& finding) const { throw Error(finding, where_); }
  // What the parser is inside of, for messages ("tensor 'w': shape").
  [[nodiscard]] virtual std::string context() const { return "JSON"; }
  [[noreturn]] bool unexpected(const std::string& found) const { refuse(context() + ": unexpected " + found); }

 private:
  std::string where_;
};

// The whole document as a DOM, after a pass that checks depth and duplicate keys.
[[nodiscard]] nlohmann::json parse_json(std::string_view text, const std::string& where);

}  // namespace spipe::io
