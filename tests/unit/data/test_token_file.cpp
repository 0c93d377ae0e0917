#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "spipe/data/data.h"
#include "tests/unit/io/test_files.h"

namespace spipe::data {
namespace {

using test::contains;
using test::error_line;
using test::read_file;
using test::TempFolder;
using test::write_file;
using Ids = std::vector<std::int32_t>;

Ids slice(const TokenFile& file, std::uint64_t begin, std::uint64_t end) {
  Ids ids(end - begin);
  file.read(begin, ids);
  return ids;
}

void make(const std::filesystem::path& path, std::uint64_t vocab, const std::vector<Ids>& documents, std::int64_t eod = -1) {
  TokenFileWriter writer(path, vocab, 1, eod);
  for (const Ids& document : documents) writer.document(document);
  writer.finish();
}

// Overwrites bytes of a file, and gives the Error that opening it then throws.
template <typename T>
std::string line_after_patch(const std::filesystem::path& path, std::size_t at, T value) {
  std::string bytes = read_file(path);
  std::memcpy(bytes.data() + at, &value, sizeof(value));
  const std::filesystem::path patched = path.string() + ".patched";
  write_file(patched, bytes);
  return error_line([&] { const TokenFile file(patched); });
}

TEST_CASE("ids above 65,535 survive: the width follows the vocabulary (CASES O7)") {
  const TempFolder folder;
  const Ids ids{65535, 65536, 69999, 0};
  make(folder / "wide.bin", 70000, {ids});
  const TokenFile wide(folder / "wide.bin");
  CHECK(wide.header().token_bytes == 4);
  CHECK(slice(wide, 0, 4) == ids);
  CHECK(wide.token(2) == 69999);

  make(folder / "narrow.bin", 65536, {{65535, 1}});
  const TokenFile narrow(folder / "narrow.bin");
  CHECK(narrow.header().token_bytes == 2);
  CHECK(slice(narrow, 0, 2) == Ids{65535, 1});
}

TEST_CASE("a file that is not what its header says is refused (CASES O7)") {
  const TempFolder folder;
  const auto path = folder / "t.bin";
  make(path, 70000, {{65535, 65536, 69999}, {5}});
  const std::string bytes = read_file(path);

  CHECK(contains(line_after_patch(path, 12, std::uint32_t{2}), "tokens of 2 bytes with a vocabulary of 70000, expected 4"));
  CHECK(contains(line_after_patch(path, 12, std::uint32_t{0}), "tokens of 0 bytes"));
  CHECK(contains(line_after_patch(path, 8, std::uint32_t{2}), "version 2"));
  CHECK(contains(line_after_patch(path, 16, std::uint64_t{0}), "vocabulary of 0"));
  CHECK(contains(line_after_patch(path, 16, ~std::uint64_t{0}), "vocabulary of 18446744073709551615"));
  CHECK(contains(line_after_patch(path, 48, std::int64_t{70000}), "end-of-document id 70000"));
  for (const std::uint64_t count : {std::uint64_t{3}, std::uint64_t{6}, std::uint64_t{1} << 61, ~std::uint64_t{0}}) {
    CHECK(contains(line_after_patch(path, 24, count), std::to_string(count) + " tokens"));
    CHECK(contains(line_after_patch(path, 32, count), std::to_string(count) + " documents"));
  }
  const std::size_t offsets = 64 + 16;
  CHECK(contains(line_after_patch(path, offsets, std::uint64_t{1}), "document offset 0 is 1"));
  CHECK(contains(line_after_patch(path, offsets + 8, std::uint64_t{0}), "document offset 1 is 0"));
  CHECK(contains(line_after_patch(path, offsets + 8, std::uint64_t{9}), "document offset 2 is 4 after 9"));
  CHECK(contains(line_after_patch(path, offsets + 16, std::uint64_t{5}), "document offset 2 is 5"));

  write_file(folder / "short.bin", bytes.substr(0, bytes.size() - 1));
  CHECK(contains(error_line([&] { const TokenFile file(folder / "short.bin"); }),
                 std::to_string(bytes.size()) + " bytes in all"));
  write_file(folder / "long.bin", bytes + "x");
  CHECK(contains(error_line([&] { const TokenFile file(folder / "long.bin"); }), "long.bin"));
  for (const std::string& other : {std::string(), std::string("abc"), std::string(1001, '\1'), std::string("SPTOKENS")}) {
    write_file(folder / "raw.bin", other);
    CHECK(contains(error_line([&] { const TokenFile file(folder / "raw.bin"); }), "not a token file"));
  }
}

TEST_CASE("an id outside the model's vocabulary is refused with file and position (CASES O7)") {
  const TempFolder folder;
  make(folder / "narrow.bin", 300, {Ids(70000, 7), {299}});
  const TokenFile narrow(folder / "narrow.bin");
  narrow.check_ids(300);
  const std::string line = error_line([&] { narrow.check_ids(299); });
  CHECK(contains(line, "narrow.bin"));
  CHECK(contains(line, "token 70000 is id 299, outside the vocabulary of 299"));

  make(folder / "wide.bin", 70000, {{1, 2, 69999}});
  CHECK(contains(error_line([&] { TokenFile(folder / "wide.bin").check_ids(69999); }), "token 2 is id 69999"));
  // A negative id in a damaged file of 4-byte tokens is an id above 2^31, not a small one.
  std::string bytes = read_file(folder / "wide.bin");
  bytes.replace(64, 4, "\xff\xff\xff\xff");
  write_file(folder / "wide.bin", bytes);
  CHECK(contains(error_line([&] { TokenFile(folder / "wide.bin").check_ids(70000); }), "token 0 is id 4294967295"));
}

TEST_CASE("document offsets count the end-of-document token (CASES O12)") {
  const TempFolder folder;
  const std::vector<Ids> documents{{10}, {20, 21}, {30, 31, 32}};
  for (const bool eod : {true, false}) {
    make(folder / "d.bin", 257, documents, eod ? 256 : -1);
    const TokenFile file(folder / "d.bin");
    CHECK(file.size() == (eod ? 9 : 6));
    REQUIRE(file.header().document_count == 3);
    const std::vector<std::uint64_t> offsets =
        eod ? std::vector<std::uint64_t>{0, 2, 5, 9} : std::vector<std::uint64_t>{0, 1, 3, 6};
    for (std::size_t d = 0; d < 4; ++d) CHECK(file.document_begin(d) == offsets[d]);
    for (std::size_t d = 0; d < 3; ++d) {
      Ids wanted = documents[d];
      if (eod) wanted.push_back(256);
      CHECK(slice(file, offsets[d], offsets[d + 1]) == wanted);
    }
  }
}

TEST_CASE("empty documents leave no trace, not even an end-of-document token (CASES O2)") {
  const TempFolder folder;
  make(folder / "e.bin", 257, {{}, {120}, {}}, 256);
  const TokenFile file(folder / "e.bin");
  CHECK(file.header().document_count == 1);
  CHECK(slice(file, 0, 2) == Ids{120, 256});
}

TEST_CASE("a file of 0 tokens is refused and nothing appears under its name (CASES O2)") {
  const TempFolder folder;
  {
    TokenFileWriter writer(folder / "none.bin", 257, 1, 256);
    writer.document({});
    CHECK(contains(error_line([&] { writer.finish(); }), "0 tokens"));
  }
  CHECK(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("a writer that is killed leaves the old file under its name") {
  const TempFolder folder;
  make(folder / "t.bin", 257, {{1, 2, 3}});
  const std::string before = read_file(folder / "t.bin");
  const pid_t child = fork();
  if (child == 0) {
    TokenFileWriter writer(folder / "t.bin", 257, 1, -1);
    writer.document(Ids(1 << 20, 9));  // more than the writer buffers
    _exit(0);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  CHECK(read_file(folder / "t.bin") == before);
  make(folder / "t.bin", 257, {{4}});
  CHECK(TokenFile(folder / "t.bin").token(0) == 4);
}

TEST_CASE("the fingerprint changes with any byte") {
  const TempFolder folder;
  make(folder / "a.bin", 257, {Ids(1000, 5)});
  const std::uint64_t before = TokenFile(folder / "a.bin").fingerprint();
  CHECK(before == TokenFile(folder / "a.bin").fingerprint());
  std::string bytes = read_file(folder / "a.bin");
  bytes[1000] ^= 1;
  write_file(folder / "a.bin", bytes);
  CHECK(before != TokenFile(folder / "a.bin").fingerprint());
}

}  // namespace
}  // namespace spipe::data
