// The byte tokenizer: a byte is its own id, so it has no tables, no special strings in text, and loses nothing.
#include "spipe/base/error.h"
#include "spipe/data/data.h"

namespace spipe::data {
namespace {

constexpr std::int32_t kEndOfDocument = 256;

class ByteTokenizer final : public Tokenizer {
 public:
  [[nodiscard]] std::uint64_t vocab_size() const override { return 257; }
  [[nodiscard]] std::int64_t end_of_document() const override { return kEndOfDocument; }
  void encode(std::string_view text, std::vector<std::int32_t>& out) const override {
    out.reserve(out.size() + text.size());
    for (const char c : text) out.push_back(static_cast<unsigned char>(c));
  }
  [[nodiscard]] std::string decode(std::span<const std::int32_t> tokens) const override {
    std::string text;
    text.reserve(tokens.size());
    for (const std::int32_t token : tokens) {
      if (token < 0 || token > kEndOfDocument) {
        throw Error("id " + std::to_string(token) + " is not in the byte tokenizer's vocabulary of 257");
      }
      if (token != kEndOfDocument) text.push_back(static_cast<char>(token));
    }
    return text;
  }
  [[nodiscard]] std::uint64_t hash() const override {
    constexpr std::string_view kIdentity = "bytes 0..255, 256 ends a document";
    return hash64(std::as_bytes(std::span(kIdentity)));
  }
  [[nodiscard]] std::string name() const override { return "byte"; }
};

}  // namespace

std::unique_ptr<Tokenizer> byte_tokenizer() { return std::make_unique<ByteTokenizer>(); }

}  // namespace spipe::data
