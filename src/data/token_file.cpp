// The token file format of docs/formats.md: a header of 64 bytes, the tokens, padding to 8 bytes, the document offsets.
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>

#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/data/data.h"

namespace spipe::data {

static_assert(std::endian::native == std::endian::little, "token files are little-endian and used in place");

namespace {

constexpr char kMagic[8] = {'S', 'P', 'T', 'O', 'K', 'E', 'N', 'S'};
constexpr std::uint32_t kVersion = 1;
constexpr std::uint64_t kMaxVocabulary = 1ULL << 31;  // ids are int32
constexpr std::uint64_t kNarrowVocabulary = 1ULL << 16;

struct RawHeader {
  char magic[8];
  std::uint32_t version, token_bytes;
  std::uint64_t vocab_size, token_count, document_count, tokenizer_hash;
  std::int64_t end_of_document;
  std::uint64_t reserved;
};
static_assert(sizeof(RawHeader) == 64);

std::uint64_t token_section_bytes(std::uint64_t count, std::uint64_t token_bytes) {
  return round_up(checked_mul(count, token_bytes), 8);
}

// Sizes of a hostile header are compared by division, so that nothing wraps.
void check_sizes(const RawHeader& header, std::uint64_t file_bytes, const std::string& where) {
  const std::uint64_t payload = file_bytes - sizeof(RawHeader);
  bool fits = header.token_count <= payload / header.token_bytes && header.document_count < payload / 8;
  std::uint64_t wanted = 0;
  if (fits) {
    wanted = sizeof(RawHeader) + token_section_bytes(header.token_count, header.token_bytes) + 8 * (header.document_count + 1);
    fits = wanted == file_bytes;
  }
  if (!fits) {
    throw Error("its header says " + std::to_string(header.token_count) + " tokens of " + std::to_string(header.token_bytes) +
                    " bytes in " + std::to_string(header.document_count) + " documents" +
                    (wanted != 0 ? ", " + std::to_string(wanted) + " bytes in all" : "") + ", but the file has " +
                    std::to_string(file_bytes) + " bytes",
                where, "it is cut short or damaged: make it again");
  }
}

RawHeader read_header(std::span<const std::byte> bytes, const std::string& where) {
  RawHeader header{};
  if (bytes.size() < sizeof(header) || std::memcmp(bytes.data(), kMagic, sizeof(kMagic)) != 0) {
    throw Error("not a token file of this program (" + std::to_string(bytes.size()) + " bytes, no SPTOKENS header)", where,
                "make one with 'spipe tokenize'");
  }
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.version != kVersion) {
    throw Error(
        "token file of version " + std::to_string(header.version) + ", this program reads version " + std::to_string(kVersion),
        where, "make it again with 'spipe tokenize'");
  }
  if (header.vocab_size == 0 || header.vocab_size > kMaxVocabulary) {
    throw Error("vocabulary of " + std::to_string(header.vocab_size) + " in the header, expected 1 to 2147483648", where);
  }
  if (header.token_bytes != 4 && !(header.token_bytes == 2 && header.vocab_size <= kNarrowVocabulary)) {
    throw Error("tokens of " + std::to_string(header.token_bytes) + " bytes with a vocabulary of " +
                    std::to_string(header.vocab_size) + ", expected " +
                    (header.vocab_size <= kNarrowVocabulary ? "2 or 4" : "4"),
                where, "make it again with 'spipe tokenize'");
  }
  if (header.end_of_document < -1 || header.end_of_document >= static_cast<std::int64_t>(header.vocab_size)) {
    throw Error("end-of-document id " + std::to_string(header.end_of_document) + " is outside the vocabulary of " +
                    std::to_string(header.vocab_size),
                where);
  }
  check_sizes(header, bytes.size(), where);
  return header;
}

template <typename T>
T load(const std::byte* from, std::uint64_t i) {
  T value;
  std::memcpy(&value, from + i * sizeof(T), sizeof(T));
  return value;
}

}  // namespace

