// Failures that one of several ranks meets alone: told once, they end all, and the run goes on to the same bits. Kills, signals
// and refusals have scripts of their own.
#include <fmt/core.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <fstream>
#include <iterator>
#include <sstream>

#include "spipe/base/file.h"
#include "spipe/io/checkpoint.h"
#include "tests/support/program.h"
#include "tests/support/tiny_run.h"

using namespace spipe;
using namespace spipe::test;

namespace {

constexpr double kPatience = 120;  // for a job that works, on a machine that does other things
constexpr int kSteps = 300;        // long enough to be met under way

struct Ranks {
  int hosts = 1, ranks = 1;
  const char* schedule = "auto";
};

std::string file_of(pid_t pid, const char* name) {
  std::ifstream file(fmt::format("/proc/{}/{}", pid, name), std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Processes whose command line names the folder: the launcher and the ranks of jobs in it.
std::vector<pid_t> members(const Path& folder) {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const pid_t pid = std::stoi(name);
    if (pid != getpid() && file_of(pid, "cmdline").find(folder.string()) != std::string::npos) found.push_back(pid);
  }
  return found;
}

template <typename Condition>
bool wait_until(double seconds, Condition condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    sleep_seconds(0.01);
  }
  return true;
}

std::vector<std::string> steps_settings(const char* schedule = "auto") {
  return {fmt::format("train.steps={}", kSteps), "device.threads=1", "checkpoint.keep=9",
          std::string("parallel.schedule=") + schedule};
}

// A job under mpirun; whatever of it is left when the test ends is killed.
class Job {
 public:
  Job(const Path& folder, const Ranks& shape, std::vector<std::string> train)
      : folder_(folder), program_("/usr/bin/env", command(shape, std::move(train)), folder) {}
  ~Job() {
    for (const pid_t pid : members(folder_)) kill(pid, SIGKILL);
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // Waits until the step is in the metrics.
  void await_step(int step) {
    const std::string text = fmt::format("\"step\":{},", step);
    REQUIRE(wait_until(kPatience, [&] {
      const Path metrics = folder_ / "run" / "metrics.jsonl";
      const bool there = std::filesystem::exists(metrics) && read_text(metrics).find(text) != std::string::npos;
      return there || !program_.running();
    }));
    REQUIRE(program_.running());
  }

  [[nodiscard]] pid_t pid_of(int rank) const {
    const std::string variable = fmt::format("OMPI_COMM_WORLD_RANK={}", rank) + '\0';
    for (const pid_t pid : members(folder_)) {
      if (file_of(pid, "environ").find(variable) != std::string::npos) return pid;
    }
    FAIL("no process of rank " << rank);
    return -1;
  }

  // All end by themselves within `seconds`.
  ProgramResult wait(double seconds = kPatience) {
    const bool ended = wait_until(seconds, [&] { return !program_.running() && members(folder_).empty(); });
    INFO(read_text(folder_ / "stdout") << read_text(folder_ / "stderr"));
    REQUIRE(ended);
    return program_.wait();
  }

 private:
  static std::vector<std::string> command(const Ranks& shape, std::vector<std::string> train) {
    std::vector<std::string> list = {fmt::format("SPIPE_FAKE_HOSTS={}", shape.hosts), "OMPI_ALLOW_RUN_AS_ROOT=1",
                                     "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"};
    const std::string ranks = std::to_string(shape.ranks);
    const std::vector<std::string> direct = {"mpirun", "--bind-to",       "none", "--oversubscribe", "-np",
                                             ranks,    SPIPE_TRAIN_BINARY};
    list.insert(list.end(), direct.begin(), direct.end());
    list.insert(list.end(), train.begin(), train.end());
    return list;
  }

  Path folder_;
  Program program_;
};

// What the ranks printed to stderr: mpirun's own words stand between lines of dashes.
std::vector<std::string> lines_of_ranks(const std::string& err) {
  std::vector<std::string> lines;
  std::istringstream text(err);
  bool launcher = false;
  for (std::string line; std::getline(text, line);) {
    if (line.starts_with("-----")) {
      launcher = !launcher;
    } else if (!launcher && !line.empty()) {
      lines.push_back(line);
    }
  }
  return lines;
}

// One line tells the cause, and it is the last.
void check_told_once(const ProgramResult& result, int code, const std::vector<std::string>& words) {
  INFO(result.out << result.err);
  CHECK(result.exit_code == code);
  const std::vector<std::string> lines = lines_of_ranks(result.err);
  const auto is_error = [](const std::string& line) { return line.find("error: ") != std::string::npos; };
  CHECK(std::count_if(lines.begin(), lines.end(), is_error) == 1);
  REQUIRE(!lines.empty());
  CHECK(lines.back().starts_with("error: rank "));
  for (const std::string& word : words) {
    INFO(word);
    CHECK(lines.back().find(word) != std::string::npos);
  }
}

void write_model(const Path& folder) {
  TinyRun tiny;
  tiny.model_json = tiny_llama_json();
  write_tiny_files(folder, tiny);
}

// The run that nobody disturbed, by one rank; the folder's `run` must have its bits and losses.
void run_undisturbed(const Path& folder) {
  std::vector<std::string> settings = steps_settings();
  settings.push_back("checkpoint.dir=" + (folder / "whole").string());
  const ProgramResult result = run_program(SPIPE_TRAIN_BINARY, train_arguments(folder, settings), folder);
  INFO(result.out << result.err);
  REQUIRE(result.exit_code == 0);
}

void check_same_as_undisturbed(const Path& folder) {
  const ProgramResult result =
      run_program(TINY_JOB_BINARY, {"compare", (folder / "whole").string(), (folder / "run").string()}, folder);
  INFO(result.out << result.err);
  CHECK(result.exit_code == 0);
}

void check_resumes_to_the_end(const Path& folder, const Ranks& shape) {
  Job job(folder, shape, train_arguments(folder, steps_settings(shape.schedule), {"--resume"}));
  const ProgramResult result = job.wait();
  INFO(result.out << result.err);
  REQUIRE(result.exit_code == 0);
  CHECK(result.out.find("resuming after step") != std::string::npos);
  check_same_as_undisturbed(folder);
}

}  // namespace

TEST_CASE("a failure of one rank alone ends all and is told once") {
  const TempFolder folder;
  write_model(folder.path());
  const std::string run = (folder.path() / "run.yaml").string(), other = (folder.path() / "other.yaml").string();
  const std::vector<std::string> alone = {":", "-np", "1", SPIPE_TRAIN_BINARY, other};
  std::vector<std::string> arguments = {run};
  arguments.insert(arguments.end(), alone.begin(), alone.end());
  for (const int hosts : {1, 2}) {
    Job job(folder.path(), {hosts, 2}, arguments);
    check_told_once(job.wait(), 2, {"rank 2", "other.yaml"});
  }
}

TEST_CASE("a file that a writer cannot write ends all, and the run goes on from the checkpoint before") {
  const TempFolder folder;
  write_model(folder.path());
  run_undisturbed(folder.path());
  // The first rank of every host writes: of four ranks on two hosts, 0 and 2.
  const std::vector<std::pair<Ranks, int>> writers = {{{1, 3}, 0}, {{2, 4}, 0}, {{2, 4}, 2}};
  for (const auto& [shape, writer] : writers) {
    CAPTURE(shape.hosts, writer);
    std::filesystem::remove_all(folder.path() / "run");
    std::vector<std::string> settings = steps_settings();
    settings.emplace_back("checkpoint.every=20");
    Job job(folder.path(), shape, train_arguments(folder.path(), settings));
    job.await_step(45);
    const rlimit limit = {32768, 32768};  // more than the metrics by the next save, less than a checkpoint's file
    REQUIRE(prlimit(job.pid_of(writer), RLIMIT_FSIZE, &limit, nullptr) == 0);
    check_told_once(job.wait(), 2, {fmt::format("rank {}", writer), (folder.path() / "run").string()});
    check_resumes_to_the_end(folder.path(), {1, 2});
  }
}
