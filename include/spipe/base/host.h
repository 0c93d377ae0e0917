// What this host offers: CPUs within affinity and cgroup quota, memory within cgroup limits.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace spipe {

struct HostMemory {
  std::uint64_t total = 0;      // bytes of RAM
  std::uint64_t available = 0;  // min(MemAvailable, cgroup limit - usage, own and parents, v1 and v2)
  std::string bound;            // which of them decided: "MemAvailable", "cgroup v2 /sys/fs/..."
};

// `root` is prefixed to /proc and /sys paths (tests pass a folder of fake files; "/" in production).
[[nodiscard]] HostMemory host_memory(const std::filesystem::path& root = "/");
// max(1, min(affinity mask, floor of the CPU quota)); the quota of the own cgroup and its parents, v1 and v2.
[[nodiscard]] int usable_cpus(const std::filesystem::path& root = "/");
// Whole CPUs (at least 1) that the tightest of those quotas allows; nothing when none is set.
[[nodiscard]] std::optional<int> cpu_quota(const std::filesystem::path& root = "/");
[[nodiscard]] std::string cpu_model_name();
[[nodiscard]] std::uint64_t process_pss_bytes();  // proportional set size of this process (smaps_rollup)

}  // namespace spipe
