// spipe-train as a user meets it: exit codes, messages, signals, kills, memory.
#include <signal.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <fstream>
#include <random>
#include <sstream>

#include "spipe/base/file.h"
#include "spipe/base/units.h"
#include "spipe/io/checkpoint.h"
#include "tests/support/program.h"
#include "tests/support/tiny_run.h"

using namespace spipe;
using namespace spipe::test;

namespace {

const Path kTrain = SPIPE_TRAIN_BINARY;

TinyRun llama() {
  TinyRun run;
  run.model_json = tiny_llama_json();
  return run;
}

std::size_t lines(const std::string& text) { return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n')); }

// The weights and moments of the newest checkpoint, as one text.
std::string newest_state(const Path& run) {
  const auto checkpoint = io::newest_checkpoint(run);
  REQUIRE(checkpoint);
  std::string all = std::to_string(checkpoint->step) + "\n";
  std::vector<Path> files;
  for (const auto& entry : std::filesystem::directory_iterator(checkpoint->path)) {
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  for (const Path& file : files) all += read_text(file);
  return all;
}

std::uint64_t pss_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/smaps_rollup");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind("Pss:", 0) == 0) return std::stoull(line.substr(4)) * 1024;
  }
  return 0;
}

}  // namespace

TEST_CASE("a run ends with code 0, says where things are, and writes metrics") {
  const TempFolder folder;
  write_tiny_files(folder.path(), llama());
  const ProgramResult result = run_program(kTrain, train_arguments(folder.path(), {}), folder.path());
  INFO(result.out << result.err);
  CHECK(result.exit_code == 0);
  for (const char* text : {"parameters", "budget", "step-00000006", "metrics.jsonl", "--resume", "held-out loss"}) {
    CHECK(result.out.find(text) != std::string::npos);
  }
  const std::string metrics = read_text(folder.path() / "run" / "metrics.jsonl");
  CHECK(lines(metrics) == 7);  // six steps and the evaluation
  for (const char* key :
       {"\"step\"", "\"tokens\"", "\"loss\"", "\"grad_norm\"", "\"lr\"", "\"tokens_per_s\"", "\"eval_loss\""}) {
    CHECK(metrics.find(key) != std::string::npos);
  }
}

TEST_CASE("the user's mistakes: one line on stderr, code 2, nothing written") {
  const std::vector<std::pair<std::vector<std::string>, std::string>> mistakes = {
      {{"train.learning_rat=1"}, "learning_rat"},
      {{"device.memory=1KiB"}, "smallest"},
      {{"device.host_memory=100KiB"}, "host"},
      {{"data.train=[/nowhere/x.bin]"}, "nowhere"},
      {{"data.seq_len=65", "model.config=MODEL_GPT2"}, "65"},
      {{"batch.micro=4"}, "4"},
      {{"optimizer.policy=overlapp"}, "overlap"},
      {{"device.isa=mmx"}, "mmx"},
      {{"optimizer.groups=[{pattern: \"model.layer.*.mlp.up_proj.weight\", weight_decay: 0}]"},
       "matches no parameter; did you mean 'model.layers.*.mlp.up_proj.weight'?"},
      {{"optimizer.groups=[{pattern: \"*\", frozen: true}]"}, "freezes every parameter"},
      {{"batch.global=1000000000"}, "too large to plan"},
  };
  for (const auto& [settings, expected] : mistakes) {
    const TempFolder folder;
    write_tiny_files(folder.path(), llama());
    write_text_atomic(folder.path() / "gpt2.json", tiny_gpt2_json());
    std::vector<std::string> used = settings;
    for (std::string& setting : used) {
      if (setting == "model.config=MODEL_GPT2") setting = "model.config=" + (folder.path() / "gpt2.json").string();
    }
    const ProgramResult result = run_program(kTrain, train_arguments(folder.path(), used), folder.path());
    INFO(settings[0] << ": " << result.err);
    CHECK(result.exit_code == 2);
    CHECK(lines(result.err) == 1);
    CHECK(result.err.find(expected) != std::string::npos);
    CHECK_FALSE(std::filesystem::exists(folder.path() / "run" / "config.yaml"));
  }
}