TokenFile::TokenFile(const Path& path) : map_(path) {
  const std::string where = path.string();
  const RawHeader raw = read_header(map_.bytes(), where);
  header_ = {.version = raw.version,
             .token_bytes = raw.token_bytes,
             .vocab_size = raw.vocab_size,
             .token_count = raw.token_count,
             .document_count = raw.document_count,
             .tokenizer_hash = raw.tokenizer_hash,
             .end_of_document = raw.end_of_document};
  tokens_ = map_.bytes().data() + sizeof(RawHeader);
  offsets_ = tokens_ + token_section_bytes(raw.token_count, raw.token_bytes);
  std::uint64_t previous = 0;
  for (std::uint64_t d = 0; d <= raw.document_count; ++d) {
    const std::uint64_t offset = document_begin(d);
    const bool bad = d == 0 ? offset != 0 : offset <= previous;
    if (bad || (d == raw.document_count && offset != raw.token_count)) {
      throw Error("document offset " + std::to_string(d) + " is " + std::to_string(offset) + " after " +
                      std::to_string(previous) + " of " + std::to_string(raw.token_count) + " tokens",
                  where, "the file is damaged: make it again");
    }
    previous = offset;
  }
}

std::int32_t TokenFile::token(std::uint64_t i) const {
  SPIPE_CHECK(i < size(), "token index past the end");
  return header_.token_bytes == 2 ? load<std::uint16_t>(tokens_, i) : load<std::int32_t>(tokens_, i);
}

void TokenFile::read(std::uint64_t first, std::span<std::int32_t> out) const {
  SPIPE_CHECK(first <= size() && out.size() <= size() - first, "tokens past the end");
  if (out.empty()) return;
  if (header_.token_bytes == 4) {
    std::memcpy(out.data(), tokens_ + first * 4, out.size() * 4);
    return;
  }
  const std::byte* from = tokens_ + first * 2;
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = load<std::uint16_t>(from, i);
}

std::uint64_t TokenFile::document_begin(std::uint64_t d) const {
  SPIPE_CHECK(d <= header_.document_count, "document index past the end");
  return load<std::uint64_t>(offsets_, d);
}

std::uint64_t TokenFile::fingerprint() const { return hash64(map_.bytes()); }

namespace {

template <typename T>
std::uint64_t first_id_at_least(const std::byte* tokens, std::uint64_t count, std::uint64_t limit) {
  constexpr std::uint64_t kBlock = 1 << 16;
  for (std::uint64_t begin = 0; begin < count; begin += kBlock) {
    const std::uint64_t end = std::min(count, begin + kBlock);
    T largest = 0;  // a plain maximum, so that the loop vectorises; the place is looked for only where it matters
    for (std::uint64_t i = begin; i < end; ++i) largest = std::max(largest, load<T>(tokens, i));
    if (largest < limit) continue;
    for (std::uint64_t i = begin;; ++i) {
      if (load<T>(tokens, i) >= limit) return i;
    }
  }
  return count;
}

}  // namespace

void TokenFile::check_ids(std::uint64_t vocab_size) const {
  const std::uint64_t limit = std::min(vocab_size, kMaxVocabulary);
  const std::uint64_t at = header_.token_bytes == 2 ? first_id_at_least<std::uint16_t>(tokens_, size(), limit)
                                                    : first_id_at_least<std::uint32_t>(tokens_, size(), limit);
  if (at == size()) return;
  const std::uint64_t id = header_.token_bytes == 2 ? load<std::uint16_t>(tokens_, at) : load<std::uint32_t>(tokens_, at);
  throw Error("token " + std::to_string(at) + " is id " + std::to_string(id) + ", outside the vocabulary of " +
                  std::to_string(vocab_size),
              map_.path().string(), "tokenize with the tokenizer of this model");
}

