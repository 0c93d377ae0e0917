#include "scalars.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>

#include "spipe/base/error.h"
#include "spipe/base/units.h"

namespace spipe::config {
namespace {

std::size_t skip_digits(std::string_view text, std::size_t at) {
  while (at < text.size() && text[at] >= '0' && text[at] <= '9') ++at;
  return at;
}

[[noreturn]] void refuse(const Value& value, const std::string& wanted, std::string hint = {}) {
  throw Error("'" + value.key + "' must be " + wanted + ", not " + describe(value.node), value.place, std::move(hint));
}

[[noreturn]] void refuse_range(const Value& value, const Range& range) {
  throw Error("'" + value.key + "' must be " + range.text() + ", not " + value.node.text, value.place);
}

}  // namespace

bool Range::holds(double value) const {
  if (low_open ? value <= low : value < low) return false;
  return !high || (high_open ? value < *high : value <= *high);
}

std::string Range::text() const {
  const std::string from = (low_open ? "> " : ">= ") + number_text(low);
  if (!high) return from;
  if (!low_open && !high_open) return number_text(low) + ".." + number_text(*high);
  return from + " and " + (high_open ? "< " : "<= ") + number_text(*high);
}

bool is_integer_text(std::string_view text) {
  if (text.starts_with('-')) text.remove_prefix(1);
  if (text.empty() || skip_digits(text, 0) != text.size()) return false;
  return text.size() == 1 || text[0] != '0';
}

bool is_number_text(std::string_view text) {
  if (text.starts_with('-')) text.remove_prefix(1);
  const std::size_t whole = skip_digits(text, 0);
  if (whole > 1 && text[0] == '0') return false;
  std::size_t at = whole;
  std::size_t digits = whole;
  if (at < text.size() && text[at] == '.') {
    const std::size_t end = skip_digits(text, at + 1);
    digits += end - at - 1;
    at = end;
  }
  if (digits == 0) return false;
  if (at < text.size() && (text[at] == 'e' || text[at] == 'E')) {
    ++at;
    if (at < text.size() && (text[at] == '+' || text[at] == '-')) ++at;
    const std::size_t end = skip_digits(text, at);
    if (end == at) return false;
    at = end;
  }
  return at == text.size();
}

std::optional<double> parse_number(std::string_view text) {
  if (!is_number_text(text)) return std::nullopt;
  double number = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), number);
  if (result.ec != std::errc{}) return std::nullopt;
  return number;
}

std::string number_text(double value) { return fmt::format("{}", value); }

const std::string& read_scalar(const Value& value, std::string_view type) {
  if (value.node.kind == Node::Kind::null) {
    throw Error("'" + value.key + "' has no value (null)", value.place, "give it one or remove the key");
  }
  if (value.node.kind != Node::Kind::scalar) refuse(value, std::string(type));
  return value.node.text;
}

std::int64_t read_integer(const Value& value, const Range& range) {
  const std::string& text = read_scalar(value, "an integer");
  if (!is_integer_text(text)) refuse(value, "an integer", "write it in plain decimal digits, as in 1000");
  std::int64_t number = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), number);
  if (result.ec != std::errc{} || !range.holds(static_cast<double>(number))) refuse_range(value, range);
  return number;
}

std::uint64_t read_seed(const Value& value) {
  const std::string& text = read_scalar(value, "an integer");
  if (!is_integer_text(text)) refuse(value, "an integer", "write it in plain decimal digits, as in 1000");
  std::uint64_t number = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), number);
  if (result.ec != std::errc{}) throw Error("'" + value.key + "' must be 0..2^64-1, not " + text, value.place);
  return number;
}

double read_number(const Value& value, const Range& range) {
  const std::string& text = read_scalar(value, "a number");
  const auto number = parse_number(text);
  if (!number) refuse(value, "a number", "write it in decimal, as in 0.1 or 1e-5");
  if (!range.holds(*number)) refuse_range(value, range);
  return *number;
}

double read_power_of_two(const Value& value, const Range& range) {
  const double number = read_number(value, range);
  int exponent = 0;
  if (std::frexp(number, &exponent) == 0.5) return number;
  throw Error("'" + value.key + "' must be a power of two, not " + value.node.text, value.place,
              "the nearest below is " + number_text(std::ldexp(0.5, exponent)));
}

bool read_boolean(const Value& value) {
  const std::string& text = read_scalar(value, "true or false");
  if (text == "true") return true;
  if (text == "false") return false;
  refuse(value, "true or false");
}

std::uint64_t read_bytes(const Value& value) {
  const std::string& text = read_scalar(value, "a size");
  try {
    const std::uint64_t bytes = parse_bytes(text);
    if (bytes == 0) throw Error("'" + value.key + "' must be at least one byte, not " + text, value.place);
    return bytes;
  } catch (const Error& error) {
    if (!error.where().empty()) throw;
    throw Error("'" + value.key + "': " + error.finding(), value.place, error.hint());
  }
}

bool is_auto(const Value& value) { return value.node.kind == Node::Kind::scalar && value.node.text == "auto"; }

}  // namespace spipe::config
