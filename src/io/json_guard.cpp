#include "json_guard.h"

#include <set>
#include <vector>

namespace spipe::io {

std::string quote_name(std::string_view name) {
  constexpr std::size_t kLimit = 100;
  std::string text = "'";
  for (const char c : name.substr(0, kLimit)) {
    text += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  }
  text += name.size() > kLimit ? "...'" : "'";
  return text;
}

bool StrictSax::parse_error(std::size_t position, const std::string& /*last_token*/, const nlohmann::json::exception& error) {
  // Only the reason: the library repeats the text it read, which may be long and not printable.
  const std::string text = error.what();
  const bool utf8 = text.find("UTF-8") != std::string::npos;
  const bool end = text.find("unexpected end of input") != std::string::npos;
  refuse(std::string("not valid JSON at byte ") + std::to_string(position) +
         (utf8  ? " (invalid UTF-8)"
          : end ? " (ends too early)"
                : ""));
}

namespace {

// Accepts any document within the depth limit and without duplicate keys.
class GuardSax final : public StrictSax {
 public:
  using StrictSax::StrictSax;
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(std::int64_t) override { return true; }
  bool number_unsigned(std::uint64_t) override { return true; }
  bool number_float(double, const std::string&) override { return true; }
  bool string(std::string&) override { return true; }
  bool start_object(std::size_t) override { return enter(); }
  bool start_array(std::size_t) override { return enter(); }
  bool end_object() override { return leave(); }
  bool end_array() override { return leave(); }
  bool key(std::string& name) override {
    if (!keys_.back().insert(name).second) refuse("key " + quote_name(name) + " appears twice");
    return true;
  }

 private:
  bool enter() {
    if (keys_.size() >= kMaxJsonDepth) refuse("JSON nested deeper than " + std::to_string(kMaxJsonDepth) + " levels");
    keys_.emplace_back();
    return true;
  }
  bool leave() {
    keys_.pop_back();
    return true;
  }
  std::vector<std::set<std::string>> keys_;
};

}  // namespace

nlohmann::json parse_json(std::string_view text, const std::string& where) {
  GuardSax guard(where);
  nlohmann::json::sax_parse(text.begin(), text.end(), &guard);
  return nlohmann::json::parse(text.begin(), text.end());
}

}  // namespace spipe::io