struct TokenFileWriter::Impl {
  Path path, temporary;
  TokenFileHeader header;
  std::unique_ptr<FileWriter> file;
  std::vector<std::byte> buffer;
  std::vector<std::uint64_t> offsets{0};

  void append(std::int32_t token) {
    SPIPE_CHECK(token >= 0 && static_cast<std::uint64_t>(token) < header.vocab_size, "token outside its vocabulary");
    const auto* bytes = reinterpret_cast<const std::byte*>(&token);  // little-endian: the low bytes come first
    buffer.insert(buffer.end(), bytes, bytes + header.token_bytes);
    ++header.token_count;
    if (buffer.size() >= (1U << 20)) flush();
  }
  void flush() {
    file->write(buffer);
    buffer.clear();
  }
};

TokenFileWriter::TokenFileWriter(Path path, std::uint64_t vocab_size, std::uint64_t tokenizer_hash,
                                 std::int64_t end_of_document)
    : impl_(std::make_unique<Impl>()) {
  SPIPE_CHECK(vocab_size > 0 && vocab_size <= kMaxVocabulary, "vocabulary size");
  SPIPE_CHECK(end_of_document >= -1 && end_of_document < static_cast<std::int64_t>(vocab_size), "end-of-document id");
  impl_->path = std::move(path);
  impl_->temporary = impl_->path.string() + ".tmp-" + std::to_string(getpid());
  impl_->header = {.token_bytes = vocab_size <= kNarrowVocabulary ? 2U : 4U,
                   .vocab_size = vocab_size,
                   .tokenizer_hash = tokenizer_hash,
                   .end_of_document = end_of_document};
  impl_->file = std::make_unique<FileWriter>(impl_->temporary);
  impl_->buffer.resize(sizeof(RawHeader));  // zeros: not a token file until finish() patches it
}

TokenFileWriter::~TokenFileWriter() {
  if (!impl_->file) return;
  impl_->file.reset();
  std::error_code ignored;
  std::filesystem::remove(impl_->temporary, ignored);
}

void TokenFileWriter::document(std::span<const std::int32_t> tokens) {
  if (tokens.empty()) return;
  for (const std::int32_t token : tokens) impl_->append(token);
  if (impl_->header.end_of_document >= 0) impl_->append(static_cast<std::int32_t>(impl_->header.end_of_document));
  impl_->offsets.push_back(impl_->header.token_count);
  ++impl_->header.document_count;
}

TokenFileHeader TokenFileWriter::finish() {
  Impl& impl = *impl_;
  SPIPE_CHECK(impl.file != nullptr, "token file finished twice");
  if (impl.header.token_count == 0) {
    throw Error("0 tokens: the input has no text", impl.path.string(), "nothing was written");
  }
  const std::uint64_t section = impl.header.token_count * impl.header.token_bytes;
  impl.buffer.resize(impl.buffer.size() + round_up(section, 8) - section);
  impl.flush();
  impl.file->write(std::as_bytes(std::span(impl.offsets)));
  RawHeader raw{.version = kVersion,
                .token_bytes = impl.header.token_bytes,
                .vocab_size = impl.header.vocab_size,
                .token_count = impl.header.token_count,
                .document_count = impl.header.document_count,
                .tokenizer_hash = impl.header.tokenizer_hash,
                .end_of_document = impl.header.end_of_document};
  std::memcpy(raw.magic, kMagic, sizeof(kMagic));
  impl.file->write_at(0, std::as_bytes(std::span(&raw, 1)));
  impl.file->finish();
  std::error_code failed;
  std::filesystem::rename(impl.temporary, impl.path, failed);
  if (failed) throw Error("cannot rename the finished file: " + failed.message(), impl.path.string());
  impl.file.reset();
  fsync_directory(impl.path.parent_path().empty() ? Path(".") : impl.path.parent_path());
  return impl.header;
}

}  // namespace spipe::data