TEST_CASE("a dry run (--dry-run) shows config, memory and plan, and trains nothing") {
  const TempFolder folder;
  write_tiny_files(folder.path(), llama());
  const ProgramResult result =
      run_program(kTrain, train_arguments(folder.path(), {"optimizer.lr=1e-4"}, {"--dry-run"}), folder.path());
  CHECK(result.exit_code == 0);
  CHECK(result.out.find("1e-04") + result.out.find("0.0001") != 2 * std::string::npos);
  CHECK(result.out.find("command line") != std::string::npos);
  CHECK_FALSE(std::filesystem::exists(folder.path() / "run"));
}

TEST_CASE("the start-up tables say how updates are made, and what second slots take") {
  const TempFolder folder;
  write_tiny_files(folder.path(), llama());
  const auto told = [&](const std::string& policy, const std::string& words) {
    const ProgramResult result =
        run_program(kTrain, train_arguments(folder.path(), {"optimizer.policy=" + policy}, {"--dry-run"}), folder.path());
    INFO(result.out << result.err);
    CHECK(result.out.find(words) != std::string::npos);
  };
  told("sync", "updates: 100 % when the norm is known, before the next step; 100 % by CPU cores\n");
  told("deferred", "updates: 100 % when the norm is known, under the next step; 100 % by CPU cores\n");
  told("overlap", "updates: 100 % before the norm is known; 100 % by CPU cores; second slots for ");
  told("overlap", " 28.0 B/parameter");
}

TEST_CASE("an existing run is neither overwritten nor shared") {
  const TempFolder folder;
  write_tiny_files(folder.path(), llama());
  CHECK(run_program(kTrain, train_arguments(folder.path(), {"train.steps=2"}), folder.path()).exit_code == 0);
  const ProgramResult again = run_program(kTrain, train_arguments(folder.path(), {"train.steps=2"}), folder.path());
  CHECK(again.exit_code == 2);
  CHECK(again.err.find("--resume") != std::string::npos);
  const ProgramResult done =
      run_program(kTrain, train_arguments(folder.path(), {"train.steps=2"}, {"--resume"}), folder.path());
  CHECK(done.exit_code == 0);
  CHECK(done.out.find("already finished") != std::string::npos);
  const ProgramResult longer =
      run_program(kTrain, train_arguments(folder.path(), {"train.steps=3"}, {"--resume"}), folder.path());
  CHECK(longer.exit_code == 2);
  CHECK(longer.err.find("train.steps: 2 -> 3") != std::string::npos);
  const ProgramResult allowed = run_program(
      kTrain, train_arguments(folder.path(), {"train.steps=3"}, {"--resume", "--allow-change", "train.steps"}), folder.path());
  INFO(allowed.err);
  CHECK(allowed.exit_code == 0);
}

TEST_CASE("SIGTERM saves and stops with code 75, SIGUSR1 saves and goes on - resuming gives the bytes of a straight run") {
  const std::vector<std::string> settings = {"train.steps=400", "device.threads=1"};
  const TempFolder straight;
  write_tiny_files(straight.path(), llama());
  REQUIRE(run_program(kTrain, train_arguments(straight.path(), settings), straight.path()).exit_code == 0);

  const TempFolder folder;
  write_tiny_files(folder.path(), llama());
  {
    Program program(kTrain, train_arguments(folder.path(), settings), folder.path());
    REQUIRE(program.wait_for_output("step 20/400", 60));
    program.signal(SIGUSR1);
    REQUIRE(program.wait_for_output("step 60/400", 60));
    CHECK(io::newest_checkpoint(folder.path() / "run"));
    program.signal(SIGTERM);
    const ProgramResult result = program.wait();
    INFO(result.err);
    CHECK(result.exit_code == 75);
    CHECK(result.out.find("--resume") != std::string::npos);
  }
  const auto stopped = io::newest_checkpoint(folder.path() / "run");
  REQUIRE(stopped);
  CHECK(stopped->step >= 60);
  CHECK(stopped->step < 400);
  CHECK(run_program(kTrain, train_arguments(folder.path(), settings, {"--resume", "auto"}), folder.path()).exit_code == 0);
  CHECK(newest_state(folder.path() / "run") == newest_state(straight.path() / "run"));
}

