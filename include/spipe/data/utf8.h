// Text that arrives in pieces cut anywhere, as whole characters.
#pragma once

#include <string>
#include <string_view>

namespace spipe::data {

// Holds back the beginning of a character until its other bytes are there. What is no UTF-8 becomes U+FFFD, one for each
// longest run of bytes that could begin a character (Unicode 15, section 3.9, "maximal subparts"): the output is always
// well-formed.
class Utf8Stream {
 public:
  // The characters that `bytes` completes.
  [[nodiscard]] std::string feed(std::string_view bytes);
  // The end: U+FFFD for a character that was never completed, or nothing.
  [[nodiscard]] std::string finish();

 private:
  std::string held_;                   // bytes of the character under way
  int missing_ = 0;                    // bytes that it still lacks
  unsigned low_ = 0x80, high_ = 0xBF;  // what its next byte may be
};

// Well-formed text with what would steer a terminal (control characters but newline and tab) shown as pictures of them
// (U+2400...).
[[nodiscard]] std::string without_controls(std::string_view text);

}  // namespace spipe::data
