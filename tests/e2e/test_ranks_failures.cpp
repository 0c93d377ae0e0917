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
#include "tests/support/rank_job.h"
#include "tests/support/tiny_run.h"

using namespace spipe;
using namespace spipe::test;

namespace {

constexpr double kPatience = 120;  // for a job that works, on a machine that does other things
constexpr int kSteps = 300;        // long enough to be met under way

std::vector<std::string> steps_settings(const char* schedule = "auto") {
  return {fmt::format("train.steps={}", kSteps), "device.threads=1", "checkpoint.keep=9", "log.unit_norms=false",
          std::string("parallel.schedule=") + schedule};
}

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

void check_resumes_to_the_end(const Path& folder, const RankShape& shape, const char* schedule = "auto") {
  RankJob job(SPIPE_TRAIN_BINARY, folder, shape, train_arguments(folder, steps_settings(schedule), {"--resume"}));
  const ProgramResult result = job.wait(kPatience);
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
    RankJob job(SPIPE_TRAIN_BINARY, folder.path(), {hosts, 2}, arguments);
    check_told_once(job.wait(kPatience), 2, {"rank 2", "other.yaml"});
  }
}

TEST_CASE("a file that a writer cannot write ends all, and the run goes on from the checkpoint before") {
  const TempFolder folder;
  write_model(folder.path());
  run_undisturbed(folder.path());
  // The first rank of every host writes: of four ranks on two hosts, 0 and 2.
  const std::vector<std::pair<RankShape, int>> writers = {{{1, 3}, 0}, {{2, 4}, 0}, {{2, 4}, 2}};
  for (const auto& [shape, writer] : writers) {
    CAPTURE(shape.hosts, writer);
    std::filesystem::remove_all(folder.path() / "run");
    std::vector<std::string> settings = steps_settings();
    settings.emplace_back("checkpoint.every=20");
    RankJob job(SPIPE_TRAIN_BINARY, folder.path(), shape, train_arguments(folder.path(), settings));
    REQUIRE(job.await_step(45, kPatience));
    const rlimit limit = {32768, 32768};  // more than the metrics by the next save, less than a checkpoint's file
    REQUIRE(prlimit(job.pid_of(writer), RLIMIT_FSIZE, &limit, nullptr) == 0);
    check_told_once(job.wait(kPatience), 2, {fmt::format("rank {}", writer), (folder.path() / "run").string()});
    check_resumes_to_the_end(folder.path(), {1, 2});
  }
}
