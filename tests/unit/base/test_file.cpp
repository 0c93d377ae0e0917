#include <sys/stat.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstring>
#include <vector>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "test_folder.h"

using namespace spipe;

namespace {

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

std::string text_of(std::span<const std::byte> bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

}  // namespace

TEST_CASE("text is read whole, with zeros, line ends and nothing at all") {
  const TestFolder folder;
  for (const std::string& text : {std::string(), std::string("a\0b\r\n", 5), std::string(100'000, 'x')}) {
    folder.put("f", text);
    CHECK(read_text(folder.path() / "f") == text);
  }
  CHECK(read_text("/proc/self/stat").size() > 10);  // its size is reported as 0
}

TEST_CASE("what cannot be read is named with the system's reason") {
  const TestFolder folder;
  const std::string missing = (folder.path() / "missing").string();
  CHECK_THROWS_WITH(read_text(missing), missing + ": cannot open: No such file or directory");
  CHECK_THROWS_WITH(spipe::file_size(missing), missing + ": cannot read the size: No such file or directory");
  CHECK_THROWS_WITH(MappedFile(missing), missing + ": cannot open: No such file or directory");
  CHECK_THROWS_WITH(hash64_file(missing), missing + ": cannot open: No such file or directory");
  CHECK_THROWS_WITH(FileWriter(folder.path() / "no" / "f"), Catch::Contains("cannot create: No such file or directory"));
  CHECK_THROWS_WITH(read_text(folder.path()), folder.path().string() + ": is a folder, not a file");
  CHECK_THROWS_WITH(MappedFile(folder.path()), folder.path().string() + ": is not a regular file");
}

TEST_CASE("an atomic write replaces the file and leaves nothing beside it") {
  const TestFolder folder;
  const auto file = folder.path() / "latest";
  write_text_atomic(file, "old");
  write_text_atomic(file, "new");
  CHECK(read_text(file) == "new");
  std::size_t entries = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder.path())) ++entries;
  CHECK(entries == 1);
}

TEST_CASE("an atomic write that fails keeps the old content and cleans up") {
  const TestFolder folder;
  const auto target = folder.path() / "taken";
  folder.put("taken/inside", "x");  // a folder cannot be replaced by a file
  CHECK_THROWS_WITH(write_text_atomic(target, "new"), Catch::Contains("cannot replace"));
  std::size_t entries = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder.path())) ++entries;
  CHECK(entries == 1);
  CHECK(read_text(target / "inside") == "x");
}

TEST_CASE("a writer appends and patches") {
  const TestFolder folder;
  const auto file = folder.path() / "f";
  {
    FileWriter writer(file);
    writer.write(bytes_of("0123456789"));
    writer.write_at(2, bytes_of("AB"));
    writer.write(bytes_of("xyz"));
    CHECK(writer.written() == 13);
    CHECK_THROWS_AS(writer.write_at(12, bytes_of("AB")), InternalError);
    writer.finish();
    CHECK_THROWS_AS(writer.write(bytes_of("more")), InternalError);
  }
  CHECK(read_text(file) == "01AB456789xyz");
  CHECK(spipe::file_size(file) == 13);
}

TEST_CASE("a full disk is named with path and bytes") {
  FileWriter writer("/dev/full");
  CHECK_THROWS_WITH(writer.write(bytes_of("hello")),
                    "/dev/full: cannot write 5 bytes: No space left on device; "
                    "free disk space or choose another folder");
}

TEST_CASE("a map shows the file's bytes and moves") {
  const TestFolder folder;
  folder.put("f", "content");
  folder.put("empty", "");
  MappedFile first(folder.path() / "f");
  CHECK(text_of(first.bytes()) == "content");
  MappedFile second(std::move(first));
  CHECK(first.bytes().empty());  // NOLINT(bugprone-use-after-move): the
                                 // moved-from state is what is tested
  CHECK(text_of(second.bytes()) == "content");
  second = MappedFile(folder.path() / "empty");
  CHECK(second.bytes().empty());
  CHECK(second.path() == folder.path() / "empty");
}

TEST_CASE("hashes are xxh3 and the same for bytes and files") {
  CHECK(hash_text(hash64({})) == "2d06800538d394c2");  // XXH3-64 of nothing, from xxHash's own tests
  CHECK(hash_text(0x12ab) == "00000000000012ab");
  const TestFolder folder;
  std::string text(3'000'000, 'q');
  text[2'999'999] = 'r';
  folder.put("f", text);
  CHECK(hash64_file(folder.path() / "f") == hash64(bytes_of(text)));
  text[5] = 'p';
  CHECK(hash64_file(folder.path() / "f") != hash64(bytes_of(text)));
}

TEST_CASE("a disk has free bytes") { CHECK(free_disk_bytes(std::filesystem::temp_directory_path()) > 0); }
