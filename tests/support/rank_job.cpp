#include "rank_job.h"

#include <fmt/core.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "spipe/base/file.h"

namespace spipe::test {
namespace {

std::vector<std::string> command(const std::filesystem::path& binary, const RankShape& shape, std::vector<std::string> more) {
  std::vector<std::string> list = {fmt::format("SPIPE_FAKE_HOSTS={}", shape.hosts),
                                   "OMPI_ALLOW_RUN_AS_ROOT=1",
                                   "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
                                   "mpirun",
                                   "--bind-to",
                                   "none",
                                   "--oversubscribe",
                                   "-np",
                                   std::to_string(shape.ranks),
                                   binary.string()};
  list.insert(list.end(), more.begin(), more.end());
  return list;
}

}  // namespace

std::string file_of_process(pid_t pid, const char* name) {
  std::ifstream file(fmt::format("/proc/{}/{}", pid, name), std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<pid_t> processes_of(const std::filesystem::path& folder) {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const pid_t pid = std::stoi(name);
    if (pid != getpid() && file_of_process(pid, "cmdline").find(folder.string()) != std::string::npos) found.push_back(pid);
  }
  return found;
}

bool wait_until(double seconds, const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    sleep_seconds(0.01);
  }
  return true;
}

RankJob::RankJob(const std::filesystem::path& binary, const std::filesystem::path& folder, const RankShape& shape,
                 std::vector<std::string> arguments)
    : folder_(folder), program_("/usr/bin/env", command(binary, shape, std::move(arguments)), folder) {}

RankJob::~RankJob() {
  for (const pid_t pid : processes_of(folder_)) kill(pid, SIGKILL);
}

bool RankJob::await_step(int step, double seconds) {
  const std::string text = fmt::format("\"step\":{},", step);
  const std::filesystem::path metrics = folder_ / "run" / "metrics.jsonl";
  const auto there = [&] { return std::filesystem::exists(metrics) && read_text(metrics).find(text) != std::string::npos; };
  return wait_until(seconds, [&] { return there() || !program_.running(); }) && program_.running();
}

pid_t RankJob::pid_of(int rank) const {
  const std::string variable = fmt::format("OMPI_COMM_WORLD_RANK={}", rank) + '\0';
  for (const pid_t pid : processes_of(folder_)) {
    if (file_of_process(pid, "environ").find(variable) != std::string::npos) return pid;
  }
  throw std::runtime_error(fmt::format("no process of rank {}", rank));
}

ProgramResult RankJob::wait(double seconds) {
  if (wait_until(seconds, [&] { return !program_.running() && processes_of(folder_).empty(); })) return program_.wait();
  throw std::runtime_error("the job did not end: " + read_text(folder_ / "stdout") + read_text(folder_ / "stderr"));
}

}  // namespace spipe::test
