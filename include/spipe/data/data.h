// Token files, tokenizers and the batches of a step.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spipe/base/file.h"

namespace spipe::data {

// --- token files (format in docs/formats.md): header, tokens (u16 or u32 by vocabulary), document offsets; written atomically.
struct TokenFileHeader {
  std::uint32_t version = 1;
  std::uint32_t token_bytes = 2;  // 2 or 4, from the vocabulary size
  std::uint64_t vocab_size = 0, token_count = 0, document_count = 0;
  std::uint64_t tokenizer_hash = 0;   // fingerprint of tokenizer and settings
  std::int64_t end_of_document = -1;  // id appended to each document, or -1
};

class TokenFile {
 public:
  // Maps and checks: magic, version, sizes against the real file size, offsets ascending. Errors name the file, the value found
  // and the value wanted.
  explicit TokenFile(const Path& path);
  [[nodiscard]] const TokenFileHeader& header() const { return header_; }
  [[nodiscard]] std::uint64_t size() const { return header_.token_count; }
  [[nodiscard]] std::int32_t token(std::uint64_t i) const;
  void read(std::uint64_t first, std::span<std::int32_t> out) const;
  [[nodiscard]] std::uint64_t document_begin(std::uint64_t d) const;  // d in 0..document_count (the last = token_count)
  [[nodiscard]] std::uint64_t fingerprint() const;                    // hash of the content, for resume
  // Throws Error naming file and position of the first id >= vocab_size.
  void check_ids(std::uint64_t vocab_size) const;

 private:
  MappedFile map_;
  TokenFileHeader header_;
  const std::byte* tokens_ = nullptr;
  const std::byte* offsets_ = nullptr;
};

class TokenFileWriter {
 public:
  TokenFileWriter(Path path, std::uint64_t vocab_size, std::uint64_t tokenizer_hash, std::int64_t end_of_document);
  ~TokenFileWriter();
  void document(
      std::span<const std::int32_t> tokens);  // appends end_of_document when set; empty documents are skipped and counted
  TokenFileHeader finish();                   // makes the file appear under its name; Error when it holds 0 tokens

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// --- tokenizers
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  [[nodiscard]] virtual std::uint64_t vocab_size() const = 0;
  [[nodiscard]] virtual std::int64_t end_of_document() const = 0;
  virtual void encode(std::string_view text, std::vector<std::int32_t>& out) const = 0;  // appends
  [[nodiscard]] virtual std::string decode(std::span<const std::int32_t> tokens) const = 0;
  [[nodiscard]] virtual std::uint64_t hash() const = 0;
  [[nodiscard]] virtual std::string name() const = 0;
};
// Bytes 0..255 are themselves, 256 ends a document; vocabulary 257.
[[nodiscard]] std::unique_ptr<Tokenizer> byte_tokenizer();

struct TokenizeOptions {
  std::vector<Path> inputs;  // .jsonl: one {"text": ...} a line; anything else: plain text
  Path output;
  std::string field = "text";
  std::string document_separator;  // plain text: a line that equals it ends a document; empty: the file is one document
  double hold_out = 0;             // fraction of the documents, the last ones, that goes to `hold_out_output`
  Path hold_out_output;
  bool end_of_document = true;
};
// `documents` and `tokens` count both outputs together; the held-out ones are a part of them.
struct TokenizeSummary {
  std::uint64_t documents = 0, empty_documents = 0, tokens = 0, bytes = 0, replaced_surrogates = 0, held_out_documents = 0,
                held_out_tokens = 0;
};
TokenizeSummary tokenize(const Tokenizer& tokenizer, const TokenizeOptions& options);

// The files that paths or glob patterns of a config name: sorted by name, each once. Error at `where` when a pattern matches
// nothing or a folder.
[[nodiscard]] std::vector<Path> expand_globs(const std::vector<std::string>& patterns, const std::string& where);

// --- batches: pure functions of (seed, step)
// Windows of seq_len + 1 tokens at stride seq_len over the concatenation of each file; every window of an epoch once, in an
// order permuted by (shuffle_seed, epoch). Sequence i of step s (0-based) is window (s * global + i) of the endless sequence of
// epochs.
class TrainData {
 public:
  // Errors: no window in any file ("needs seq_len + 1 tokens, has ..."), ids beyond the vocabulary.
  TrainData(std::vector<Path> files, std::int64_t seq_len, std::int64_t global_batch, std::uint64_t shuffle_seed,
            std::uint64_t vocab_size);
  // Rows [first, first + rows) of the step's global batch: tokens and targets [rows, seq_len]; targets < 0 are masked.
  void batch(std::uint64_t step, std::int64_t first, std::int64_t rows, std::int32_t* tokens, std::int32_t* targets) const;
  [[nodiscard]] std::uint64_t targets_of_step(std::uint64_t step) const;  // unmasked, whole global batch
  [[nodiscard]] std::uint64_t windows() const;                            // per epoch
  [[nodiscard]] std::uint64_t tokens() const;
  [[nodiscard]] std::uint64_t fingerprint() const;
  // The global window index of a row (tests, CASES O45).
  [[nodiscard]] std::uint64_t window_of(std::uint64_t step, std::int64_t row) const;

 private:
  std::vector<TokenFile> files_;
  std::vector<std::uint64_t> first_window_;
  std::int64_t seq_len_, global_batch_;
  std::uint64_t seed_, windows_;
};

// Held-out evaluation: consecutive windows at stride seq_len, each predicted token once; the last, short window is padded with
// masked targets. Batches of `rows` sequences; rows beyond the end are fully masked.
class EvalData {
 public:
  EvalData(std::vector<Path> files, std::int64_t seq_len, std::uint64_t vocab_size);
  [[nodiscard]] std::uint64_t windows() const;
  void batch(std::uint64_t first_window, std::int64_t rows, std::int32_t* tokens, std::int32_t* targets) const;
  [[nodiscard]] std::uint64_t targets() const;
  [[nodiscard]] std::uint64_t fingerprint() const;

 private:
  std::vector<TokenFile> files_;
  std::vector<std::uint64_t> first_window_;
  std::int64_t seq_len_;
};

}  // namespace spipe::data
