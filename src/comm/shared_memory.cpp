#include "shared_memory.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "spipe/base/error.h"
#include "spipe/base/host.h"
#include "spipe/base/units.h"

namespace spipe::comm {
namespace {

constexpr const char* kHint = "use a smaller model, fewer ranks a host, or a host with more memory";

[[noreturn]] void fail(const char* name, std::uint64_t bytes, const std::string& reason) {
  throw Error(fmt::format("{} ({} bytes) of shared host memory: {}", format_bytes(bytes), bytes, reason), name, kHint);
}

}  // namespace

SharedMemory::~SharedMemory() {
  close_fd();
  if (base_ != nullptr) ::munmap(base_, bytes_);
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), bytes_(std::exchange(other.bytes_, 0)), fd_(std::exchange(other.fd_, -1)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  std::swap(fd_, other.fd_);
  return *this;
}

void SharedMemory::map(const char* name) {
  void* const base = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (base == MAP_FAILED) fail(name, bytes_, std::string("mmap: ") + std::strerror(errno));
  base_ = static_cast<std::byte*>(base);
}

SharedMemory SharedMemory::create(const char* name, std::uint64_t bytes) {
  const HostMemory memory = host_memory();
  if (bytes > memory.available) {
    fail(name, bytes, fmt::format("only {} are available ({})", format_bytes(memory.available), memory.bound));
  }
  SharedMemory made;
  made.bytes_ = bytes;
  made.fd_ = ::memfd_create(name, MFD_CLOEXEC);
  if (made.fd_ < 0) fail(name, bytes, std::string("memfd_create: ") + std::strerror(errno));
  if (::ftruncate(made.fd_, static_cast<off_t>(bytes)) != 0) {
    fail(name, bytes, std::string("ftruncate: ") + std::strerror(errno));
  }
  // Reserved now, so that no page fault can fail (as SIGBUS) in the middle of a step.
  int status = EINTR;
  while (status == EINTR) status = ::posix_fallocate(made.fd_, 0, static_cast<off_t>(bytes));
  if (status != 0) fail(name, bytes, std::string("posix_fallocate: ") + std::strerror(status));
  made.map(name);
  return made;
}

SharedMemory SharedMemory::open(const char* name, int pid, int fd, std::uint64_t bytes) {
  SharedMemory opened;
  opened.bytes_ = bytes;
  const std::string path = fmt::format("/proc/{}/fd/{}", pid, fd);
  opened.fd_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened.fd_ < 0) {
    throw Error(fmt::format("cannot open the shared memory of process {}: {}", pid, std::strerror(errno)), path,
                "the ranks of a host must run as one user and see each other's processes");
  }
  opened.map(name);
  return opened;
}

void SharedMemory::close_fd() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

void SharedMemory::touch(std::uint64_t begin, std::uint64_t end) {
  SPIPE_CHECK(begin <= end && end <= bytes_, "touching outside the shared memory");
  if (begin == end) return;
#ifdef MADV_POPULATE_WRITE
  if (::madvise(base_ + begin, end - begin, MADV_POPULATE_WRITE) == 0) return;
#endif
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  // Reads only: other ranks may be writing already, and reserved pages cannot fail later.
  for (std::uint64_t at = begin; at < end; at += page) (void)static_cast<volatile std::byte*>(base_)[at];
}

std::byte* SharedMemory::release() {
  close_fd();
  return std::exchange(base_, nullptr);
}

}  // namespace spipe::comm
