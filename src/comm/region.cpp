#include "spipe/comm/region.h"

#include <fmt/core.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#include "shared_memory.h"
#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/comm/world.h"

namespace spipe::comm {
namespace {

struct Offer {
  std::int32_t pid = 0, fd = -1;
  std::uint64_t bytes = 0, parts_hash = 0;
};

std::uint64_t hash_of(const RegionLayout& layout) {
  std::string text;
  for (const RegionLayout::Part& part : layout.parts()) text += fmt::format("{}:{}:{}\n", part.name, part.offset, part.bytes);
  return hash64(std::as_bytes(std::span(text)));
}

}  // namespace

std::uint64_t RegionLayout::add(std::string name, std::uint64_t bytes) {
  for (const Part& part : parts_) SPIPE_CHECK(part.name != name, "two parts of a region named " + name);
  const std::uint64_t offset = bytes_;
  bytes_ = round_up(checked_add(checked_add(offset, bytes), kAlignment), kAlignment) - kAlignment;
  parts_.push_back({.name = std::move(name), .offset = offset, .bytes = bytes});
  return offset;
}

std::uint64_t RegionLayout::add_counters(std::string name, std::uint64_t count) {
  return add(std::move(name), checked_mul(count, sizeof(Counter)));
}

const RegionLayout::Part& RegionLayout::find(std::string_view name) const {
  const auto found = std::ranges::find(parts_, name, &Part::name);
  SPIPE_CHECK(found != parts_.end(), "no part of this region is named " + std::string(name));
  return *found;
}

HostRegion::HostRegion(World& world, RegionLayout layout) : layout_(std::move(layout)) {
  if (layout_.bytes() == 0) layout_.add("empty", 1);
  const std::vector<int>& ranks = world.ranks_of_host(world.host());
  const bool first = ranks.front() == world.rank();
  SharedMemory memory;
  if (first) memory = SharedMemory::create("spipe-host", layout_.bytes());
  const Offer offer{.pid = ::getpid(), .fd = memory.fd(), .bytes = layout_.bytes(), .parts_hash = hash_of(layout_)};
  const auto offers = world.all_gather(std::as_bytes(std::span(&offer, 1)));
  Offer found;
  std::memcpy(&found, offers[static_cast<std::size_t>(ranks.front())].data(), sizeof(Offer));
  SPIPE_CHECK(found.bytes == offer.bytes && found.parts_hash == offer.parts_hash,
              "the ranks of a host disagree about their shared region");
  if (!first) memory = SharedMemory::open("spipe-host", found.pid, found.fd, found.bytes);
  // Each rank touches its part, so that the faults are taken in parallel.
  const auto count = static_cast<std::uint64_t>(world.local_size());
  const auto self = static_cast<std::uint64_t>(world.local_rank());
  const std::uint64_t pages = layout_.bytes() / RegionLayout::kAlignment;
  memory.touch(pages * self / count * RegionLayout::kAlignment, pages * (self + 1) / count * RegionLayout::kAlignment);
  world.barrier();  // everybody has opened it, and no page is missing
  base_ = memory.release();
}

HostRegion::~HostRegion() { ::munmap(base_, layout_.bytes()); }

std::span<std::byte> HostRegion::bytes(std::string_view name) const {
  const RegionLayout::Part& part = layout_.find(name);
  return {base_ + part.offset, part.bytes};
}

std::span<Counter> HostRegion::counters(std::string_view name) const {
  const RegionLayout::Part& part = layout_.find(name);
  SPIPE_CHECK(part.bytes % sizeof(Counter) == 0, part.name + " holds no counters");
  // Zero bytes are counters at zero.
  return {std::launder(reinterpret_cast<Counter*>(base_ + part.offset)), part.bytes / sizeof(Counter)};
}

}  // namespace spipe::comm