TEST_CASE("kill -9 while checkpoints are written, twenty times, loses nothing that was complete") {
  const std::vector<std::string> settings = {"train.steps=600", "checkpoint.every=1", "checkpoint.keep=2", "device.threads=1"};
  const TempFolder straight;
  write_tiny_files(straight.path(), llama());
  std::vector<std::string> plain = settings;
  plain[1] = "checkpoint.every=0";
  REQUIRE(run_program(kTrain, train_arguments(straight.path(), plain), straight.path()).exit_code == 0);

  const TempFolder folder;
  write_tiny_files(folder.path(), llama());
  std::mt19937 random(20261201);
  std::uint64_t newest = 0;
  int interrupted = 0;
  for (int kill = 0; kill < 20; ++kill) {
    Program program(kTrain, train_arguments(folder.path(), settings, {"--resume", "auto"}), folder.path());
    // Into the steps, then anywhere within the next few saves (a save takes some milliseconds).
    program.wait_for_output("  loss ", 60);
    sleep_seconds(0.001 * static_cast<double>(random() % 120));
    program.signal(SIGKILL);
    const ProgramResult result = program.wait();
    INFO(result.out << result.err);
    if (result.exit_code == 128 + SIGKILL) {
      ++interrupted;
    } else {
      CHECK(result.exit_code == 0);
    }
    const auto checkpoint = io::newest_checkpoint(folder.path() / "run");
    if (newest > 0) REQUIRE(checkpoint);
    if (checkpoint) {
      CHECK(checkpoint->step >= newest);
      newest = checkpoint->step;
    }
  }
  CHECK(interrupted >= 15);
  CHECK(newest > 0);
  write_text_atomic(folder.path() / "run" / "latest.tmp-1", "step-0");  // as a kill between write and rename leaves it
  write_text_atomic(folder.path() / "run" / "config.yaml.tmp-1", "model");
  const ProgramResult last = run_program(kTrain, train_arguments(folder.path(), settings, {"--resume", "auto"}), folder.path());
  INFO(last.err);
  CHECK(last.exit_code == 0);
  CHECK(newest_state(folder.path() / "run") == newest_state(straight.path() / "run"));
  for (const auto& entry : std::filesystem::directory_iterator(folder.path() / "run")) {
    CHECK(entry.path().filename().string().find("tmp") == std::string::npos);
  }
}

TEST_CASE("the memory of a run is what its table says") {
  // The program's own code and libraries: the same run with next to no state.
  const auto measure = [](const std::string& model, std::uint64_t& planned) {
    const TempFolder folder;
    TinyRun run = llama();
    run.model_json = model;
    write_tiny_files(folder.path(), run);
    Program program(kTrain, train_arguments(folder.path(), {"train.steps=100000", "device.memory=40MiB"}), folder.path());
    REQUIRE(program.wait_for_output("step 3/100000", 120));
    const std::uint64_t pss = pss_of(program.pid());
    program.signal(SIGKILL);
    const std::string out = program.wait().out;
    const auto at = out.find("host  ");
    REQUIRE(at != std::string::npos);
    std::istringstream line(out.substr(at + 4));
    std::string number, unit;
    line >> number >> unit;
    planned = parse_bytes(number + " " + unit);
    return pss;
  };
  std::uint64_t tiny_planned = 0, planned = 0;
  const std::uint64_t tiny = measure(tiny_llama_json(), tiny_planned);
  const std::uint64_t large = measure(
      R"({"model_type": "llama", "vocab_size": 97, "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8,
          "intermediate_size": 1024, "max_position_embeddings": 64, "rms_norm_eps": 1e-5})",
      planned);
  REQUIRE(planned > 450U << 20);
  const double baseline = static_cast<double>(tiny) - static_cast<double>(tiny_planned);
  const double difference = std::abs(static_cast<double>(large) - baseline - static_cast<double>(planned));
  INFO("planned " << format_bytes(planned) << ", PSS " << format_bytes(large) << ", baseline "
                  << format_bytes(static_cast<std::uint64_t>(baseline)));
  CHECK(difference <= std::max(0.03 * static_cast<double>(planned), 64.0 * 1024 * 1024));
  CHECK(tiny > 0);
}
