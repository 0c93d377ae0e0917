#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "spipe/base/error.h"
#include "spipe/data/data.h"
#include "text_input.h"

namespace spipe::data {
namespace {

void check_options(const TokenizeOptions& options) {
  if (options.inputs.empty()) throw Error("no input files", "", "name at least one with --input");
  if (options.output.empty()) throw Error("no output file", "", "name it with --output");
  if (!(options.hold_out >= 0 && options.hold_out < 1)) {
    throw Error("hold-out fraction " + std::to_string(options.hold_out) + ", expected 0 <= fraction < 1");
  }
  if ((options.hold_out > 0) == options.hold_out_output.empty()) {
    throw Error("a hold-out needs both a file and a fraction above 0", "",
                "give --held-out and --hold-out-fraction, or neither");
  }
  std::vector<Path> outputs{options.output.lexically_normal()};
  if (options.hold_out > 0) outputs.push_back(options.hold_out_output.lexically_normal());
  if (outputs.size() == 2 && outputs[0] == outputs[1])
    throw Error("--output and --held-out are the same file", outputs[0].string());
  for (const Path& input : options.inputs) {
    if (!std::filesystem::is_regular_file(input)) throw Error("no such file", input.string());
    for (const Path& output : outputs) {
      std::error_code ignored;
      if (std::filesystem::equivalent(input, output, ignored))
        throw Error("input and output are the same file", input.string());
    }
  }
}

// Tokenizes every document into `path`.
TokenFileHeader tokenize_all(const Tokenizer& tokenizer, const TokenizeOptions& options, const Path& path,
                             TokenizeSummary& summary) {
  TokenFileWriter writer(path, tokenizer.vocab_size(), tokenizer.hash(),
                         options.end_of_document ? tokenizer.end_of_document() : -1);
  std::vector<std::int32_t> tokens;
  DocumentCounts counts;
  for (const Path& input : options.inputs) {
    read_documents(input, {options.field, options.document_separator}, counts, [&](const std::string& text) {
      tokens.clear();
      tokenizer.encode(text, tokens);
      summary.bytes += text.size();
      if (tokens.empty()) ++summary.empty_documents;
      writer.document(tokens);
    });
  }
  summary.replaced_surrogates = counts.replaced_surrogates;
  return writer.finish();
}

TokenFileHeader copy_documents(const TokenFile& from, std::uint64_t first, std::uint64_t last, const Path& to) {
  const TokenFileHeader& header = from.header();
  TokenFileWriter writer(to, header.vocab_size, header.tokenizer_hash, header.end_of_document);
  std::vector<std::int32_t> tokens;
  for (std::uint64_t d = first; d < last; ++d) {
    tokens.resize(from.document_begin(d + 1) - from.document_begin(d));
    from.read(from.document_begin(d), tokens);
    if (header.end_of_document >= 0) tokens.pop_back();  // the writer adds it again
    writer.document(tokens);
  }
  return writer.finish();
}

class TemporaryFile {
 public:
  explicit TemporaryFile(Path path) : path_(std::move(path)) {}
  ~TemporaryFile() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  [[nodiscard]] const Path& path() const { return path_; }

 private:
  Path path_;
};

}  // namespace

TokenizeSummary tokenize(const Tokenizer& tokenizer, const TokenizeOptions& options) {
  check_options(options);
  TokenizeSummary summary;
  if (options.hold_out == 0) {
    const TokenFileHeader header = tokenize_all(tokenizer, options, options.output, summary);
    summary.documents = header.document_count;
    summary.tokens = header.token_count;
    return summary;
  }
  // Which documents are the last ones is known at the end only: tokenize once into one file, then cut it in two.
  const TemporaryFile all(options.output.string() + ".all-" + std::to_string(getpid()));
  const std::uint64_t documents = tokenize_all(tokenizer, options, all.path(), summary).document_count;
  // The small addend undoes the rounding of products like 0.29 * 100.
  const auto held = static_cast<std::uint64_t>(std::floor(static_cast<double>(documents) * options.hold_out + 1e-9));
  if (held == 0 || held >= documents) {
    throw Error("a hold-out of " + std::to_string(options.hold_out) + " of " + std::to_string(documents) + " documents is " +
                    std::to_string(held),
                options.hold_out_output.string(), "split the text into more documents (--separator) or change the fraction");
  }
  const TokenFile file(all.path());
  const TokenFileHeader held_out = copy_documents(file, documents - held, documents, options.hold_out_output);
  const TokenFileHeader kept = copy_documents(file, 0, documents - held, options.output);
  summary.documents = documents;
  summary.tokens = kept.token_count + held_out.token_count;
  summary.held_out_documents = held_out.document_count;
  summary.held_out_tokens = held_out.token_count;
  return summary;
}

}  // namespace spipe::data
