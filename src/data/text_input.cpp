#include "text_input.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "spipe/base/error.h"

namespace spipe::data {

LineReader::LineReader(const Path& path, std::size_t buffer_bytes) : path_(path), buffer_(buffer_bytes, '\0') {
  SPIPE_CHECK(buffer_bytes > 0, "line buffer");
  fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd_ < 0) throw Error(std::string("cannot open: ") + std::strerror(errno), path.string());
}

LineReader::~LineReader() { close(fd_); }

std::string LineReader::where() const { return path_.string() + ":" + std::to_string(line_); }

bool LineReader::fill() {
  ssize_t got = 0;
  do {
    got = read(fd_, buffer_.data(), buffer_.size());
  } while (got < 0 && errno == EINTR);
  if (got < 0) throw Error(std::string("cannot read: ") + std::strerror(errno), path_.string());
  begin_ = 0;
  end_ = static_cast<std::size_t>(got);
  return got > 0;
}

bool LineReader::next(std::string& line, bool& ended) {
  line.clear();
  ended = false;
  bool any = false;
  while (!ended && (begin_ < end_ || fill())) {
    any = true;
    const char* from = buffer_.data() + begin_;
    const auto* newline = static_cast<const char*>(std::memchr(from, '\n', end_ - begin_));
    ended = newline != nullptr;
    const std::size_t count = ended ? static_cast<std::size_t>(newline - from) : end_ - begin_;
    line.append(from, count);
    begin_ += count + (ended ? 1 : 0);
    if (line.size() > kMaxDocumentBytes) {
      ++line_;
      throw Error("line longer than 1 GiB", where(), "split it");
    }
  }
  if (!any) return false;
  if (++line_ == 1 && line.starts_with("\xEF\xBB\xBF")) line.erase(0, 3);
  if (ended && line.ends_with('\r')) line.pop_back();
  return true;
}

std::size_t invalid_utf8(std::string_view text) {
  const auto byte = [&](std::size_t i) -> unsigned { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0; };
  const auto tail = [&](std::size_t i) { return (byte(i) & 0xC0U) == 0x80U; };
  std::size_t i = 0;
  while (i < text.size()) {
    const unsigned lead = byte(i);
    std::size_t length = 0;
    if (lead < 0x80) {
      length = 1;
    } else if (lead >= 0xC2 && lead <= 0xDF) {
      length = tail(i + 1) ? 2 : 0;
    } else if (lead >= 0xE0 && lead <= 0xEF) {
      const bool second = byte(i + 1) >= (lead == 0xE0 ? 0xA0U : 0x80U) && byte(i + 1) <= (lead == 0xED ? 0x9FU : 0xBFU);
      length = second && tail(i + 2) ? 3 : 0;
    } else if (lead >= 0xF0 && lead <= 0xF4) {
      const bool second = byte(i + 1) >= (lead == 0xF0 ? 0x90U : 0x80U) && byte(i + 1) <= (lead == 0xF4 ? 0x8FU : 0xBFU);
      length = second && tail(i + 2) && tail(i + 3) ? 4 : 0;
    }
    if (length == 0) return i;
    i += length;
  }
  return std::string_view::npos;
}

namespace {

// The value of the four hexadecimal digits of a \u escape at `i`, or -1 when there is none.
int escape_at(std::string_view json, std::size_t i) {
  if (i + 6 > json.size() || json[i] != '\\' || json[i + 1] != 'u') return -1;
  int value = 0;
  for (std::size_t k = i + 2; k < i + 6; ++k) {
    const char c = json[k];
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
    if (digit < 0) return -1;
    value = value * 16 + digit;
  }
  return value;
}
bool is_high(int value) { return value >= 0xD800 && value <= 0xDBFF; }
bool is_low(int value) { return value >= 0xDC00 && value <= 0xDFFF; }

}  // namespace

std::uint64_t replace_lone_surrogates(std::string& json) {
  std::uint64_t replaced = 0;
  for (std::size_t i = json.find('\\'); i != std::string::npos && i < json.size(); i = json.find('\\', i)) {
    const int value = escape_at(json, i);
    if (value < 0) {
      i += 2;  // another escape: its second character may be a backslash itself
    } else if (is_high(value) && is_low(escape_at(json, i + 6))) {
      i += 12;
    } else {
      if (is_high(value) || is_low(value)) {
        json.replace(i + 2, 4, "fffd");
        ++replaced;
      }
      i += 6;
    }
  }
  return replaced;
}

