#include "spipe/base/host.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>
#include <vector>

#include "spipe/base/error.h"

namespace spipe {
namespace {

namespace fs = std::filesystem;

// A file of /proc or /sys, or nothing when it is not there (other kernel, no such controller): absence is not an error.
std::optional<std::string> read_optional(const fs::path& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  std::ostringstream text;
  text << file.rdbuf();
  return std::move(text).str();
}

// The first whitespace-separated word as a number; nothing for "max", "-1" or anything else.
std::optional<std::uint64_t> first_number(std::string_view text) {
  std::uint64_t value = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec != std::errc{}) return std::nullopt;
  return value;
}

std::optional<std::uint64_t> read_number(const fs::path& path) {
  const auto text = read_optional(path);
  return text ? first_number(*text) : std::nullopt;
}

// The number after "key" at the start of a line ("MemTotal:  123 kB", "inactive_file 123").
std::optional<std::uint64_t> field(const std::string& text, std::string_view key) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(key)) continue;
    const std::size_t start = line.find_first_not_of(" \t", key.size());
    if (start != std::string::npos) return first_number(std::string_view(line).substr(start));
  }
  return std::nullopt;
}

fs::path under(const fs::path& root, std::string_view absolute) { return root / absolute.substr(1); }

struct CgroupFolders {
  bool v2 = false;
  std::vector<fs::path> folders;  // own first, then its parents up to the mount
};

// The folders of this process for a controller in the mounted hierarchies. In a container the path of /proc/self/cgroup may be
// the host's and not exist below the mount; the mount itself is then the container's group, so it always belongs to the list.
std::vector<CgroupFolders> cgroup_folders(const fs::path& root, std::string_view controller) {
  std::vector<CgroupFolders> found;
  const auto add = [&](bool v2, const fs::path& mount, const std::string& path) {
    CgroupFolders entry{.v2 = v2, .folders = {}};
    for (fs::path relative = fs::path(path).relative_path(); !relative.empty(); relative = relative.parent_path()) {
      entry.folders.push_back(mount / relative);
    }
    entry.folders.push_back(mount);
    found.push_back(std::move(entry));
  };
  const std::string text = read_optional(under(root, "/proc/self/cgroup")).value_or("0::/\n");
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string names = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (names.empty()) {
      add(true, under(root, "/sys/fs/cgroup"), path);
      add(true, under(root, "/sys/fs/cgroup/unified"), path);  // where systemd's hybrid mode puts v2
      continue;
    }
    std::istringstream list(names);
    for (std::string name; std::getline(list, name, ',');) {
      if (name != controller) continue;
      add(false, under(root, "/sys/fs/cgroup/" + names), path);
      if (names != name) add(false, under(root, "/sys/fs/cgroup/" + name), path);
    }
  }
  return found;
}

// Processors that a quota allows, as a real number; nothing when there is none.
std::optional<double> folder_quota(bool v2, const fs::path& folder) {
  std::optional<std::uint64_t> quota, period;
  if (v2) {
    const auto text = read_optional(folder / "cpu.max");
    if (!text) return std::nullopt;
    quota = first_number(*text);
    const std::size_t space = text->find(' ');
    period = space == std::string::npos ? std::optional<std::uint64_t>(100'000)
                                        : first_number(std::string_view(*text).substr(space + 1));
  } else {
    quota = read_number(folder / "cpu.cfs_quota_us");
    period = read_number(folder / "cpu.cfs_period_us");
  }
  if (!quota || !period || *period == 0) return std::nullopt;
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

int affinity_cpus() {
  for (int cpus = 1024; cpus <= 1 << 20; cpus *= 2) {  // the kernel refuses masks smaller than its own
    cpu_set_t* const set = CPU_ALLOC(static_cast<std::size_t>(cpus));
    const std::size_t size = CPU_ALLOC_SIZE(static_cast<std::size_t>(cpus));
    const bool read = sched_getaffinity(0, size, set) == 0;
    const int count = read ? CPU_COUNT_S(size, set) : 0;
    const int reason = errno;
    CPU_FREE(set);
    if (read) return std::max(1, count);
    if (reason != EINVAL) break;
  }
  return 1;
}

}  // namespace

HostMemory host_memory(const fs::path& root) {
  const fs::path meminfo = under(root, "/proc/meminfo");
  const auto text = read_optional(meminfo);
  const auto total = text ? field(*text, "MemTotal:") : std::nullopt;
  const auto available = text ? field(*text, "MemAvailable:") : std::nullopt;
  if (!total || !available) throw Error("no MemTotal and MemAvailable here", meminfo.string(), "is /proc mounted?");
  HostMemory memory{.total = *total * 1024, .available = *available * 1024, .bound = "MemAvailable"};
  for (const CgroupFolders& group : cgroup_folders(root, "memory")) {
    for (const fs::path& folder : group.folders) {
      const auto limit = read_number(folder / (group.v2 ? "memory.max" : "memory.limit_in_bytes"));
      if (!limit) continue;
      const std::uint64_t usage = read_number(folder / (group.v2 ? "memory.current" : "memory.usage_in_bytes")).value_or(0);
      // Cached file pages count as usage but are given back on demand, as in MemAvailable.
      const auto stat = read_optional(folder / "memory.stat");
      const std::uint64_t cache = stat ? field(*stat, group.v2 ? "inactive_file " : "total_inactive_file ").value_or(0) : 0;
      const std::uint64_t used = usage - std::min(usage, cache);
      const std::uint64_t left = *limit - std::min(*limit, used);
      if (left < memory.available) {
        memory.available = left;
        memory.bound = std::string(group.v2 ? "cgroup v2 " : "cgroup v1 ") + folder.string();
      }
    }
  }
  return memory;
}

std::optional<int> cpu_quota(const fs::path& root) {
  std::optional<double> tightest;
  for (const CgroupFolders& group : cgroup_folders(root, "cpu")) {
    for (const fs::path& folder : group.folders) {
      const auto quota = folder_quota(group.v2, folder);
      if (quota && (!tightest || *quota < *tightest)) tightest = quota;
    }
  }
  if (!tightest) return std::nullopt;
  return static_cast<int>(std::clamp(std::floor(*tightest), 1.0, 1e6));
}

int usable_cpus(const fs::path& root) {
  const int cpus = affinity_cpus();
  return std::min(cpus, cpu_quota(root).value_or(cpus));
}

std::string cpu_model_name() {
  const auto text = read_optional("/proc/cpuinfo");
  if (!text) return "unknown";
  std::istringstream lines(*text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("model name")) continue;
    const std::size_t colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

std::uint64_t process_pss_bytes() {
  const auto text = read_optional("/proc/self/smaps_rollup");
  return text ? field(*text, "Pss:").value_or(0) * 1024 : 0;
}

}  // namespace spipe
