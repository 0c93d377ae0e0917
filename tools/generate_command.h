// `spipe generate`: a trained model goes on with a text.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "spipe/model/sampler.h"

namespace spipe::tools {

struct GenerateFlags {
  std::string model;  // folder of a run or of a model
  std::optional<std::string> prompt;
  std::string prompt_file;
  std::vector<std::int32_t> prompt_ids;
  std::optional<std::uint64_t> step;
  std::int64_t new_tokens = 200, context = 0;
  model::SamplingOptions sampling = {.temperature = 0.8, .top_p = 0.95};
  std::vector<std::int32_t> stop_ids;
  bool ignore_end = false, only_new = false, quiet = false;
  int threads = 0;
};

CLI::App* add_generate_command(CLI::App& app, GenerateFlags& flags);
void run_generate(const GenerateFlags& flags);

}  // namespace spipe::tools
