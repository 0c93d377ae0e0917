#include <catch2/catch.hpp>
#include <cmath>
#include <vector>

#include "configs.h"
#include "spipe/base/error.h"
#include "spipe/model/families.h"
#include "spipe/model/layers.h"

namespace spipe::test {

using Catch::Contains;

namespace {
constexpr const char* kLlama3 = R"({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                    "original_max_position_embeddings": 8192})";
}

TEST_CASE("llama3 scaling keeps short wavelengths, blends the middle and stretches long ones") {
  const model::Architecture a =
      tiny_architecture("llama", {{"rope_theta", "500000"}, {"head_dim", "64"}, {"rope_scaling", kLlama3}});
  const std::vector<double> scaled = model::rope_inverse_frequencies(a.rope, 64);
  const auto plain = [](int i) { return std::pow(500000.0, -2.0 * i / 64); };
  CHECK(scaled[14] == plain(14));
  CHECK(plain(16) == Approx(1.41421e-3).epsilon(1e-5));
  CHECK(scaled[16] == Approx(5.24846e-4).epsilon(1e-5));
  CHECK(plain(31) == Approx(3.01386e-6).epsilon(1e-5));
  CHECK(scaled[31] == Approx(3.76732e-7).epsilon(1e-5));
}

TEST_CASE("linear scaling divides every frequency, in old and new spelling") {
  for (const char* text : {R"({"type": "linear", "factor": 4})", R"({"rope_type": "linear", "factor": 4.0})"}) {
    const model::Architecture a = tiny_architecture("llama", {{"rope_scaling", text}});
    const std::vector<double> scaled = model::rope_inverse_frequencies(a.rope, 8);
    CHECK(scaled[0] == 0.25);
    CHECK(scaled[1] == Approx(std::pow(10000.0, -0.25) / 4).epsilon(1e-14));
  }
}

TEST_CASE("the rope base is read from the top level and from rope_parameters") {
  CHECK(tiny_architecture("llama").rope.theta == 10000);
  CHECK(tiny_architecture("llama", {{"rope_theta", "1000000"}}).rope.theta == 1000000);
  const char* const nested = R"({"rope_type": "default", "rope_theta": 500000.0})";
  CHECK(tiny_architecture("qwen3", {{"rope_parameters", nested}}).rope.theta == 500000);
  const char* const both = R"({"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192})";
  const model::Architecture a = tiny_architecture("llama", {{"rope_parameters", both}});
  CHECK(a.rope == tiny_architecture("llama", {{"rope_theta", "500000"}, {"rope_scaling", kLlama3}}).rope);
  CHECK_THAT(refusal(tiny_config("llama", {{"rope_theta", "10000"}, {"rope_parameters", nested}})), Contains("rope_theta"));
  CHECK_THAT(refusal(tiny_config("llama", {{"rope_scaling", kLlama3}, {"rope_parameters", R"({"rope_type": "default"})"}})),
             Contains("differ"));
}

TEST_CASE("rope types we do not compute are refused by name") {
  for (const char* type : {"yarn", "dynamic", "longrope", "su", "mrope", "bogus"}) {
    const std::string section = std::string(R"({"rope_type": ")") + type + R"(", "factor": 2.0})";
    CHECK_THAT(refusal(tiny_config("llama", {{"rope_scaling", section.c_str()}})), Contains(std::string("'") + type + "'"));
    CHECK_THAT(refusal(tiny_config("llama", {{"rope_parameters", section.c_str()}})), Contains(std::string("'") + type + "'"));
  }
  CHECK_THAT(refusal(tiny_config("llama", {{"rope_scaling", R"({"rope_type": "llama3", "factor": 8.0})"}})),
             Contains("low_freq_factor"));
  CHECK_THAT(refusal(tiny_config("llama", {{"rope_scaling", R"({"type": "linear"})"}})), Contains("factor"));
  CHECK_THAT(refusal(tiny_config("llama", {{"rope_scaling", R"({"rope_type": "linear", "factor": 2, "mscale": 3})"}})),
             Contains("mscale"));
  CHECK_THAT(refusal(tiny_config("llama", {{"rope_scaling", "[]"}})), Contains("rope_scaling"));
}

TEST_CASE("rope tables are cosines and sines of double angles, rounded once") {
  const model::ModelShape shape =
      model::make_shape(tiny_architecture("llama"), {.micro = 1, .seq_len = 16, .head_chunk = 4}, DType::f32);
  std::vector<float> memory(shape.constant_bytes / sizeof(float));
  const model::Constants constants = model::fill_constants(shape, memory.data());
  const double angle = 13 * std::pow(10000.0, -2.0 * 3 / 8);
  CHECK(constants.rope_cos[13 * 4 + 3] == static_cast<float>(std::cos(angle)));
  CHECK(constants.rope_sin[13 * 4 + 3] == static_cast<float>(std::sin(angle)));
  CHECK(constants.rope_cos + 16 * 4 <= memory.data() + memory.size());
  CHECK(constants.rope_sin + 16 * 4 <= memory.data() + memory.size());
  CHECK(model::make_shape(tiny_architecture("gpt2"), {.micro = 1, .seq_len = 16, .head_chunk = 4}, DType::f32).constant_bytes ==
        0);
}

}  // namespace spipe::test
