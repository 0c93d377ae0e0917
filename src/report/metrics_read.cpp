// Reading metrics.jsonl and samples.jsonl.
#include <fmt/format.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/report/page.h"

namespace spipe::report {
namespace {

using nlohmann::json;

std::optional<double> number_of(const json& line, const char* key) {
  const auto found = line.find(key);
  if (found == line.end() || !found->is_number()) return std::nullopt;
  return found->get<double>();
}

std::string text_of(const json& line, const char* key) {
  const auto found = line.find(key);
  return found != line.end() && found->is_string() ? found->get<std::string>() : std::string();
}

// Every whole line that is an object with a step; anything else is an Error saying that it is not `what`.
void for_each_line(const std::filesystem::path& file, const char* what, const std::function<void(const json&)>& use) {
  const std::string text = read_text(file);
  std::size_t number = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\n', begin);
    if (end == std::string::npos) break;  // torn
    ++number;
    const json line = json::parse(text.begin() + static_cast<std::ptrdiff_t>(begin),
                                  text.begin() + static_cast<std::ptrdiff_t>(end), nullptr, /*allow_exceptions=*/false);
    if (!line.is_object() || !line.contains("step") || !line["step"].is_number_unsigned()) {
      throw Error(fmt::format("not a line of {}", what), fmt::format("{}:{}", file.string(), number),
                  "remove the line, or the file");
    }
    use(line);
    begin = end + 1;
  }
}

}  // namespace

std::vector<MetricPoint> read_metrics(const std::filesystem::path& file) {
  std::vector<MetricPoint> points;
  for_each_line(file, "metrics", [&](const json& line) {
    points.push_back({.step = line["step"].get<std::uint64_t>(),
                      .loss = number_of(line, "loss"),
                      .eval_loss = number_of(line, "eval_loss"),
                      .tokens_per_s = number_of(line, "tokens_per_s"),
                      .lr = number_of(line, "lr"),
                      .grad_norm = number_of(line, "grad_norm"),
                      .step_seconds = number_of(line, "step_seconds"),
                      .tokens = number_of(line, "tokens")});
  });
  return points;
}

std::vector<SampleText> read_samples(const std::filesystem::path& file) {
  std::vector<SampleText> samples;
  for_each_line(file, "samples", [&](const json& line) {
    samples.push_back({line["step"].get<std::uint64_t>(), text_of(line, "prompt"), text_of(line, "text")});
  });
  return samples;
}

}  // namespace spipe::report
