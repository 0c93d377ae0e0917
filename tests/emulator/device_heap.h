// The emulated device's memory and what is known of each of its bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace spipe::emulator {

// What is remembered of one byte: who wrote it last and who read it since (machine.h, Stamp). Small values of `write` are
// marks.
struct ShadowCell {
  std::uint64_t write = 0;
  std::uint64_t read = 0;
};
inline constexpr std::uint64_t kUnwritten = 0;  // allocated, nothing there yet
inline constexpr std::uint64_t kForbidden = 1;  // kernels must not touch it
inline constexpr std::uint64_t kFromHost = 2;   // written by the host
inline constexpr std::uint64_t kLastMark = kFromHost;

struct Allocation {
  std::byte* begin = nullptr;
  std::size_t bytes = 0;  // 0: none
};

// One reserved range of addresses. Every allocation has pages of its own with an untouchable page on either side, starts on a
// multiple of 256 (as cudaMalloc's) and is full of 0xff (NaN in every float type). Host functions; not for several threads.
class DeviceHeap {
 public:
  static constexpr std::size_t kBytes = std::size_t{2} << 30;
  DeviceHeap();
  ~DeviceHeap();
  DeviceHeap(const DeviceHeap&) = delete;
  DeviceHeap& operator=(const DeviceHeap&) = delete;

  [[nodiscard]] std::byte* allocate(std::size_t bytes);  // InternalError when the range is used up
  void release(void* pointer);                           // the start of an allocation
  // Copies that the host makes; the range must lie in one allocation (InternalError otherwise).
  void upload(void* device, const void* host, std::size_t bytes);
  void download(void* host, const void* device, std::size_t bytes) const;
  void fill(void* device, int value, std::size_t bytes);
  // From here on the bytes count as never written, or as not to be touched by kernels.
  void poison(void* device, std::size_t bytes);
  void forbid(void* device, std::size_t bytes);
  // How many bytes of the range nobody has written since it was allocated or poisoned.
  [[nodiscard]] std::size_t unwritten(const void* device, std::size_t bytes) const;

  [[nodiscard]] bool holds(const std::byte* address) const { return static_cast<std::size_t>(address - base_) < kBytes; }
  // The allocation on whose pages the address lies; bytes = 0 when there is none.
  [[nodiscard]] const Allocation& around(const std::byte* address) const {
    return of_page_[static_cast<std::size_t>(address - base_) / kPage];
  }
  [[nodiscard]] ShadowCell* shadow(const std::byte* address) const { return shadow_ + (address - base_); }
  // "4 bytes past the end of an allocation of 400 bytes"
  [[nodiscard]] std::string describe(const std::byte* address) const;

 private:
  static constexpr std::size_t kPage = 4096;
  void mark(const void* device, std::size_t bytes, std::uint64_t mark) const;
  void check_range(const void* device, std::size_t bytes) const;

  std::byte* base_ = nullptr;
  ShadowCell* shadow_ = nullptr;
  std::vector<Allocation> of_page_;
  std::size_t next_page_ = 1;                          // pages beyond were never used
  std::vector<std::vector<std::size_t>> free_starts_;  // by number of pages
};

}  // namespace spipe::emulator
