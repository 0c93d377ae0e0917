#include <catch2/catch.hpp>
#include <cmath>
#include <vector>

#include "configs.h"
#include "spipe/model/families.h"
#include "spipe/model/layers.h"

namespace spipe::test {
namespace {

std::vector<float> initial(const model::Architecture& a, const std::string& name, Shape shape, std::uint64_t seed = 1) {
  const model::Parameter parameter{.name = name, .shape = shape};
  std::vector<float> values(parameter.elements());
  model::initialize_parameter(a, parameter, seed, 0, values);
  return values;
}

double deviation(const std::vector<float>& x) {
  double mean = 0, squares = 0;
  for (const float v : x) mean += v / static_cast<double>(x.size());
  for (const float v : x) squares += (v - mean) * (v - mean);
  return std::sqrt(squares / static_cast<double>(x.size()));
}

}  // namespace

TEST_CASE("initial matrices are normal with the family's deviation, norms one, biases zero") {
  const model::Architecture a = tiny_architecture("gpt2");
  const auto fc = initial(a, "transformer.h.0.mlp.c_fc.weight", {100, 100});
  const auto projection = initial(a, "transformer.h.0.mlp.c_proj.weight", {100, 100});
  CHECK(deviation(fc) == Approx(0.02).epsilon(0.03));
  CHECK(deviation(projection) == Approx(0.02 / std::sqrt(4.0)).epsilon(0.03));
  CHECK(initial(a, "transformer.h.0.ln_1.weight", {8}) == std::vector<float>(8, 1.0F));
  CHECK(initial(a, "transformer.h.0.ln_1.bias", {8}) == std::vector<float>(8, 0.0F));
  const model::Architecture qwen = tiny_architecture("qwen3");
  CHECK(initial(qwen, "model.layers.0.self_attn.q_norm.weight", {8}) == std::vector<float>(8, 1.0F));
  CHECK(deviation(initial(qwen, "model.layers.0.mlp.down_proj.weight", {100, 100})) == Approx(0.02).epsilon(0.03));
}

TEST_CASE("initial values depend on seed, name and element, and on nothing else") {
  const model::Architecture a = tiny_architecture("llama");
  const auto one = initial(a, "model.layers.0.mlp.up_proj.weight", {64, 32});
  CHECK(one == initial(a, "model.layers.0.mlp.up_proj.weight", {64, 32}));
  CHECK(one != initial(a, "model.layers.0.mlp.up_proj.weight", {64, 32}, 2));
  CHECK(one != initial(a, "model.layers.1.mlp.up_proj.weight", {64, 32}));
  const auto wider = initial(a, "model.layers.0.mlp.up_proj.weight", {128, 32});
  CHECK(std::equal(one.begin(), one.end(), wider.begin()));
}

}  // namespace spipe::test
