// Text as it comes in files: lines, byte order marks, UTF-8, JSON lines. Internal to data/.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "spipe/base/file.h"

namespace spipe::data {

// Lines of a file through a fixed buffer; a line is all that is ever held. `\n` ends a line, one `\r` just before it is
// dropped, a byte order mark at offset 0 of the file is dropped.
class LineReader {
 public:
  explicit LineReader(const Path& path, std::size_t buffer_bytes = 1 << 20);
  ~LineReader();
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;
  // The next line without its end; false at the end of the file. `ended` tells whether a `\n` was there.
  bool next(std::string& line, bool& ended);
  [[nodiscard]] std::uint64_t line_number() const { return line_; }  // of the line last returned, from 1
  [[nodiscard]] std::string where() const;                           // "corpus.txt:12"

 private:
  bool fill();
  Path path_;
  int fd_ = -1;
  std::string buffer_;
  std::size_t begin_ = 0, end_ = 0;
  std::uint64_t line_ = 0;
};

// Index of the first byte that is not part of well-formed UTF-8 (no surrogates, no overlong forms), or npos.
[[nodiscard]] std::size_t invalid_utf8(std::string_view text);

// Replaces the escape of every lone surrogate in a JSON text by that of U+FFFD, in place; returns how many.
std::uint64_t replace_lone_surrogates(std::string& json);

// The text under `field` of the JSON object in `line`. Error at `where` when it is not an object, is broken, nested too deeply,
// or has no such text or two of them.
[[nodiscard]] std::string json_field(std::string_view line, const std::string& field, const std::string& where);

// A document may not be longer than this (its tokens are held at once).
inline constexpr std::uint64_t kMaxDocumentBytes = 1ULL << 30;

struct DocumentCounts {
  std::uint64_t replaced_surrogates = 0;
};
struct DocumentFormat {
  std::string field;      // of .jsonl files
  std::string separator;  // of other files; empty: the file is one document
};
// Calls `take` with the text of every document of a file in order (empty ones included).
void read_documents(const Path& path, const DocumentFormat& format, DocumentCounts& counts,
                    const std::function<void(const std::string&)>& take, std::size_t buffer_bytes = 1 << 20);

}  // namespace spipe::data
