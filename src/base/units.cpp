#include "spipe/base/units.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <vector>

#include "spipe/base/error.h"

namespace spipe {
namespace {

struct ByteUnit {
  std::string_view name;
  std::uint64_t bytes;
};

constexpr std::array kByteUnits = {
    ByteUnit{"B", 1},
    ByteUnit{"KiB", std::uint64_t{1} << 10},
    ByteUnit{"MiB", std::uint64_t{1} << 20},
    ByteUnit{"GiB", std::uint64_t{1} << 30},
    ByteUnit{"TiB", std::uint64_t{1} << 40},
    ByteUnit{"kB", 1000},
    ByteUnit{"MB", 1000'000},
    ByteUnit{"GB", 1000'000'000},
    ByteUnit{"TB", 1000'000'000'000},
};

[[noreturn]] void refuse_bytes(std::string_view text, const std::string& why) {
  throw Error("'" + std::string(text) + "' is not a size" + why, {},
              "write a number with KiB, MiB, GiB, TiB (1024) or kB, MB, GB, TB (1000), as in '8 GiB'");
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Three significant digits for a value below 1000 (four digits above).
std::string three_digits(double value) {
  if (value < 9.995) return fmt::format("{:.2f}", value);
  if (value < 99.95) return fmt::format("{:.1f}", value);
  return fmt::format("{:.0f}", value);
}

}  // namespace

std::uint64_t parse_bytes(std::string_view text) {
  std::size_t digits = 0;
  while (digits < text.size() && is_digit(text[digits])) ++digits;
  std::size_t end = digits;
  if (end < text.size() && text[end] == '.') {
    do {
      ++end;
    } while (end < text.size() && is_digit(text[end]));
    if (end == digits + 1) refuse_bytes(text, "");
  }
  if (digits == 0) refuse_bytes(text, "");
  if (digits > 1 && text[0] == '0') refuse_bytes(text, " (leading zero)");
  std::string_view name = text.substr(end);
  if (name.starts_with(' ')) name.remove_prefix(1);
  std::uint64_t unit = 1;
  if (!name.empty() || end != text.size()) {
    const auto found = std::ranges::find(kByteUnits, name, &ByteUnit::name);
    if (found == kByteUnits.end()) refuse_bytes(text, "");
    unit = found->bytes;
  }
  const std::string_view number = text.substr(0, end);
  if (end == digits) {
    std::uint64_t value = 0;
    std::uint64_t bytes = 0;
    const auto result = std::from_chars(number.data(), number.data() + number.size(), value);
    if (result.ec != std::errc{} || __builtin_mul_overflow(value, unit, &bytes)) refuse_bytes(text, " below 2^64 bytes");
    return bytes;
  }
  if (unit == 1) refuse_bytes(text, " in whole bytes");
  double value = 0;
  const auto result = std::from_chars(number.data(), number.data() + number.size(), value, std::chars_format::fixed);
  const double bytes = value * static_cast<double>(unit);
  if (result.ec != std::errc{} || !(bytes < 0x1p64)) refuse_bytes(text, " below 2^64 bytes");
  return static_cast<std::uint64_t>(bytes);
}

std::string format_bytes(std::uint64_t bytes) {
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes);
  std::string_view unit;
  for (const std::string_view name : {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"}) {
    value /= 1024;
    unit = name;
    if (value < 1023.5) break;
  }
  return three_digits(value) + " " + std::string(unit);
}

std::string format_count(double value) {
  if (!std::isfinite(value)) return fmt::format("{}", value);
  if (value < 0) return "-" + format_count(-value);
  if (value < 999.5) return value == std::floor(value) ? fmt::format("{:.0f}", value) : three_digits(value);
  std::string_view unit;
  for (const std::string_view name : {"k", "M", "G", "T", "P", "E"}) {
    value /= 1000;
    unit = name;
    if (value < 999.5) break;
  }
  return three_digits(value) + " " + std::string(unit);
}

std::string format_duration(double seconds) {
  if (!(seconds >= 0) || seconds > 1e15) return fmt::format("{} s", seconds);
  if (seconds > 0 && seconds < 0.0995) return three_digits(seconds * 1e3) + " ms";
  if (seconds < 59.95) return three_digits(seconds) + " s";
  const auto whole = static_cast<std::int64_t>(std::llround(seconds));
  if (whole < 3600) return fmt::format("{} m {:02} s", whole / 60, whole % 60);
  const std::int64_t minutes = (whole + 30) / 60;
  if (minutes < 24 * 60) return fmt::format("{} h {:02} m", minutes / 60, minutes % 60);
  const std::int64_t hours = (minutes + 30) / 60;
  return fmt::format("{} d {:02} h", hours / 24, hours % 24);
}

int edit_distance(std::string_view a, std::string_view b) {
  std::vector<int> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<int>(j);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    int diagonal = row[0];
    row[0] = static_cast<int>(i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const int replace = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replace, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

}  // namespace spipe
