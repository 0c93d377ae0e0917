// The end of a process that is not our child: newer kernels (6.15) keep it with the pidfd; before that /proc shows it as long
// as nobody has reaped the process.
#include <fmt/core.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <thread>

#include "watch.h"

namespace spipe::comm {
namespace {

// As in the kernel's <linux/pidfd.h>, which older systems lack.
struct PidfdInfo {
  std::uint64_t mask = 0;
  std::uint64_t cgroup = 0;
  std::uint32_t ids[11] = {};  // pid, tgid, ppid and the user and group ids
  std::int32_t exit_code = 0;
};
static_assert(sizeof(PidfdInfo) == 64);
constexpr std::uint64_t kInfoExit = 1U << 3U;
constexpr unsigned long kGetInfo = _IOWR(0xFF, 11, PidfdInfo);

std::optional<int> status_from_pidfd(int pidfd) {
  PidfdInfo info;
  info.mask = kInfoExit;
  if (pidfd < 0 || ::ioctl(pidfd, kGetInfo, &info) != 0 || (info.mask & kInfoExit) == 0) return std::nullopt;
  return info.exit_code;
}

// The last field of /proc/<pid>/stat of a zombie.
std::optional<int> status_from_proc(int pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  const std::size_t name_end = line.rfind(')');
  if (name_end == std::string::npos || name_end + 2 >= line.size() || line[name_end + 2] != 'Z') return std::nullopt;
  std::istringstream last(line.substr(line.rfind(' ')));
  int status = 0;
  if (!(last >> status)) return std::nullopt;
  return status;
}

}  // namespace

std::string how_it_ended(int pid, int pidfd) {
  for (int tries = 0; tries < 20; ++tries) {
    std::optional<int> status = status_from_proc(pid);
    if (!status) status = status_from_pidfd(pidfd);
    if (status && WIFSIGNALED(*status)) return fmt::format("was killed by signal {}", WTERMSIG(*status));
    if (status && WIFEXITED(*status)) return fmt::format("ended with code {}", WEXITSTATUS(*status));
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // between death and burial
  }
  return "died";
}

}  // namespace spipe::comm
