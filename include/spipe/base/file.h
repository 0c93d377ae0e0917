// Files: whole-file reads, atomic writes, memory maps. All functions throw Error naming the path and the system's reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace spipe {

using Path = std::filesystem::path;

[[nodiscard]] std::string read_text(const Path& path);
// Writes `path`.tmp-<pid>, fsyncs, renames over `path`, fsyncs the folder. Either the old or the new content survives a crash.
void write_text_atomic(const Path& path, std::string_view text);
void fsync_directory(const Path& path);
[[nodiscard]] std::uint64_t file_size(const Path& path);
[[nodiscard]] std::uint64_t free_disk_bytes(const Path& path);

// A sequential writer; close() (or the checked end of finish()) reports write errors, the destructor never throws.
class FileWriter {
 public:
  explicit FileWriter(Path path);  // creates or truncates
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;
  void write(std::span<const std::byte> bytes);
  void write_at(std::uint64_t offset, std::span<const std::byte> bytes);  // patch, e.g. a header
  void finish();                                                          // flush, fsync, close
  [[nodiscard]] std::uint64_t written() const { return written_; }

 private:
  Path path_;
  int fd_ = -1;
  std::uint64_t written_ = 0;
};

// A read-only memory map of a whole file (empty files map to an empty span).
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const Path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  [[nodiscard]] std::span<const std::byte> bytes() const { return {data_, size_}; }
  [[nodiscard]] const Path& path() const { return path_; }

 private:
  Path path_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// xxh3-64 of bytes / of a whole file, as used in MANIFEST.json (hex of 16 digits by hash_text).
[[nodiscard]] std::uint64_t hash64(std::span<const std::byte> bytes);
[[nodiscard]] std::uint64_t hash64_file(const Path& path);
[[nodiscard]] std::string hash_text(std::uint64_t hash);

}  // namespace spipe
