#include "spipe/data/data.h"
#include "src/data/text_input.h"
#include "tests/unit/io/test_files.h"

namespace spipe::data {
namespace {

using test::contains;
using test::error_line;
using test::TempFolder;
using test::write_file;
using Texts = std::vector<std::string>;

const std::vector<std::size_t> kBufferSizes{1, 2, 12, 13, 14, 1 << 20};

Texts documents_of(const std::filesystem::path& path, std::size_t buffer = 1 << 20, const std::string& separator = {},
                   DocumentCounts* counts = nullptr) {
  Texts texts;
  DocumentCounts own;
  read_documents(
      path, {"text", separator}, counts != nullptr ? *counts : own, [&](const std::string& text) { texts.push_back(text); },
      buffer);
  return texts;
}

// The documents of a token file, decoded.
Texts decoded(const std::filesystem::path& path) {
  const TokenFile file(path);
  Texts texts;
  for (std::uint64_t d = 0; d < file.header().document_count; ++d) {
    std::vector<std::int32_t> ids(file.document_begin(d + 1) - file.document_begin(d));
    file.read(file.document_begin(d), ids);
    texts.push_back(byte_tokenizer()->decode(ids));
  }
  return texts;
}

TEST_CASE("JSON lines: CRLF, blank lines and a missing last newline (CASES O1)") {
  const TempFolder folder;
  write_file(folder / "crlf.jsonl", "{\"text\":\"a\"}\r\n\r\n{\"text\":\"b\"}\r\n   \n{\"text\":\"c\\rd\"}");
  for (const std::size_t buffer : kBufferSizes) {
    CHECK(documents_of(folder / "crlf.jsonl", buffer) == Texts{"a", "b", "c\rd"});
  }
  write_file(folder / "broken.jsonl", "{\"text\":\"a\"}\r\n\r\n{\"text\":\"b\"\r\n");
  CHECK(contains(error_line([&] { documents_of(folder / "broken.jsonl"); }), "broken.jsonl:3: broken JSON"));
}

TEST_CASE("JSON lines that are not objects with a text are refused with file and line") {
  const TempFolder folder;
  const std::vector<std::pair<std::string, std::string>> cases{
      {"[1]", "not an object"},
      {"3", "not an object"},
      {"\"text\"", "not an object"},
      {"{}", "no field 'text'"},
      {"{\"a\":{\"text\":\"x\"}}", "no field 'text'"},
      {"{\"text\":null}", "is null, expected text"},
      {"{\"text\":3}", "is a number, expected text"},
      {"{\"text\":{\"text\":\"x\"}}", "is an object, expected text"},
      {"{\"text\":[\"x\"]}", "is a list, expected text"},
      {"{\"text\":\"x\",\"text\":\"y\"}", "two fields 'text'"},
      {"{\"text\":\"x\"} {\"text\":\"y\"}", "broken JSON"},
      {"{\"text\":\"x\\q\"}", "broken JSON"},
      {"{\"a\":" + std::string(100'000, '['), "nested deeper"},
  };
  for (const auto& [line, mentions] : cases) {
    INFO(line.substr(0, 60));
    write_file(folder / "x.jsonl", "{\"text\":\"first\"}\n" + line + "\n");
    const std::string error = error_line([&] { documents_of(folder / "x.jsonl"); });
    INFO(error);
    CHECK(contains(error, "x.jsonl:2: "));
    CHECK(contains(error, mentions));
  }
  write_file(folder / "ok.jsonl", R"({"id": [1, {"text": "no"}], "text": "yes", "n": -1.5e3, "b": [true, null]})");
  CHECK(documents_of(folder / "ok.jsonl") == Texts{"yes"});
}

TEST_CASE("a byte order mark is dropped at offset 0 only (CASES O3)") {
  const TempFolder folder;
  write_file(folder / "bom.jsonl", "\xEF\xBB\xBF{\"text\":\"hi\"}\n{\"text\":\"\xEF\xBB\xBFhi\"}\n{\"text\":\"\\uFEFFhi\"}");
  write_file(folder / "bom.txt", "\xEF\xBB\xBFhi\n\xEF\xBB\xBFho\n");
  for (const std::size_t buffer : kBufferSizes) {
    CHECK(documents_of(folder / "bom.jsonl", buffer) == Texts{"hi", "\xEF\xBB\xBFhi", "\xEF\xBB\xBFhi"});
    CHECK(documents_of(folder / "bom.txt", buffer) == Texts{"hi\n\xEF\xBB\xBFho\n"});
  }
}

TEST_CASE("surrogate pairs are joined, lone surrogates become U+FFFD and are counted (CASES O4)") {
  const TempFolder folder;
  write_file(folder / "s.jsonl", R"({"text":"\ud83d\ude00"})"
                                 "\n"
                                 R"({"text":"a\ud800b"})"
                                 "\n"
                                 R"({"text":"\udc00"})"
                                 "\n"
                                 R"({"text":"\ud800\ud800\udc00"})"
                                 "\n"
                                 R"({"text":"\\ud800 \\\ud800 \uDBFF"})"
                                 "\n");
  DocumentCounts counts;
  CHECK(documents_of(folder / "s.jsonl", 7, {}, &counts) == Texts{"\xF0\x9F\x98\x80",
                                                                  "a\xEF\xBF\xBD"
                                                                  "b",
                                                                  "\xEF\xBF\xBD", "\xEF\xBF\xBD\xF0\x90\x80\x80",
                                                                  "\\ud800 \\\xEF\xBF\xBD \xEF\xBF\xBD"});
  CHECK(counts.replaced_surrogates == 5);
}

TEST_CASE("raw invalid UTF-8 is refused with file and line (CASES O4)") {
  const TempFolder folder;
  write_file(folder / "x.jsonl", "{\"text\":\"a\"}\n{\"text\":\"\xff\"}\n");
  CHECK(contains(error_line([&] { documents_of(folder / "x.jsonl"); }), "x.jsonl:2: invalid UTF-8"));
  write_file(folder / "x.txt", "a\nb\nc\xC3");
  CHECK(contains(error_line([&] { documents_of(folder / "x.txt"); }), "x.txt:3: invalid UTF-8 at byte 2"));

  for (const std::string bad : {"\x80", "\xC0\x80", "\xC1\xBF", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xF0\x8F\xBF\xBF",
                                "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xE2\x82", "\xF0\x9F\x98", "\xE2\x28\xA1", "\xFE"}) {
    CHECK(invalid_utf8("ab" + bad) == 2);
    CHECK(invalid_utf8(bad + "ab") == 0);
  }
  for (const std::string good :
       {"", "abc", "\xC2\x80", "\xE0\xA0\x80", "\xED\x9F\xBF", "\xEE\x80\x80", "\xF0\x90\x80\x80", "\xF4\x8F\xBF\xBF"}) {
    CHECK(invalid_utf8(good) == std::string::npos);
  }
}

TEST_CASE("plain text: one document a file, or a separator line that ends each") {
  const TempFolder folder;
  write_file(folder / "a.txt", "one\r\n\ntwo\n---\nthree\n --- \n---\n---\nlast");
  for (const std::size_t buffer : kBufferSizes) {
    CHECK(documents_of(folder / "a.txt", buffer) == Texts{"one\n\ntwo\n---\nthree\n --- \n---\n---\nlast"});
    CHECK(documents_of(folder / "a.txt", buffer, "---") == Texts{"one\n\ntwo\n", "three\n --- \n", "", "last"});
  }
  write_file(folder / "end.txt", "one\n---\n");
  CHECK(documents_of(folder / "end.txt", 3, "---") == Texts{"one\n"});
  write_file(folder / "empty.txt", "");
  CHECK(documents_of(folder / "empty.txt").empty());
}

TEST_CASE("text that looks like a special token stays text (CASES O6)") {
  const std::string text = "if x <|endoftext|> y </s>";
  std::vector<std::int32_t> ids;
  byte_tokenizer()->encode(text, ids);
  CHECK(ids.size() == text.size());
  for (const std::int32_t id : ids) CHECK(id < 256);
  CHECK(byte_tokenizer()->decode(ids) == text);
  std::string all_bytes;
  for (int i = 0; i < 256; ++i) all_bytes.push_back(static_cast<char>(i));
  ids.clear();
  byte_tokenizer()->encode(all_bytes, ids);
  CHECK(ids[255] == 255);
  CHECK(byte_tokenizer()->decode(ids) == all_bytes);
  CHECK(contains(error_line([&] { (void)byte_tokenizer()->decode(std::vector<std::int32_t>{257}); }), "id 257"));
}

TEST_CASE("tokenizing: documents of all inputs in order, each ended, empty ones counted (CASES O2, O12)") {
  const TempFolder folder;
  write_file(folder / "a.jsonl", "{\"text\":\"\"}\n{\"text\":\"x\"}\n{\"text\":\"\"}\n");
  write_file(folder / "b.txt", "yy\n");
  const TokenizeSummary summary =
      tokenize(*byte_tokenizer(), {.inputs = {folder / "a.jsonl", folder / "b.txt"}, .output = folder / "out.bin"});
  CHECK(summary.documents == 2);
  CHECK(summary.empty_documents == 2);
  CHECK(summary.tokens == 6);
  CHECK(summary.bytes == 4);
  CHECK(decoded(folder / "out.bin") == Texts{"x", "yy\n"});
  const TokenFile file(folder / "out.bin");
  CHECK(file.token(1) == 256);
  CHECK(file.header().tokenizer_hash == byte_tokenizer()->hash());

  tokenize(*byte_tokenizer(), {.inputs = {folder / "b.txt"}, .output = folder / "no-end.bin", .end_of_document = false});
  CHECK(TokenFile(folder / "no-end.bin").size() == 3);
  CHECK(TokenFile(folder / "no-end.bin").header().end_of_document == -1);
}

TEST_CASE("inputs without any text are refused and write nothing (CASES O2)") {
  const TempFolder folder;
  write_file(folder / "empty.jsonl", "{\"text\":\"\"}\n{\"text\":\"\"}\n");
  write_file(folder / "zero.jsonl", "");
  write_file(folder / "zero.txt", "");
  for (const char* name : {"empty.jsonl", "zero.jsonl", "zero.txt"}) {
    CHECK(contains(error_line([&] { tokenize(*byte_tokenizer(), {.inputs = {folder / name}, .output = folder / "o.bin"}); }),
                   "0 tokens"));
    CHECK_FALSE(std::filesystem::exists(folder / "o.bin"));
  }
  CHECK(std::distance(std::filesystem::directory_iterator(folder.path()), {}) == 3);
}

TEST_CASE("the last fraction of the documents is held out") {
  const TempFolder folder;
  std::string lines;
  for (int i = 0; i < 50; ++i) lines += "{\"text\":\"" + std::to_string(100 + i) + "\"}\n";
  write_file(folder / "a.jsonl", lines);
  TokenizeOptions options{.inputs = {folder / "a.jsonl"},
                          .output = folder / "train.bin",
                          .hold_out = 0.05,
                          .hold_out_output = folder / "heldout.bin"};
  const TokenizeSummary summary = tokenize(*byte_tokenizer(), options);
  CHECK(summary.documents == 50);
  CHECK(summary.held_out_documents == 2);
  CHECK(summary.tokens == 50 * 4);
  CHECK(summary.held_out_tokens == 8);
  CHECK(TokenFile(folder / "train.bin").size() == 48 * 4);
  CHECK(decoded(folder / "heldout.bin") == Texts{"148", "149"});
  CHECK(decoded(folder / "train.bin").back() == "147");
  CHECK(std::distance(std::filesystem::directory_iterator(folder.path()), {}) == 3);  // no temporary file stays

  options.hold_out = 0.29;
  options.inputs = {folder / "a.jsonl", folder / "a.jsonl"};
  CHECK(tokenize(*byte_tokenizer(), options).held_out_documents == 29);  // not 28, which 0.29 * 100 in binary gives
  options.hold_out = 0.001;
  CHECK(contains(error_line([&] { tokenize(*byte_tokenizer(), options); }), "of 100 documents is 0"));
}

TEST_CASE("tokenize refuses options that cannot be meant") {
  const TempFolder folder;
  write_file(folder / "a.txt", "a");
  const TokenizeOptions good{.inputs = {folder / "a.txt"}, .output = folder / "o.bin"};
  const auto line = [&](auto change) {
    TokenizeOptions options = good;
    change(options);
    return error_line([&] { tokenize(*byte_tokenizer(), options); });
  };
  CHECK(contains(line([](TokenizeOptions& o) { o.inputs.clear(); }), "no input"));
  CHECK(contains(line([](TokenizeOptions& o) { o.output.clear(); }), "no output"));
  CHECK(contains(line([&](TokenizeOptions& o) { o.inputs = {folder / "b.txt"}; }), "b.txt: no such file"));
  CHECK(contains(line([](TokenizeOptions& o) { o.hold_out = 0.5; }), "needs both"));
  CHECK(contains(line([](TokenizeOptions& o) { o.hold_out_output = "x"; }), "needs both"));
  CHECK(contains(line([](TokenizeOptions& o) { o.hold_out = 1.0; }), "expected 0 <="));
  CHECK(contains(line([](TokenizeOptions& o) { o.hold_out = -0.1; }), "expected 0 <="));
  CHECK(contains(line([&](TokenizeOptions& o) { o.output = folder / "a.txt"; }), "same file"));
  CHECK(contains(line([&](TokenizeOptions& o) {
                   o.hold_out = 0.5;
                   o.hold_out_output = folder / "o.bin";
                 }),
                 "same file"));
  CHECK(test::read_file(folder / "a.txt") == "a");
}

}  // namespace
}  // namespace spipe::data
