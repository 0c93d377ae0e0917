// The store's memory: an anonymous file that other processes of the host can map later, allocated in full before training
// starts so that no page fault can fail in the middle of a step.
#include "spipe/store/store.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "spipe/base/error.h"
#include "spipe/base/host.h"
#include "spipe/base/units.h"

namespace spipe::store {
namespace {

constexpr std::uintptr_t kPageBytes = 4096;
constexpr const char* kHint = "use a smaller model, a lower precision, or a host with more memory";

[[noreturn]] void fail(std::uint64_t bytes, const std::string& reason) {
  throw Error("the store needs " + format_bytes(bytes) + " (" + std::to_string(bytes) + " bytes) of host memory: " + reason,
              "store", kHint);
}

struct Descriptor {
  int fd = -1;
  ~Descriptor() {
    if (fd >= 0) {
      ::close(fd);
    }
  }
};

// Makes every page present now. The pages were reserved, so a write cannot fail later; it only costs its fault here.
void touch(std::byte* base, std::uint64_t bytes) {
#ifdef MADV_POPULATE_WRITE
  if (::madvise(base, bytes, MADV_POPULATE_WRITE) == 0) {
    return;
  }
#endif
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  for (std::uint64_t at = 0; at < bytes; at += page) {
    static_cast<volatile std::byte*>(base)[at] = std::byte{0};
  }
}

std::byte* allocate(std::uint64_t bytes) {
  const HostMemory memory = host_memory();
  if (bytes > memory.available) {
    fail(bytes, "only " + format_bytes(memory.available) + " are available (" + memory.bound + ")");
  }
  Descriptor file{::memfd_create("spipe-store", MFD_CLOEXEC)};
  if (file.fd < 0) {
    fail(bytes, std::string("memfd_create: ") + std::strerror(errno));
  }
  if (::ftruncate(file.fd, static_cast<off_t>(bytes)) != 0) {
    fail(bytes, std::string("ftruncate: ") + std::strerror(errno));
  }
  int status = EINTR;
  while (status == EINTR) {
    status = ::posix_fallocate(file.fd, 0, static_cast<off_t>(bytes));
  }
  if (status != 0) {
    fail(bytes, std::string("posix_fallocate: ") + std::strerror(status));
  }
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd, 0);
  if (base == MAP_FAILED) {
    fail(bytes, std::string("mmap: ") + std::strerror(errno));
  }
  touch(static_cast<std::byte*>(base), bytes);
  return static_cast<std::byte*>(base);
}

void check_layout(const model::ModelShape& shape, const StoreLayout& layout) {
  SPIPE_CHECK(layout.elements.size() == shape.store_units.size(), "the layout belongs to another model");
  for (std::size_t unit = 0; unit < shape.store_units.size(); ++unit) {
    SPIPE_CHECK(layout.elements[unit] == shape.store_units[unit].elements, "the layout belongs to another model");
  }
}

}  // namespace

Store::Store(const model::ModelShape& shape, StoreLayout layout) : layout_(std::move(layout)) {
  check_layout(shape, layout_);
  own_versions_.assign(shape.store_units.size(), 0);
  versions_ = own_versions_.data();
  if (layout_.bytes > 0) {
    base_ = allocate(layout_.bytes);
    owns_ = true;
  }
}

Store::Store(const model::ModelShape& shape, StoreLayout layout, StorePlace place)
    : layout_(std::move(layout)), base_(place.base), versions_(place.versions) {
  check_layout(shape, layout_);
  SPIPE_CHECK(reinterpret_cast<std::uintptr_t>(base_) % kPageBytes == 0, "a store starts at a page");
  SPIPE_CHECK(layout_.bytes == 0 || (base_ != nullptr && versions_ != nullptr), "a store without its place");
}

Store::~Store() {
  if (owns_) {
    ::munmap(base_, layout_.bytes);
  }
}

Ptr Store::slab(int unit, Plane plane, int slot) const {
  return {base_ + layout_.offset(unit, plane, slot), format().dtype(plane)};
}

float* Store::master(int unit) const {
  SPIPE_CHECK(!format().split_master, "a split master has no fp32 plane");
  const Ptr slab = this->slab(unit, format().separate_master ? Plane::master : Plane::compute);
  SPIPE_CHECK(slab.dtype == DType::f32, "a store without a master plane computes in fp32");
  return static_cast<float*>(slab.data);
}

void Store::read_master(int unit, std::uint64_t first, std::span<float> values) const {
  if (!format().split_master) {
    std::memcpy(values.data(), master(unit) + first, values.size_bytes());
    return;
  }
  const auto* copy = static_cast<const std::uint16_t*>(slab(unit, Plane::compute).data) + first;
  const auto* low = static_cast<const std::uint16_t*>(slab(unit, Plane::master).data) + first;
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = f32_from_halves(copy[i], low[i]);
}

std::uint64_t Store::write_master(int unit, std::uint64_t first, std::span<const float> values) {
  if (format().split_master) {
    auto* low = static_cast<std::uint16_t*>(slab(unit, Plane::master).data) + first;
    for (std::size_t i = 0; i < values.size(); ++i) low[i] = low_half(values[i]);
  } else {
    std::memmove(master(unit) + first, values.data(), values.size_bytes());  // may be the master itself
  }
  if (format().compute == DType::f32) return 0;
  const bool bf16 = format().compute == DType::bf16;
  const std::uint16_t exponent = bf16 ? 0x7f80 : 0x7c00;
  auto* copy = static_cast<std::uint16_t*>(slab(unit, Plane::compute).data) + first;
  std::uint64_t overflows = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    copy[i] = bf16 ? bf16_from_f32_half_up(values[i]) : f16_from_f32(values[i]);
    if ((copy[i] & exponent) == exponent && std::isfinite(values[i])) ++overflows;
  }
  return overflows;
}

std::uint64_t& Store::word(int unit) const {
  SPIPE_CHECK(unit >= 0 && static_cast<std::size_t>(unit) < layout_.elements.size(), "no such store unit");
  return versions_[unit];
}

std::uint64_t Store::version(int unit) const { return std::atomic_ref(word(unit)).load(std::memory_order_acquire) / 2; }

int Store::slot(int unit) const { return static_cast<int>(std::atomic_ref(word(unit)).load(std::memory_order_acquire) % 2); }

void Store::set_version(int unit, std::uint64_t version) {
  const auto slot = static_cast<std::uint64_t>(this->slot(unit));
  std::atomic_ref(word(unit)).store(2 * version + slot, std::memory_order_release);
}

void Store::commit_other_slot(int unit, std::uint64_t version) {
  SPIPE_CHECK(layout_.slots(unit) == 2, "the unit has one slot");
  const auto slot = static_cast<std::uint64_t>(1 - this->slot(unit));
  std::atomic_ref(word(unit)).store(2 * version + slot, std::memory_order_release);
}

}  // namespace spipe::store
