#include "spipe/data/utf8.h"

namespace spipe::data {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// How many more bytes a first byte asks for, and the range of the second one (Unicode 15, table 3-7); -1: no first byte.
int continuation(unsigned byte, unsigned& low, unsigned& high) {
  low = 0x80;
  high = 0xBF;
  if (byte < 0x80) return 0;
  if (byte >= 0xC2 && byte <= 0xDF) return 1;
  if (byte >= 0xE0 && byte <= 0xEF) {
    if (byte == 0xE0) low = 0xA0;
    if (byte == 0xED) high = 0x9F;
    return 2;
  }
  if (byte >= 0xF0 && byte <= 0xF4) {
    if (byte == 0xF0) low = 0x90;
    if (byte == 0xF4) high = 0x8F;
    return 3;
  }
  return -1;
}

}  // namespace

std::string Utf8Stream::feed(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    if (missing_ > 0 && byte >= low_ && byte <= high_) {
      held_.push_back(c);
      low_ = 0x80;
      high_ = 0xBF;
      if (--missing_ == 0) {
        out += held_;
        held_.clear();
      }
      continue;
    }
    out += finish();  // this byte does not go on with the character under way: it begins another one
    const int more = continuation(byte, low_, high_);
    if (more < 0) {
      out += kReplacement;
    } else if (more == 0) {
      out.push_back(c);
    } else {
      held_.assign(1, c);
      missing_ = more;
    }
  }
  return out;
}

std::string Utf8Stream::finish() {
  if (missing_ == 0) return {};
  held_.clear();
  missing_ = 0;
  return std::string(kReplacement);
}

std::string without_controls(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const bool second_set =
        byte == 0xC2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) < 0xA0;  // U+0080..9F
    if (second_set) {
      out += kReplacement;
      ++i;
    } else if ((byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7F) {
      out += "\xE2\x90";
      out.push_back(static_cast<char>(byte == 0x7F ? 0xA1 : 0x80 + byte));
    } else {
      out.push_back(text[i]);
    }
  }
  return out;
}

}  // namespace spipe::data