namespace {

// Picks one text out of an object; the rest only has to be well formed.
class FieldSax {
 public:
  FieldSax(const std::string& field, const std::string& where) : field_(field), where_(where) {}
  std::optional<std::string> text;

  bool null() { return other("null"); }
  bool boolean(bool) { return other("true or false"); }
  bool number_integer(std::int64_t) { return other("a number"); }
  bool number_unsigned(std::uint64_t) { return other("a number"); }
  bool number_float(double, const std::string&) { return other("a number"); }
  bool binary(nlohmann::json::binary_t&) { return other("binary"); }
  bool string(std::string& value) {
    if (depth_ == 0) refuse("not an object");
    if (std::exchange(wanted_, false)) text = std::move(value);
    return true;
  }
  bool start_object(std::size_t) {
    if (depth_ > 0) other("an object");
    return enter();
  }
  bool start_array(std::size_t) {
    other("a list");
    return enter();
  }
  bool key(std::string& name) {
    wanted_ = depth_ == 1 && name == field_;
    if (wanted_ && text) refuse("two fields '" + field_ + "'");
    return true;
  }
  bool end_object() { return leave(); }
  bool end_array() { return leave(); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception& error) {
    const bool utf8 = std::string_view(error.what()).find("UTF-8") != std::string_view::npos;
    throw Error((utf8 ? "invalid UTF-8 at byte " : "broken JSON at byte ") + std::to_string(position) + " of the line", where_,
                utf8 ? "convert the file to UTF-8" : "each line must be one JSON object");
  }

 private:
  [[noreturn]] void refuse(const std::string& finding) const {
    throw Error(finding, where_, "each line must be an object like {\"" + field_ + "\": \"...\"}");
  }
  bool other(const char* kind) {
    if (depth_ == 0) refuse("not an object");
    if (wanted_) refuse("field '" + field_ + "' is " + kind + ", expected text");
    return true;
  }
  bool enter() {
    constexpr int kMaxDepth = 128;
    if (++depth_ > kMaxDepth) refuse("nested deeper than 128 levels");
    return true;
  }
  bool leave() {
    --depth_;
    return true;
  }
  const std::string& field_;
  const std::string& where_;
  int depth_ = 0;
  bool wanted_ = false;
};

bool is_blank(std::string_view line) { return line.find_first_not_of(" \t\r") == std::string_view::npos; }

bool is_jsonl(const Path& path) {
  std::string extension = path.extension().string();
  std::transform(extension.begin(), extension.end(), extension.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
  return extension == ".jsonl";
}

}  // namespace

std::string json_field(std::string_view line, const std::string& field, const std::string& where) {
  FieldSax sax(field, where);
  nlohmann::json::sax_parse(line.begin(), line.end(), &sax);
  if (!sax.text) throw Error("no field '" + field + "'", where, "name the field that holds the text with --field");
  return std::move(*sax.text);
}

void read_documents(const Path& path, const DocumentFormat& format, DocumentCounts& counts,
                    const std::function<void(const std::string&)>& take, std::size_t buffer_bytes) {
  LineReader reader(path, buffer_bytes);
  std::string line, document;
  bool ended = false;
  if (is_jsonl(path)) {
    while (reader.next(line, ended)) {
      if (is_blank(line)) continue;
      counts.replaced_surrogates += replace_lone_surrogates(line);
      take(json_field(line, format.field, reader.where()));
    }
    return;
  }
  bool open = false;  // a document has begun and no separator has ended it
  while (reader.next(line, ended)) {
    if (!format.separator.empty() && line == format.separator) {
      take(document);
      document.clear();
      open = false;
      continue;
    }
    if (const std::size_t bad = invalid_utf8(line); bad != std::string::npos) {
      throw Error("invalid UTF-8 at byte " + std::to_string(bad + 1) + " of the line", reader.where(),
                  "convert the file to UTF-8");
    }
    document += line;
    if (ended) document += '\n';
    open = true;
    if (document.size() > kMaxDocumentBytes) {
      throw Error("document longer than 1 GiB", reader.where(), "split it with --separator, or into several files");
    }
  }
  if (open) take(document);
}

}  // namespace spipe::data
