#include "tests/emulator/device_heap.h"

#include <fmt/core.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "spipe/base/error.h"

namespace spipe::emulator {
namespace {

void* reserve(std::size_t bytes, int protection) {
  void* memory = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  SPIPE_CHECK(memory != MAP_FAILED, "no addresses for the emulated device's memory");
  return memory;
}

}  // namespace

DeviceHeap::DeviceHeap()
    : base_(static_cast<std::byte*>(reserve(kBytes, PROT_NONE))),
      shadow_(static_cast<ShadowCell*>(reserve(kBytes * sizeof(ShadowCell), PROT_READ | PROT_WRITE))),
      of_page_(kBytes / kPage) {}

DeviceHeap::~DeviceHeap() {
  munmap(base_, kBytes);
  munmap(shadow_, kBytes * sizeof(ShadowCell));
}

std::byte* DeviceHeap::allocate(std::size_t bytes) {
  bytes = std::max<std::size_t>(bytes, 1);
  const std::size_t pages = (bytes + kPage - 1) / kPage;
  std::size_t start = 0;
  if (pages < free_starts_.size() && !free_starts_[pages].empty()) {
    start = free_starts_[pages].back();
    free_starts_[pages].pop_back();
  } else {
    SPIPE_CHECK(next_page_ + pages + 1 < of_page_.size(), "the emulated device's memory is used up");
    start = next_page_;
    next_page_ += pages + 1;  // the page behind stays untouchable; so does page 0
  }
  std::byte* memory = base_ + start * kPage;
  SPIPE_CHECK(mprotect(memory, pages * kPage, PROT_READ | PROT_WRITE) == 0, "mprotect of emulated device memory");
  // The end lies as close to the untouchable page as the alignment allows.
  std::byte* begin = memory + (pages * kPage - (bytes + 255) / 256 * 256);
  for (std::size_t page = start; page < start + pages; ++page) of_page_[page] = {begin, bytes};
  std::memset(memory, 0xff, pages * kPage);
  mark(begin, bytes, kUnwritten);
  return begin;
}

void DeviceHeap::release(void* pointer) {
  if (pointer == nullptr) return;
  auto* begin = static_cast<std::byte*>(pointer);
  SPIPE_CHECK(holds(begin) && around(begin).bytes != 0 && around(begin).begin == begin, "release of what was not allocated");
  const std::size_t pages = (around(begin).bytes + kPage - 1) / kPage;
  const std::size_t start = static_cast<std::size_t>(begin - base_) / kPage;
  for (std::size_t page = start; page < start + pages; ++page) of_page_[page] = {};
  std::byte* memory = base_ + start * kPage;
  SPIPE_CHECK(mprotect(memory, pages * kPage, PROT_NONE) == 0, "mprotect of emulated device memory");
  madvise(memory, pages * kPage, MADV_DONTNEED);
  madvise(shadow_ + start * kPage, pages * kPage * sizeof(ShadowCell), MADV_DONTNEED);
  if (free_starts_.size() <= pages) free_starts_.resize(pages + 1);
  free_starts_[pages].push_back(start);
}

void DeviceHeap::check_range(const void* device, std::size_t bytes) const {
  const auto* begin = static_cast<const std::byte*>(device);
  SPIPE_CHECK(holds(begin) && around(begin).bytes != 0, "the host names memory that is not the device's");
  const Allocation& allocation = around(begin);
  SPIPE_CHECK(begin >= allocation.begin && begin + bytes <= allocation.begin + allocation.bytes,
              fmt::format("the host's copy of {} bytes leaves its allocation of {}", bytes, allocation.bytes));
}

void DeviceHeap::mark(const void* device, std::size_t bytes, std::uint64_t mark) const {
  std::fill_n(shadow(static_cast<const std::byte*>(device)), bytes, ShadowCell{mark, 0});
}

void DeviceHeap::upload(void* device, const void* host, std::size_t bytes) {
  if (bytes == 0) return;
  check_range(device, bytes);
  std::memcpy(device, host, bytes);
  mark(device, bytes, kFromHost);
}

void DeviceHeap::download(void* host, const void* device, std::size_t bytes) const {
  if (bytes == 0) return;
  check_range(device, bytes);
  std::memcpy(host, device, bytes);
}

void DeviceHeap::fill(void* device, int value, std::size_t bytes) {
  if (bytes == 0) return;
  check_range(device, bytes);
  std::memset(device, value, bytes);
  mark(device, bytes, kFromHost);
}

void DeviceHeap::poison(void* device, std::size_t bytes) {
  if (bytes == 0) return;
  check_range(device, bytes);
  mark(device, bytes, kUnwritten);
}

void DeviceHeap::forbid(void* device, std::size_t bytes) {
  if (bytes == 0) return;
  check_range(device, bytes);
  mark(device, bytes, kForbidden);
}

std::size_t DeviceHeap::unwritten(const void* device, std::size_t bytes) const {
  if (bytes == 0) return 0;
  check_range(device, bytes);
  const ShadowCell* cells = shadow(static_cast<const std::byte*>(device));
  return static_cast<std::size_t>(
      std::count_if(cells, cells + bytes, [](const ShadowCell& c) { return c.write == kUnwritten; }));
}

std::string DeviceHeap::describe(const std::byte* address) const {
  for (const std::ptrdiff_t page : {0, -1, 1}) {  // the address may lie on the untouchable page beside an allocation
    const std::byte* near = address + page * static_cast<std::ptrdiff_t>(kPage);
    if (!holds(near) || around(near).bytes == 0) continue;
    const Allocation& allocation = around(near);
    const std::byte* end = allocation.begin + allocation.bytes;
    if (address >= end) return fmt::format("{} bytes past the end of an allocation of {}", address - end, allocation.bytes);
    if (address < allocation.begin) {
      return fmt::format("{} bytes before an allocation of {}", allocation.begin - address, allocation.bytes);
    }
    return fmt::format("at byte {} of an allocation of {}", address - allocation.begin, allocation.bytes);
  }
  return "far from any allocation";
}

}  // namespace spipe::emulator
