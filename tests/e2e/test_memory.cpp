// What the start-up table promises of host memory, against what the kernel counts: a model with more than 1 GiB of state, whose
// ranks share it.
#include <fmt/core.h>

#include <catch2/catch.hpp>
#include <regex>
#include <sstream>

#include "spipe/base/file.h"
#include "tests/support/program.h"
#include "tests/support/rank_job.h"
#include "tests/support/tiny_run.h"

using namespace spipe;
using namespace spipe::test;

namespace {

constexpr double kPatience = 240;
constexpr double kTolerance = 0.03;

// 71 M parameters behind few activations.
std::string model_json() {
  return R"({"model_type": "llama", "vocab_size": 97, "hidden_size": 768, "num_hidden_layers": 10, "num_attention_heads": 12,
             "num_key_value_heads": 12, "intermediate_size": 2048, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
             "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": false})";
}
constexpr double kParameters = 10 * (4.0 * 768 * 768 + 3.0 * 768 * 2048 + 2 * 768) + 2.0 * 97 * 768 + 768;

// Bytes that the kernel counts as the process's own part (PSS) of the mappings whose line has `words`.
double proportional_bytes(const std::string& maps, const std::string& words) {
  std::istringstream text(maps);
  double kib = 0;
  bool inside = false;
  for (std::string line; std::getline(text, line);) {
    const bool heading = line.find(":") == std::string::npos || line.find(":") > line.find(" ");
    if (heading) inside = line.find(words) != std::string::npos;
    if (inside && line.starts_with("Pss:")) kib += std::stod(line.substr(4));
  }
  return kib * 1024;
}

// The number before `unit` in the table's line that begins with `key`.
double told(const std::string& out, const std::string& key, const std::string& unit) {
  std::smatch found;
  const std::regex line("\\n" + key + " +([^\\n]*?)([0-9.]+) " + unit);
  REQUIRE(std::regex_search(out, found, line));
  return std::stod(found[2].str());
}

struct Seen {
  double store = 0, whole = 0;  // bytes, summed over the ranks
  std::string out;
};

Seen train(const Path& folder, int ranks, std::vector<std::string> settings) {
  settings.insert(settings.end(), {"train.steps=100000", "batch.global=4", "batch.micro=1", "device.threads=1"});
  RankJob job(SPIPE_TRAIN_BINARY, folder, {1, ranks}, train_arguments(folder, settings));
  REQUIRE(job.await_step(2, kPatience));
  Seen seen;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string maps = file_of_process(job.pid_of(rank), "smaps");
    seen.store += proportional_bytes(maps, "spipe-host");
    seen.whole += proportional_bytes(maps, "") - proportional_bytes(maps, ".so");  // without libraries
  }
  seen.out = read_text(folder / "stdout");
  return seen;
}

void check_near(double measured, double promised) {
  CAPTURE(measured, promised);
  CHECK(std::abs(measured / promised - 1) <= kTolerance);
}

void check_store(const Seen& seen) {
  INFO(seen.out);
  CHECK(seen.store > 1024.0 * 1024 * 1024);
  check_near(seen.store / kParameters, told(seen.out, "store \\(state\\)", "B/parameter"));
}

}  // namespace

TEST_CASE("host memory is what the start-up table says: one rank") {
  const TempFolder folder;
  TinyRun tiny;
  tiny.model_json = model_json();
  write_tiny_files(folder.path(), tiny);
  const Seen seen = train(folder.path(), 1, {"optimizer.policy=sync"});
  check_store(seen);
  CHECK(told(seen.out, "store \\(state\\)", "B/parameter") == 16.0);
  check_near(seen.whole, 1024.0 * 1024 * 1024 * told(seen.out, "host", "GiB"));
}

TEST_CASE("host memory is what the start-up table says: two ranks share state and second slots") {
  const TempFolder folder;
  TinyRun tiny;
  tiny.model_json = model_json();
  write_tiny_files(folder.path(), tiny);
  const Seen seen = train(folder.path(), 2, {"optimizer.policy=overlap", "train.precision=bf16"});
  check_store(seen);
  CHECK(told(seen.out, "store \\(state\\)", "B/parameter") > 16.0);  // second slots
}
