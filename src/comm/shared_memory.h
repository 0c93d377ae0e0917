// An anonymous file mapped shared: made by one process, opened by others of the machine through /proc/<pid>/fd.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace spipe::comm {

class SharedMemory {
 public:
  SharedMemory() = default;
  ~SharedMemory();
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  // Zero-filled, reserved in full. Both throw Error saying what it is for.
  [[nodiscard]] static SharedMemory create(const char* name, std::uint64_t bytes);
  [[nodiscard]] static SharedMemory open(const char* name, int pid, int fd, std::uint64_t bytes);

  [[nodiscard]] std::byte* base() const { return base_; }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }
  [[nodiscard]] int fd() const { return fd_; }
  void close_fd();                                     // others can no longer open it; the mapping stays
  void touch(std::uint64_t begin, std::uint64_t end);  // makes the pages present now
  [[nodiscard]] std::byte* release();                  // the caller unmaps

 private:
  void map(const char* name);
  std::byte* base_ = nullptr;
  std::uint64_t bytes_ = 0;
  int fd_ = -1;
};

}  // namespace spipe::comm
