// Memory of an exact size whose edges are watched, filled with NaN so that a read before a write shows.
#pragma once

#include <cstdint>
#include <memory>

namespace spipe::test {

class GuardedBuffer {
 public:
  explicit GuardedBuffer(std::uint64_t bytes);
  [[nodiscard]] void* data() const { return storage_.get() + kGuard; }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }
  void poison();                      // every byte 0xFF: NaN in fp32 and bf16
  [[nodiscard]] bool intact() const;  // nothing was written outside

 private:
  static constexpr std::uint64_t kGuard = 256;
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte[], Free> storage_;
  std::uint64_t bytes_ = 0;
};

}  // namespace spipe::test
