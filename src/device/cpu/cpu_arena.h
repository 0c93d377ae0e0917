// Device memory of the CPU device: a private mapping of exactly the planned size, present and zero from the start.
#pragma once

#include "spipe/device/device.h"

namespace spipe::device {

class CpuArena final : public Arena {
 public:
  explicit CpuArena(std::uint64_t bytes);
  ~CpuArena() override;
  CpuArena(const CpuArena&) = delete;
  CpuArena& operator=(const CpuArena&) = delete;
  [[nodiscard]] std::uint64_t bytes() const override { return bytes_; }
  [[nodiscard]] void* at(std::uint64_t offset, std::uint64_t bytes) const override;

 private:
  std::uint64_t bytes_ = 0;
  std::byte* data_ = nullptr;  // 2 MiB aligned
  void* mapping_ = nullptr;
  std::uint64_t mapping_bytes_ = 0;
};

}  // namespace spipe::device
