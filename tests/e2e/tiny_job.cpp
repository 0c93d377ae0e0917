// For scripts that start the real program: `tiny_job write FOLDER` makes a tiny model, its data and run.yaml there;
// `tiny_job compare RUN RUN` compares the newest checkpoints of two runs tensor by tensor (their files may be cut differently)
// and the losses by step; ends with 0 when all bits are equal.
#include <fmt/core.h>

#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "spipe/base/file.h"
#include "spipe/io/checkpoint.h"
#include "spipe/io/safetensors.h"
#include "tests/support/tiny_run.h"

namespace spipe::test {
namespace {

std::map<std::string, std::string> tensors_of(const std::filesystem::path& run) {
  const auto newest = io::newest_checkpoint(run);
  if (!newest) throw Error("no complete checkpoint", run.string());
  std::map<std::string, std::string> tensors = {{"step", std::to_string(newest->step)}};
  for (const auto& entry : std::filesystem::directory_iterator(newest->path)) {
    if (entry.path().extension() != ".safetensors") continue;
    const io::SafetensorsFile file(entry.path());
    for (const io::TensorInfo& tensor : file.tensors()) {
      const auto data = file.data(tensor);
      tensors[tensor.name] = std::string(reinterpret_cast<const char*>(data.data()), data.size());
    }
  }
  return tensors;
}

// What was recorded of a step, last: a run that was killed and resumed has lines twice only if the steps were done twice.
std::map<int, std::string> losses_of(const std::filesystem::path& run) {
  std::map<int, std::string> losses;
  std::istringstream lines(read_text(run / "metrics.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    const auto json = nlohmann::json::parse(line, nullptr, false);
    if (json.is_discarded() || !json.contains("loss")) continue;
    losses[json.at("step").get<int>()] = json.at("loss").dump() + " " + json.at("grad_norm").dump();
  }
  return losses;
}

int run(int argc, char** argv) {
  const std::string what = argc > 2 ? argv[1] : "";
  if (what == "write") {
    TinyRun tiny;
    tiny.model_json = tiny_llama_json();
    std::filesystem::create_directories(argv[2]);
    write_tiny_files(argv[2], tiny);
    return 0;
  }
  if (what != "compare" || argc != 4) {
    fmt::print(stderr, "usage: tiny_job write FOLDER | compare RUN RUN\n");
    return 2;
  }
  const auto a = tensors_of(argv[2]), b = tensors_of(argv[3]);
  const bool same_losses = losses_of(argv[2]) == losses_of(argv[3]);
  if (a != b) fmt::print("the parameters or moments differ (steps {} and {})\n", a.at("step"), b.at("step"));
  if (!same_losses) fmt::print("the losses differ\n");
  return a == b && same_losses && a.size() > 1 ? 0 : 1;
}

}  // namespace
}  // namespace spipe::test

int main(int argc, char** argv) {
  try {
    return spipe::test::run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    return 2;
  }
}
