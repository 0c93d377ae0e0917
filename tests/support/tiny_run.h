// The smallest complete run: a temporary folder with a tiny model, random token files and a config, and what a run of it gave.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "spipe/exec/trainer.h"

namespace spipe::test {

// A temporary folder that goes with the object.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// Hugging Face config.json texts of tiny models (vocabulary 97, 3 layers).
[[nodiscard]] std::string tiny_llama_json();       // hidden 32, 4 heads, 2 KV heads, ffn 64, untied
[[nodiscard]] std::string tiny_tied_llama_json();  // the same, tied: its embedding unit has no tensors of its own
[[nodiscard]] std::string tiny_gpt2_json();        // hidden 32, 4 heads, tied

struct TinyRun {
  std::string model_json;
  std::uint64_t data_seed = 5;
  std::uint64_t tokens = 4000;
  std::vector<std::string> settings;  // "key=value" overrides
  exec::RunOptions options;
};

struct TinyResult {
  exec::RunSummary summary;
  std::vector<double> losses, norms;  // by step of this run
  std::vector<bool> skipped;
  std::vector<std::string> skipped_for;
  std::vector<double> scales;                // loss scales, of a run that has them
  std::map<std::string, std::string> files;  // content of the last checkpoint's safetensors files, by name
  std::uint64_t device_bytes = 0, fetched = 0;
  std::string plan_summary;
};

// Runs in `folder` (created files are reused when present, so a second call with options.resume continues the run).
[[nodiscard]] TinyResult run_tiny(const std::filesystem::path& folder, const TinyRun& run);

// The config text of a tiny run (tests that start the program itself).
[[nodiscard]] std::string tiny_config_text(const std::filesystem::path& folder);
void write_tiny_files(const std::filesystem::path& folder, const TinyRun& run);
// The same with a text as data, by the byte tokenizer: the model's vocabulary becomes 264 (a little padding, as real runs
// have).
void write_tiny_text_files(const std::filesystem::path& folder, TinyRun run, const std::string& text);
// "0123456789012...": what a model can learn in seconds.
[[nodiscard]] std::string counting_text(std::size_t characters);

}  // namespace spipe::test
