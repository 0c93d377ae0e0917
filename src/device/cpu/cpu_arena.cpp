#include "src/device/cpu/cpu_arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/base/host.h"
#include "spipe/base/units.h"

namespace spipe::device {
namespace {

constexpr std::uint64_t kHugePage = std::uint64_t{2} << 20;

[[noreturn]] void fail(std::uint64_t bytes, const std::string& reason) {
  throw Error("device memory of " + format_bytes(bytes) + " (" + std::to_string(bytes) + " bytes) cannot be had: " + reason,
              "cpu device", "lower device.memory or free memory on this host");
}

}  // namespace

CpuArena::CpuArena(std::uint64_t bytes) : bytes_(bytes) {
  if (bytes == 0) {
    return;
  }
  const HostMemory memory = host_memory();
  if (bytes > memory.available) {
    fail(bytes, "only " + format_bytes(memory.available) + " are available (" + memory.bound + ")");
  }
  // One huge page more than asked for leaves room to align; what is not touched costs no memory.
  mapping_bytes_ = round_up(bytes, kHugePage) + kHugePage;
  mapping_ = ::mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    fail(bytes, std::string("mmap: ") + std::strerror(errno));
  }
  const auto start = reinterpret_cast<std::uintptr_t>(mapping_);
  data_ = static_cast<std::byte*>(mapping_) + (round_up(start, kHugePage) - start);
  // Only a hint: a kernel without huge pages gives small ones.
  (void)::madvise(data_, round_up(bytes, kHugePage), MADV_HUGEPAGE);
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  for (std::uint64_t at = 0; at < bytes; at += page) {
    static_cast<volatile std::byte*>(data_)[at] = std::byte{0};
  }
}

CpuArena::~CpuArena() {
  if (mapping_ != nullptr) {
    ::munmap(mapping_, mapping_bytes_);
  }
}

void* CpuArena::at(std::uint64_t offset, std::uint64_t bytes) const {
  SPIPE_CHECK(offset <= bytes_ && bytes <= bytes_ - offset, "device bytes [" + std::to_string(offset) + ", +" +
                                                                std::to_string(bytes) + ") are outside the arena of " +
                                                                std::to_string(bytes_));
  return data_ + offset;
}

}  // namespace spipe::device
