// Memory shared by the ranks of a host: one anonymous file of the host's first rank, which the others open through /proc, so
// that no name is left behind anywhere. Everything in it lies at static offsets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spipe/base/counter.h"

namespace spipe::comm {

class World;

// Names and offsets, the same on every rank of a host; pure, so that its size is known before anything exists.
class RegionLayout {
 public:
  static constexpr std::uint64_t kAlignment = 4096;
  // Adds a part that starts at a page; returns its offset. Names are unique.
  std::uint64_t add(std::string name, std::uint64_t bytes);
  std::uint64_t add_counters(std::string name, std::uint64_t count);
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }
  struct Part {
    std::string name;
    std::uint64_t offset = 0, bytes = 0;
    bool operator==(const Part&) const = default;
  };
  [[nodiscard]] const std::vector<Part>& parts() const { return parts_; }
  [[nodiscard]] const Part& find(std::string_view name) const;  // SPIPE_CHECKs that it is there

 private:
  std::vector<Part> parts_;
  std::uint64_t bytes_ = 0;
};

class HostRegion {
 public:
  // Collective over all ranks of the world; layouts may differ between hosts, not within one. Zero-filled, reserved and touched
  // in full (each rank touches its part). Throws Error when the memory cannot be had.
  HostRegion(World& world, RegionLayout layout);
  ~HostRegion();
  HostRegion(const HostRegion&) = delete;
  HostRegion& operator=(const HostRegion&) = delete;

  [[nodiscard]] const RegionLayout& layout() const { return layout_; }
  [[nodiscard]] std::span<std::byte> bytes(std::string_view name) const;
  [[nodiscard]] std::span<Counter> counters(std::string_view name) const;

 private:
  RegionLayout layout_;
  std::byte* base_ = nullptr;
};

}  // namespace spipe::comm
