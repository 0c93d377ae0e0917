// `spipe status`, and what a run says about itself in its folder.
#include <signal.h>

#include <algorithm>
#include <catch2/catch.hpp>

#include "spipe/base/file.h"
#include "spipe/report/run_facts.h"
#include "tests/support/program.h"
#include "tests/support/tiny_run.h"

using namespace spipe;
using namespace spipe::test;

namespace {

const Path kTrain = SPIPE_TRAIN_BINARY, kSpipe = SPIPE_BINARY;

ProgramResult status_told(const Path& folder, const std::vector<std::string>& more = {"--once"}) {
  std::vector<std::string> arguments = {"status", (folder / "run").string()};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const TempFolder output;
  return run_program(kSpipe, arguments, output.path());
}

TempFolder& prepared(TempFolder& folder) {
  write_tiny_files(folder.path(), TinyRun{.model_json = tiny_llama_json(), .tokens = 4000, .settings = {}, .options = {}});
  return folder;
}

}  // namespace

TEST_CASE("a finished run says so, with its steps and losses, and what it was made on") {
  TempFolder folder;
  const ProgramResult run = run_program(kTrain, train_arguments(prepared(folder).path(), {}), folder.path());
  REQUIRE(run.exit_code == 0);
  const ProgramResult result = status_told(folder.path());
  CHECK(result.exit_code == 0);
  CHECK_THAT(result.out, Catch::StartsWith("finished after ") && Catch::Contains("step 6/6 (100 %)  loss ") &&
                             Catch::Contains("held out "));
  CHECK(std::count(result.out.begin(), result.out.end(), '\n') == 1);
  const report::RunFacts facts = report::read_run_facts(folder.path() / "run" / "run.json");
  CHECK(facts.total_steps == 6);
  REQUIRE(facts.end);
  CHECK(facts.end->step == 6);
  CHECK_FALSE(facts.device.empty());
  CHECK_FALSE(facts.host.empty());
  CHECK(status_told(folder.path(), {}).out == result.out);  // nothing to watch
}

TEST_CASE("a running job is watched to its end, and a killed one is told from one that saved") {
  TempFolder folder;
  const Path place = prepared(folder).path();
  const std::vector<std::string> settings = {"train.steps=100000", "checkpoint.every=20", "optimizer.schedule.warmup=2"};
  {
    Program job(kTrain, train_arguments(place, settings), place);
    REQUIRE(job.wait_for_output("step 30/", 60));
    const ProgramResult running = status_told(place);
    CHECK(running.exit_code == 0);
    CHECK_THAT(running.out, Catch::StartsWith("running: step ") && Catch::Contains("/100000 (0 %)  loss ") &&
                                Catch::Contains(" tok/s  ETA ") && Catch::Contains("process " + std::to_string(job.pid())));
    const TempFolder output;
    Program watch(kSpipe, {"status", (place / "run").string(), "--every", "0.1"}, output.path());
    CHECK(watch.wait_for_output("running: ", 30));
    job.signal(SIGTERM);
    CHECK(job.wait().exit_code == 75);
    const ProgramResult watched = watch.wait();
    CHECK(watched.exit_code == 75);
    CHECK_THAT(watched.out, Catch::Contains("stopped and saved after ") && Catch::Contains("continue with --resume"));
  }
  {
    std::filesystem::remove(place / "stdout");  // of the job before
    Program job(kTrain, train_arguments(place, settings, {"--resume"}), place);
    REQUIRE(job.wait_for_output("ETA", 60));  // a line of progress
    CHECK_THAT(status_told(place).out, Catch::StartsWith("running: "));
    job.signal(SIGKILL);
    (void)job.wait();
    const ProgramResult killed = status_told(place);
    CHECK(killed.exit_code == 1);
    CHECK_THAT(killed.out, Catch::StartsWith("ended without saying why") && Catch::Contains("newest checkpoint: step "));
  }
}

TEST_CASE("a run that fails leaves its reason in its folder") {
  TempFolder folder;
  const ProgramResult run =
      run_program(kTrain, train_arguments(prepared(folder).path(), {"optimizer.lr=1e30", "train.grad_clip=0"}), folder.path());
  REQUIRE(run.exit_code == 3);
  const ProgramResult result = status_told(folder.path());
  CHECK(result.exit_code == 1);
  CHECK_THAT(result.out, Catch::StartsWith("failed after ") && Catch::Contains("non-finite"));
}

TEST_CASE("what is no run is refused in one line") {
  const TempFolder folder;
  const ProgramResult none = status_told(folder.path());
  CHECK(none.exit_code == 2);
  CHECK_THAT(none.err, Catch::Contains("no such run folder"));
  std::filesystem::create_directory(folder.path() / "run");
  const ProgramResult empty = status_told(folder.path());
  CHECK(empty.exit_code == 2);
  CHECK_THAT(empty.err, Catch::Contains("no run.json, metrics.jsonl or checkpoint"));
}
