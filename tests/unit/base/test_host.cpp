// CPU quota and memory limits from fake /proc and /sys files: containers tell the truth only there.
#include <catch2/catch.hpp>

#include "spipe/base/error.h"
#include "spipe/base/host.h"
#include "test_folder.h"

using namespace spipe;

namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

// 1000 MiB of memory, 800 available, and the given line(s) of /proc/self/cgroup.
void put_host(const TestFolder& root, const std::string& cgroup) {
  root.put("proc/meminfo", "MemTotal:        1024000 kB\nMemFree:  1 kB\nMemAvailable:     819200 kB\n");
  if (!cgroup.empty()) root.put("proc/self/cgroup", cgroup);
}

}  // namespace

TEST_CASE("a CPU quota of cgroup v2 gives whole CPUs, at least one") {
  const auto quota = [](const std::string& text) {
    const TestFolder root;
    put_host(root, "0::/job\n");
    root.put("sys/fs/cgroup/job/cpu.max", text);
    return cpu_quota(root.path());
  };
  CHECK(quota("400000 100000\n") == 4);
  CHECK(quota("765000 100000\n") == 7);
  CHECK(quota("50000 100000\n") == 1);
  CHECK(quota("max 100000\n") == std::nullopt);
  CHECK(quota("200000\n") == 2);  // the period may be left out: 100 ms
  CHECK(quota("") == std::nullopt);
  CHECK(quota("nonsense") == std::nullopt);
  CHECK(quota("100000 0\n") == std::nullopt);
}

TEST_CASE("no cgroup files, no quota") {
  const TestFolder root;
  put_host(root, "");
  CHECK(cpu_quota(root.path()) == std::nullopt);
  put_host(root, "0::/job\n");
  CHECK(cpu_quota(root.path()) == std::nullopt);
  CHECK(usable_cpus(root.path()) >= 1);
}

TEST_CASE("the tightest of a cgroup and its parents counts") {
  const TestFolder root;
  put_host(root, "0::/outer/inner\n");
  root.put("sys/fs/cgroup/outer/inner/cpu.max", "800000 100000\n");
  CHECK(cpu_quota(root.path()) == 8);
  root.put("sys/fs/cgroup/outer/cpu.max", "300000 100000\n");
  CHECK(cpu_quota(root.path()) == 3);
  root.put("sys/fs/cgroup/other/cpu.max", "100000 100000\n");  // not ours
  CHECK(cpu_quota(root.path()) == 3);
  root.put("sys/fs/cgroup/cpu.max", "100000 100000\n");  // a container's own group is mounted as the root
  CHECK(cpu_quota(root.path()) == 1);
  CHECK(usable_cpus(root.path()) == 1);
}

TEST_CASE("a CPU quota of cgroup v1") {
  const auto quota = [](const std::string& cgroup, const std::string& mount, const std::string& text) {
    const TestFolder root;
    put_host(root, cgroup);
    root.put("sys/fs/cgroup/" + mount + "/cpu.cfs_quota_us", text);
    root.put("sys/fs/cgroup/" + mount + "/cpu.cfs_period_us", "100000\n");
    return cpu_quota(root.path());
  };
  CHECK(quota("3:cpu:/docker/1\n", "cpu/docker/1", "400000\n") == 4);
  CHECK(quota("3:cpu:/docker/1\n", "cpu/docker/1", "-1\n") == std::nullopt);
  CHECK(quota("4:cpu,cpuacct:/a\n", "cpu,cpuacct/a", "250000\n") == 2);
  CHECK(quota("4:cpu,cpuacct:/a\n", "cpu/a", "250000\n") == 2);
  CHECK(quota("4:cpu,cpuacct:/a\n", "cpu", "150000\n") == 1);  // the host's path is not visible inside
  CHECK(quota("4:cpuset:/a\n", "cpuset/a", "150000\n") == std::nullopt);
}

TEST_CASE("without a limit MemAvailable bounds the memory") {
  const TestFolder root;
  put_host(root, "0::/\n");
  root.put("sys/fs/cgroup/memory.max", "max\n");
  const HostMemory memory = host_memory(root.path());
  CHECK(memory.total == 1000 * kMiB);
  CHECK(memory.available == 800 * kMiB);
  CHECK(memory.bound == "MemAvailable");
}

TEST_CASE("a memory limit of cgroup v2 counts less what is used, without the cache it can give back") {
  const TestFolder root;
  put_host(root, "0::/a/b\n");
  root.put("sys/fs/cgroup/a/b/memory.max", std::to_string(500 * kMiB) + "\n");
  root.put("sys/fs/cgroup/a/b/memory.current", std::to_string(200 * kMiB) + "\n");
  HostMemory memory = host_memory(root.path());
  CHECK(memory.available == 300 * kMiB);
  CHECK_THAT(memory.bound, Catch::StartsWith("cgroup v2 ") && Catch::EndsWith("/sys/fs/cgroup/a/b"));
  root.put("sys/fs/cgroup/a/b/memory.stat", "anon 5\ninactive_file " + std::to_string(150 * kMiB) + "\n");
  CHECK(host_memory(root.path()).available == 450 * kMiB);
  root.put("sys/fs/cgroup/a/memory.max", std::to_string(100 * kMiB) + "\n");  // a tighter parent
  root.put("sys/fs/cgroup/a/memory.current", std::to_string(60 * kMiB) + "\n");
  memory = host_memory(root.path());
  CHECK(memory.available == 40 * kMiB);
  CHECK_THAT(memory.bound, Catch::EndsWith("/sys/fs/cgroup/a"));
  root.put("sys/fs/cgroup/a/memory.current", std::to_string(160 * kMiB) + "\n");  // over its limit
  CHECK(host_memory(root.path()).available == 0);
}

TEST_CASE("a memory limit of cgroup v1, also in hybrid mode") {
  const TestFolder root;
  put_host(root, "9:name=systemd:/\n4:memory:/job\n0::/\n");
  root.put("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n");  // v1's "no limit"
  root.put("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "1000\n");
  CHECK(host_memory(root.path()).bound == "MemAvailable");
  root.put("sys/fs/cgroup/memory/job/memory.limit_in_bytes", std::to_string(64 * kMiB) + "\n");
  root.put("sys/fs/cgroup/memory/job/memory.usage_in_bytes", std::to_string(32 * kMiB) + "\n");
  root.put("sys/fs/cgroup/memory/job/memory.stat", "total_inactive_file " + std::to_string(8 * kMiB) + "\n");
  const HostMemory memory = host_memory(root.path());
  CHECK(memory.available == 40 * kMiB);
  CHECK_THAT(memory.bound, Catch::StartsWith("cgroup v1 "));
}

TEST_CASE("no /proc is an error that says so") {
  const TestFolder root;
  CHECK_THROWS_WITH(host_memory(root.path()),
                    Catch::Contains("proc/meminfo: no MemTotal and MemAvailable here; is /proc mounted?"));
}

TEST_CASE("this host has CPUs, memory and a name") {
  CHECK(usable_cpus() >= 1);
  CHECK(host_memory().total >= host_memory().available);
  CHECK(host_memory().available > 0);
  CHECK_FALSE(cpu_model_name().empty());
  CHECK(process_pss_bytes() > 100'000);
}
