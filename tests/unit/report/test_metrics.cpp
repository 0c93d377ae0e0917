#include <catch2/catch.hpp>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/report/report.h"
#include "tests/unit/report/temporary_folder.h"

namespace spipe::report {
namespace {

using Catch::Contains;

StepMetrics step_metrics(std::uint64_t step) {
  StepMetrics metrics;
  metrics.step = step;
  metrics.tokens = step * 128;
  metrics.loss = 1.0 / 3;
  metrics.grad_norm = 0.5;
  metrics.lr = 1e-5;
  metrics.tokens_per_s = 128;
  metrics.step_seconds = 1;
  return metrics;
}

std::vector<nlohmann::json> lines_of(const std::filesystem::path& file) {
  std::vector<nlohmann::json> lines;
  std::istringstream text(read_text(file));
  for (std::string line; std::getline(text, line);) {
    lines.push_back(nlohmann::json::parse(line));
  }
  return lines;
}

std::vector<std::uint64_t> steps_of(const std::filesystem::path& file) {
  std::vector<std::uint64_t> steps;
  for (const nlohmann::json& line : lines_of(file)) {
    steps.push_back(line.at("step").get<std::uint64_t>());
  }
  return steps;
}

}  // namespace

TEST_CASE("norms of units are told by name, with six digits, and only where there are some") {
  const TemporaryFolder folder;
  MetricsWriter writer(folder / "metrics.jsonl", 0);
  StepMetrics metrics = step_metrics(1);
  writer.write(metrics);
  metrics.unit_norms = {{"embedding", 1.0 / 3}, {"layer_0", std::numeric_limits<double>::infinity()}};
  metrics.taken_back = 7;
  writer.write(metrics);
  const auto lines = lines_of(folder / "metrics.jsonl");
  REQUIRE(lines.size() == 2);
  CHECK_FALSE(lines[0].contains("unit_norms"));
  CHECK_FALSE(lines[0].contains("taken_back"));
  CHECK(lines[1].at("unit_norms").at("embedding") == 0.333333);
  CHECK(lines[1].at("unit_norms").at("layer_0").is_null());
  CHECK(lines[1].at("taken_back") == 7);
}

TEST_CASE("samples are lines of JSON too, cut off on resume like the others") {
  const TemporaryFolder folder;
  {
    MetricsWriter writer(folder / "samples.jsonl", 0);
    writer.write_sample(10, "In the \"beginning\"\n", "\u00e9\x01", true);
    writer.write_sample(20, "", "x", false);
  }
  const auto lines = lines_of(folder / "samples.jsonl");
  REQUIRE(lines.size() == 2);
  CHECK(lines[0] ==
        nlohmann::json{{"step", 10}, {"prompt", "In the \"beginning\"\n"}, {"text", "\u00e9\x01"}, {"ended", true}});
  { const MetricsWriter writer(folder / "samples.jsonl", 10); }
  CHECK(steps_of(folder / "samples.jsonl") == std::vector<std::uint64_t>{10});
}

TEST_CASE("every step is one line of JSON that is there as soon as it is written") {
  const TemporaryFolder folder;
  MetricsWriter writer(folder / "metrics.jsonl", 0);
  StepMetrics metrics = step_metrics(1);
  metrics.tokens = 10'000'000'000'000'001;
  metrics.skipped_steps = 2;
  metrics.clip = 0.25;
  metrics.h2d_bytes_per_s = 3e8;
  metrics.d2h_bytes_per_s = 1e8;
  writer.write(metrics);
  const auto lines = lines_of(folder / "metrics.jsonl");
  REQUIRE(lines.size() == 1);
  CHECK(lines[0] == nlohmann::json{{"step", 1},
                                   {"tokens", 10'000'000'000'000'001},
                                   {"loss", 0.333333333},
                                   {"grad_norm", 0.5},
                                   {"clip", 0.25},
                                   {"lr", 1e-5},
                                   {"tokens_per_s", 128.0},
                                   {"step_seconds", 1.0},
                                   {"h2d_bytes_per_s", 3e8},
                                   {"d2h_bytes_per_s", 1e8},
                                   {"skipped_steps", 2}});
  CHECK_THAT(read_text(folder / "metrics.jsonl"), Contains("\"loss\":0.333333333,"));
}

TEST_CASE("a skipped step says why, with the scores of the spike guard") {
  const TemporaryFolder folder;
  MetricsWriter writer(folder / "metrics.jsonl", 0);
  writer.write(step_metrics(1));
  StepMetrics metrics = step_metrics(2);
  metrics.skipped_for = "spike";
  metrics.loss_z = -0.5;
  metrics.norm_z = 7.25;
  writer.write(metrics);
  const auto lines = lines_of(folder / "metrics.jsonl");
  for (const char* key : {"skipped", "loss_z", "norm_z"}) CHECK_FALSE(lines[0].contains(key));
  CHECK(lines[1].at("skipped") == "spike");
  CHECK(lines[1].at("loss_z") == -0.5);
  CHECK(lines[1].at("norm_z") == 7.25);
}

TEST_CASE("optional values appear when they are known") {
  const TemporaryFolder folder;
  MetricsWriter writer(folder / "metrics.jsonl", 0);
  StepMetrics metrics = step_metrics(1);
  metrics.peak_fraction = 0.5;
  metrics.eval_loss = 2.5;
  writer.write(metrics);
  const auto lines = lines_of(folder / "metrics.jsonl");
  REQUIRE(lines.size() == 1);
  CHECK(lines[0].at("peak_fraction") == 0.5);
  CHECK(lines[0].at("eval_loss") == 2.5);
}

TEST_CASE("values that are not finite become null, so that every line stays JSON") {
  const TemporaryFolder folder;
  MetricsWriter writer(folder / "metrics.jsonl", 0);
  StepMetrics metrics = step_metrics(1);
  metrics.loss = std::numeric_limits<double>::quiet_NaN();
  metrics.grad_norm = std::numeric_limits<double>::infinity();
  writer.write(metrics);
  const auto lines = lines_of(folder / "metrics.jsonl");
  REQUIRE(lines.size() == 1);
  CHECK(lines[0].at("loss").is_null());
  CHECK(lines[0].at("grad_norm").is_null());
}

TEST_CASE("two fp32 losses that differ are written differently") {
  const TemporaryFolder folder;
  MetricsWriter writer(folder / "metrics.jsonl", 0);
  for (const float loss : {2.3412345F, std::nextafterf(2.3412345F, 3.0F)}) {
    StepMetrics metrics = step_metrics(1);
    metrics.loss = loss;
    writer.write(metrics);
  }
  const auto lines = lines_of(folder / "metrics.jsonl");
  REQUIRE(lines.size() == 2);
  CHECK(lines[0].at("loss") != lines[1].at("loss"));
  CHECK(static_cast<float>(lines[0].at("loss").get<double>()) == 2.3412345F);
}

TEST_CASE("on resume the lines of later steps are cut off, so that the file reads as one run") {
  const TemporaryFolder folder;
  {
    MetricsWriter writer(folder / "metrics.jsonl", 0);
    for (std::uint64_t step = 1; step <= 7; ++step) {
      writer.write(step_metrics(step));
    }
  }
  {
    MetricsWriter writer(folder / "metrics.jsonl", 4);
    writer.write(step_metrics(5));
  }
  CHECK(steps_of(folder / "metrics.jsonl") == std::vector<std::uint64_t>{1, 2, 3, 4, 5});
  { const MetricsWriter again(folder / "metrics.jsonl", 100); }
  CHECK(steps_of(folder / "metrics.jsonl") == std::vector<std::uint64_t>{1, 2, 3, 4, 5});
  { const MetricsWriter anew(folder / "metrics.jsonl", 0); }
  CHECK(read_text(folder / "metrics.jsonl").empty());
}

TEST_CASE("a line torn by a kill is cut off on resume") {
  const TemporaryFolder folder;
  const std::string whole = R"({"step":1,"loss":2.0})";
  for (const std::string torn : {R"({"step":2,"lo)", R"({"step":2})", "", "\n", "not json\n", "[1]\n",
                                 R"({"step":-1})"
                                 "\n"}) {
    write_text_atomic(folder / "metrics.jsonl", whole + "\n" + torn);
    MetricsWriter writer(folder / "metrics.jsonl", 2);
    writer.write(step_metrics(2));
    INFO(torn);
    CHECK(steps_of(folder / "metrics.jsonl") == std::vector<std::uint64_t>{1, 2});
  }
}

TEST_CASE("a metrics file that cannot be written is refused by name") {
  const TemporaryFolder folder;
  const auto file = folder / "missing/metrics.jsonl";
  CHECK_THROWS_WITH(MetricsWriter(file, 0), Contains(file.string()) && Contains("No such file"));
}

TEST_CASE("a full disk is an error that names the file") {
  if (!std::filesystem::exists("/dev/full")) {
    WARN("no /dev/full here");
    return;
  }
  const TemporaryFolder folder;
  std::filesystem::create_symlink("/dev/full", folder / "metrics.jsonl");
  // Opened directly: the link is not a file that could be cut.
  MetricsWriter writer(folder / "metrics.jsonl", 0);
  CHECK_THROWS_WITH(writer.write(step_metrics(1)), Contains("metrics.jsonl") && Contains("No space left"));
}

}  // namespace spipe::report
