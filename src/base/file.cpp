#include "spipe/base/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "spipe/base/checked.h"
#include "spipe/base/error.h"

namespace spipe {
namespace {

// Call at once after the failing system call: reads errno.
[[noreturn]] void fail(const std::string& action, const Path& path, std::string hint = {}) {
  const int reason = errno;
  throw Error("cannot " + action + ": " + std::strerror(reason), path.string(), std::move(hint));
}

class Descriptor {
 public:
  Descriptor(const Path& path, int flags, mode_t mode = 0) : fd_(::open(path.c_str(), flags | O_CLOEXEC, mode)) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  [[nodiscard]] int fd() const { return fd_; }

 private:
  int fd_;
};

struct stat regular_file_status(int fd, const Path& path) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) fail("read the size", path);
  if (!S_ISREG(status.st_mode)) throw Error("is not a regular file", path.string());
  return status;
}

Path folder_of(const Path& path) { return path.has_parent_path() ? path.parent_path() : Path("."); }

void write_all(int fd, const Path& path, std::uint64_t offset, std::span<const std::byte> bytes) {
  const std::size_t asked = bytes.size();
  while (!bytes.empty()) {
    const ssize_t done = ::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (done < 0) {
      if (errno == EINTR) continue;
      const bool full = errno == ENOSPC || errno == EDQUOT;
      fail("write " + std::to_string(asked) + " bytes", path, full ? "free disk space or choose another folder" : "");
    }
    offset += static_cast<std::uint64_t>(done);
    bytes = bytes.subspan(static_cast<std::size_t>(done));
  }
}

}  // namespace

std::string read_text(const Path& path) {
  const Descriptor file(path, O_RDONLY);
  if (file.fd() < 0) fail("open", path);
  struct stat status {};
  if (::fstat(file.fd(), &status) != 0) fail("read the size", path);
  if (S_ISDIR(status.st_mode)) throw Error("is a folder, not a file", path.string());
  // Read to the end rather than to st_size: files of /proc and pipes say 0.
  std::string text;
  std::size_t length = 0;
  for (;;) {
    if (text.size() - length < 4096)
      text.resize(std::max<std::size_t>(text.size() * 2, static_cast<std::size_t>(status.st_size) + 8192));
    const ssize_t got = ::read(file.fd(), text.data() + length, text.size() - length);
    if (got < 0) {
      if (errno == EINTR) continue;
      fail("read", path);
    }
    if (got == 0) break;
    length += static_cast<std::size_t>(got);
  }
  text.resize(length);
  return text;
}

void write_text_atomic(const Path& path, std::string_view text) {
  Path temporary = path;
  temporary += ".tmp-" + std::to_string(::getpid());
  try {
    FileWriter writer(temporary);
    writer.write(std::as_bytes(std::span(text)));
    writer.finish();
    if (::rename(temporary.c_str(), path.c_str()) != 0) fail("replace", path);
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
  fsync_directory(folder_of(path));
}

void fsync_directory(const Path& path) {
  const Descriptor folder(path, O_RDONLY | O_DIRECTORY);
  if (folder.fd() < 0) fail("open", path);
  // Some network file systems cannot sync a folder and say EINVAL; there is nothing better to do there.
  if (::fsync(folder.fd()) != 0 && errno != EINVAL) fail("sync", path);
}

std::uint64_t file_size(const Path& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) fail("read the size", path);
  if (!S_ISREG(status.st_mode)) throw Error("is not a regular file", path.string());
  return static_cast<std::uint64_t>(status.st_size);
}

std::uint64_t free_disk_bytes(const Path& path) {
  struct statvfs status {};
  if (::statvfs(path.c_str(), &status) != 0) fail("read the free disk space", path);
  return checked_mul(status.f_bavail, status.f_frsize);
}

FileWriter::FileWriter(Path path) : path_(std::move(path)) {
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd_ < 0) fail("create", path_);
}

FileWriter::~FileWriter() {
  if (fd_ >= 0) ::close(fd_);
}

void FileWriter::write(std::span<const std::byte> bytes) {
  SPIPE_CHECK(fd_ >= 0, "write after finish: " + path_.string());
  write_all(fd_, path_, written_, bytes);
  written_ += bytes.size();
}

void FileWriter::write_at(std::uint64_t offset, std::span<const std::byte> bytes) {
  SPIPE_CHECK(fd_ >= 0, "write after finish: " + path_.string());
  SPIPE_CHECK(checked_add(offset, bytes.size()) <= written_, "write_at patches what was written: " + path_.string());
  write_all(fd_, path_, offset, bytes);
}

void FileWriter::finish() {
  SPIPE_CHECK(fd_ >= 0, "finish twice: " + path_.string());
  const int fd = std::exchange(fd_, -1);
  const bool synced = ::fsync(fd) == 0 || errno == EINVAL;  // EINVAL: pipes and devices have nothing to sync
  const int sync_error = errno;
  const bool closed = ::close(fd) == 0;
  if (!synced) {
    errno = sync_error;
    fail("sync " + std::to_string(written_) + " bytes", path_);
  }
  if (!closed) fail("close after " + std::to_string(written_) + " bytes", path_);
}

MappedFile::MappedFile(const Path& path) : path_(path) {
  const Descriptor file(path, O_RDONLY);
  if (file.fd() < 0) fail("open", path);
  size_ = static_cast<std::size_t>(regular_file_status(file.fd(), path).st_size);
  if (size_ == 0) return;
  void* mapped = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.fd(), 0);
  if (mapped == MAP_FAILED) fail("map " + std::to_string(size_) + " bytes", path);
  data_ = static_cast<const std::byte*>(mapped);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace spipe
