// Text in pieces: whole characters come out, whatever the cuts.
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "spipe/data/utf8.h"

using spipe::data::Utf8Stream;
using spipe::data::without_controls;

namespace {

const std::string kBad = "\xEF\xBF\xBD";  // U+FFFD

std::string whole(const std::string& bytes) {
  Utf8Stream stream;
  std::string out = stream.feed(bytes);
  return out + stream.finish();
}

std::string byte_by_byte(const std::string& bytes, std::vector<std::string>* pieces = nullptr) {
  Utf8Stream stream;
  std::string out;
  for (const char c : bytes) {
    const std::string piece = stream.feed(std::string(1, c));
    if (pieces != nullptr) pieces->push_back(piece);
    out += piece;
  }
  return out + stream.finish();
}

}  // namespace

TEST_CASE("a character comes out when its last byte is there, never before") {
  std::vector<std::string> pieces;
  const std::string text = "a\u00e9\u20ac\U0001F600z";
  CHECK(byte_by_byte(text, &pieces) == text);
  const std::vector<std::string> wanted = {"a", "", "\u00e9", "", "", "\u20ac", "", "", "", "\U0001F600", "z"};
  CHECK(pieces == wanted);
}

TEST_CASE("cuts anywhere give the same text") {
  const std::string text = "\u4e2d\u6587 na\u00efve \U0001F469\u200d\U0001F680 \u0634\u0643\u0631\u0627 end";
  for (std::size_t cut = 0; cut <= text.size(); ++cut) {
    for (std::size_t second = cut; second <= text.size(); ++second) {
      Utf8Stream stream;
      std::string out = stream.feed(text.substr(0, cut));
      out += stream.feed(text.substr(cut, second - cut));
      out += stream.feed(text.substr(second));
      out += stream.finish();
      REQUIRE(out == text);
    }
  }
}

TEST_CASE("what is no UTF-8 becomes replacement characters, one for each run that could have begun a character") {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"\x80", kBad},                                   // no first byte
      {"\xC0\xAF", kBad + kBad},                        // overlong
      {"\xE0\x80\xAF", kBad + kBad + kBad},             // overlong
      {"\xED\xA0\x80", kBad + kBad + kBad},             // a surrogate
      {"\xF4\x90\x80\x80", kBad + kBad + kBad + kBad},  // above U+10FFFF
      {"\xFF\xFE", kBad + kBad},                        //
      {"\xE2\x82", kBad},                               // the end comes too early
      {"\xE2\x82x", kBad + "x"},                        // another character comes instead
      {"\xF0\x9F\x98\xE2\x82\xAC", kBad + "\u20ac"},    // cut off by the next one
      {"a\xC3\xC3\xA9"
       "b",
       "a" + kBad +
           "\u00e9"
           "b"},                                                                  //
      {"\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41", kBad + kBad + kBad + kBad + "A"},  // the standard's example
  };
  for (const auto& [bytes, text] : cases) {
    CHECK(whole(bytes) == text);
    CHECK(byte_by_byte(bytes) == text);
  }
}

TEST_CASE("a terminal gets pictures of control characters, and text as it is") {
  CHECK(without_controls("tab\tline\nend") == "tab\tline\nend");
  CHECK(without_controls("\x1b[31mred") == "\u241b[31mred");
  CHECK(without_controls(std::string("\0\x07\x7f\r", 4)) == "\u2400\u2407\u2421\u240d");
  CHECK(without_controls("\u009b31m") == "\ufffd31m");  // the one-character form of ESC [
  CHECK(without_controls("\u00a0\u00e9\u4e2d") == "\u00a0\u00e9\u4e2d");
}
