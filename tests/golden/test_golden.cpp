// The golden models, unit by unit, on every Ops of this machine: the reference loops and the CPU backend with each instruction
// set. Mistakes that the reference's sensitivity table lists must be caught.
#include <algorithm>
#include <catch2/catch.hpp>
#include <functional>
#include <iostream>
#include <memory>

#include "comparison.h"
#include "golden_model.h"
#include "kernels/cpu/cpu_ops.h"
#include "spipe/base/error.h"
#include "tests/kernels/reference_ops.h"

namespace spipe::test {
namespace {

std::vector<GoldenModel> all_models() {
  std::vector<GoldenModel> models;
  for (const auto& folder : golden_folders()) {
    if (auto model = read_golden(folder)) models.push_back(std::move(*model));
  }
  return models;
}

void check_models(Ops& ops, DType compute, const std::string& label) {
  const std::vector<GoldenModel> models = all_models();
  REQUIRE_FALSE(models.empty());
  for (const GoldenModel& golden : models) {
    GoldenRun run{.ops = &ops, .compute = compute};
    if (compute == DType::bf16) run.tolerances = bfloat16_tolerances(golden.architecture);
    const Comparison comparison = compare_with_golden(golden, golden.architecture, run);
    INFO(golden.name << ": " << comparison.text());
    std::cout << label << " " << golden.name << ": " << comparison.text() << "\n";
    CHECK(comparison.failures.empty());
    CHECK(comparison.worst.contains("logits"));  // the comparison really took place
  }
}

void check_cpu(Isa isa, DType compute) {
  if (isa > best_isa()) {
    WARN("skipped: this CPU lacks " << isa_name(isa));
    return;
  }
  ThreadPool pool(2);
  const std::unique_ptr<Ops> ops = make_cpu_ops(pool, isa);
  check_models(*ops, compute, std::string(isa_name(isa)) + (compute == DType::f32 ? " fp32" : " bf16"));
}

struct Mistake {
  const char* model;
  const char* text;
  std::function<void(model::Architecture&)> make;
};

}  // namespace

TEST_CASE("golden models agree on the reference ops") {
  ReferenceOps ops;
  check_models(ops, DType::f32, "reference fp32");
}

TEST_CASE("golden models agree in bf16 on the reference ops") {
  ReferenceOps ops;
  check_models(ops, DType::bf16, "reference bf16");
}

TEST_CASE("golden models agree on the CPU with scalar code") { check_cpu(Isa::scalar, DType::f32); }
TEST_CASE("golden models agree on the CPU with avx2") { check_cpu(Isa::avx2, DType::f32); }
TEST_CASE("golden models agree on the CPU with avx512") { check_cpu(Isa::avx512, DType::f32); }
TEST_CASE("golden models agree in bf16 on the CPU") { check_cpu(best_isa(), DType::bf16); }

TEST_CASE("golden comparison catches mistakes in the architecture") {
  using model::Architecture;
  const std::vector<Mistake> mistakes = {
      {"gpt2", "exact GELU", [](Architecture& a) { a.mlp = model::MlpKind::gelu_erf; }},
      {"gpt2", "LayerNorm eps", [](Architecture& a) { a.norm_eps = 1e-6; }},
      {"opt", "position offset",
       [](Architecture& a) {
         a.position_offset = 0;
         a.max_positions += 2;
       }},
      {"llama", "RMSNorm eps", [](Architecture& a) { a.norm_eps = 1e-6; }},
      {"llama", "rope base", [](Architecture& a) { a.rope.theta = 10001; }},
      {"llama3_rope", "no rope scaling", [](Architecture& a) { a.rope.scaling = model::RopeScaling::none; }},
      {"qwen2", "window not off", [](Architecture& a) { a.sliding_window = 8; }},
      {"mistral", "window + 1", [](Architecture& a) { ++a.sliding_window; }},
      {"mistral", "no window", [](Architecture& a) { a.sliding_window = 0; }},
  };
  const std::vector<GoldenModel> models = all_models();
  ReferenceOps ops;
  for (const Mistake& mistake : mistakes) {
    const auto golden =
        std::find_if(models.begin(), models.end(), [&](const GoldenModel& m) { return m.name == mistake.model; });
    if (golden == models.end()) continue;  // another folder of vectors
    Architecture wrong = golden->architecture;
    mistake.make(wrong);
    const Comparison comparison = compare_with_golden(*golden, wrong, {.ops = &ops});
    INFO(mistake.model << ", " << mistake.text << ": " << comparison.text());
    CHECK_FALSE(comparison.failures.empty());
  }
}

}  // namespace spipe::test
