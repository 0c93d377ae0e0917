// Layers over Ops: the same bits whatever is saved, repeated or aliased; gradients of everything the golden models lack,
// against central differences of the loss.
#include <catch2/catch.hpp>
#include <cmath>
#include <functional>
#include <random>

#include "configs.h"
#include "kernels/cpu/cpu_ops.h"
#include "spipe/base/error.h"
#include "tests/golden/unit_runner.h"
#include "tests/kernels/reference_ops.h"

namespace spipe::test {
namespace {

struct Batch {
  std::vector<std::int32_t> tokens, targets;
};

Batch random_batch(const model::ModelShape& shape, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto vocab = static_cast<std::uint64_t>(shape.architecture.vocab_size);
  Batch batch;
  for (std::int64_t i = 0; i < shape.tokens_per_micro(); ++i) {
    batch.tokens.push_back(static_cast<std::int32_t>(random() % vocab));
    batch.targets.push_back(random() % 5 == 0 ? -100 : static_cast<std::int32_t>(random() % vocab));
  }
  return batch;
}

// Parameters large enough that every term counts.
void set_random_parameters(UnitRunner& runner, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  for (const model::StoreUnit& unit : runner.shape().store_units) {
    for (const model::Parameter& p : unit.parameters) {
      std::vector<float> values(p.elements());
      for (float& v : values)
        v = p.shape.rank() >= 2         ? 0.2F * normal(random)
            : p.name.ends_with(".bias") ? 0.1F * normal(random)
                                        : 1 + 0.1F * normal(random);
      runner.set_parameter(p.name, values);
    }
  }
}

struct Outcome {
  std::vector<float> nll, last_boundary;
  std::map<std::string, std::vector<float>> gradients;
  bool operator==(const Outcome&) const = default;
};

struct Setup {
  model::Architecture architecture;
  DType compute = DType::f32;
  std::int64_t chunk = 7;
  RunnerOptions options{};
};

model::ModelShape shape_of(const Setup& setup) {
  return model::make_shape(setup.architecture, {.micro = 2, .seq_len = 12, .head_chunk = setup.chunk}, setup.compute);
}

// Two micro-batches, so that gradients accumulate.
Outcome run(const Setup& setup, Ops& ops, const std::function<void(UnitRunner&)>& change = nullptr) {
  const model::ModelShape shape = shape_of(setup);
  UnitRunner runner(shape, ops, setup.options);
  set_random_parameters(runner, 5);
  if (change) change(runner);
  Outcome outcome;
  for (std::uint64_t m = 0; m < 2; ++m) {
    const Batch batch = random_batch(shape, 70 + m);
    runner.run_micro_batch(batch.tokens, batch.targets, 1.0F / 32, 2 * m, m == 0);
    outcome.nll.insert(outcome.nll.end(), runner.nll().begin(), runner.nll().end());
  }
  outcome.last_boundary = runner.boundary(shape.unit_count() - 2);
  runner.finish_gradients();
  outcome.gradients = runner.gradients();
  return outcome;
}

// Every family, plus the switches the golden models leave off.
std::vector<std::pair<std::string, model::Architecture>> variants() {
  return {
      {"gpt2", tiny_architecture("gpt2")},
      {"gpt2 untied, exact gelu",
       tiny_architecture("gpt2", {{"tie_word_embeddings", "false"}, {"activation_function", "\"gelu\""}})},
      {"opt", tiny_architecture("opt")},
      {"opt without biases, untied", tiny_architecture("opt", {{"enable_bias", "false"}, {"tie_word_embeddings", "false"}})},
      {"llama", tiny_architecture("llama")},
      {"llama with all biases", tiny_architecture("llama", {{"attention_bias", "true"}, {"mlp_bias", "true"}})},
      {"llama, linear rope", tiny_architecture("llama", {{"rope_scaling", R"({"type": "linear", "factor": 3})"}})},
      {"llama, sizes that leave padding", tiny_architecture("llama", {{"hidden_size", "30"},
                                                                      {"head_dim", "6"},
                                                                      {"num_attention_heads", "6"},
                                                                      {"intermediate_size", "37"},
                                                                      {"mlp_bias", "true"}})},
      {"qwen2", tiny_architecture("qwen2", {{"tie_word_embeddings", "true"}})},
      {"qwen3 with biases", tiny_architecture("qwen3", {{"attention_bias", "true"}, {"head_dim", "16"}})},
      {"mistral", tiny_architecture("mistral", {{"sliding_window", "5"}})}};
}

// The loss of the two micro-batches of `run` with `tensor` moved by `distance` along `direction` (of length `length`).
double moved_loss(const Setup& setup, Ops& ops, const std::string& tensor, const std::vector<float>& direction, double length,
                  double distance) {
  const model::ModelShape shape = shape_of(setup);
  UnitRunner runner(shape, ops, setup.options);
  set_random_parameters(runner, 5);
  std::vector<float> values(runner.parameter(tensor).begin(), runner.parameter(tensor).end());
  for (std::size_t i = 0; i < values.size(); ++i) values[i] += static_cast<float>(distance * direction[i] / length);
  runner.set_parameter(tensor, values);
  double sum = 0;
  for (std::uint64_t m = 0; m < 2; ++m) {
    const Batch batch = random_batch(shape, 70 + m);
    runner.run_micro_batch(batch.tokens, batch.targets, 0, 2 * m, m == 0);
    for (const float v : runner.nll()) sum += v;
  }
  return sum / 32;
}

double length_of(const std::vector<float>& x) {
  double squares = 0;
  for (const float v : x) squares += static_cast<double>(v) * v;
  return std::sqrt(squares);
}

// Along its gradient the loss changes by the gradient's length.
void check_gradient(const Setup& setup, Ops& ops, const std::string& tensor, const std::vector<float>& gradient) {
  constexpr double kStep = 4e-3;
  const double length = length_of(gradient);
  const auto loss = [&](double distance) { return moved_loss(setup, ops, tensor, gradient, length, distance); };
  INFO(tensor << ", |g| " << length);
  CHECK((loss(kStep) - loss(-kStep)) / (2 * kStep) == Approx(length).epsilon(0.01).margin(2e-4));
}

}  // namespace

TEST_CASE("bits do not depend on what is saved, repeated or aliased") {
  ThreadPool pool(2);
  const auto cpu = make_cpu_ops(pool);
  ReferenceOps reference;
  for (const auto& [name, architecture] : variants()) {
    for (const DType compute : {DType::f32, DType::bf16}) {
      for (Ops* ops : {static_cast<Ops*>(cpu.get()), static_cast<Ops*>(&reference)}) {
        INFO(name << " " << dtype_name(compute));
        Setup setup{.architecture = architecture, .compute = compute};
        const Outcome expected = run(setup, *ops);
        setup.options.recompute = true;
        CHECK(run(setup, *ops) == expected);
        setup.options.alias_gradients = false;
        CHECK(run(setup, *ops) == expected);
        if (ops == &reference) continue;
        const Outcome other = run(setup, *ops, [&](UnitRunner& runner) {  // one ulp in the last layer
          const std::string norm = runner.shape().store_units[2].parameters[0].name;
          std::vector<float> values(runner.parameter(norm).begin(), runner.parameter(norm).end());
          const float step = compute == DType::f32 ? 0x1p-23F : 0x1p-7F;
          values[3] *= 1 + step;
          runner.set_parameter(norm, values);
        });
        CHECK_FALSE(other == expected);
      }
    }
  }
}

TEST_CASE("gradients are those of the loss, by central differences") {
  ReferenceOps ops;
  for (const auto& [name, architecture] : variants()) {
    const Setup setup{.architecture = architecture};
    INFO(name);
    for (const auto& [tensor, gradient] : run(setup, ops).gradients) {
      const bool second_layer = tensor.find("layers.1.") != std::string::npos || tensor.find("h.1.") != std::string::npos;
      if (second_layer) continue;        // the same code
      if (length_of(gradient) < 1e-5) {  // a key bias without RoPE shifts all scores of a query equally
        CHECK((tensor.ends_with("k_proj.bias") && architecture.family == model::Family::opt));
        continue;
      }
      check_gradient(setup, ops, tensor, gradient);
    }
  }
}

TEST_CASE("evaluation gives the token losses of training, bit for bit") {
  ThreadPool pool(2);
  const auto ops = make_cpu_ops(pool);
  for (const DType compute : {DType::f32, DType::bf16}) {
    const model::ModelShape shape =
        model::make_shape(tiny_architecture("gpt2"), {.micro = 2, .seq_len = 12, .head_chunk = 7}, compute);
    UnitRunner runner(shape, *ops);
    set_random_parameters(runner, 5);
    const Batch batch = random_batch(shape, 70);
    runner.run_micro_batch(batch.tokens, batch.targets, 0.5F, 0, true);
    const std::vector<float> trained(runner.nll().begin(), runner.nll().end());
    runner.run_micro_batch(batch.tokens, batch.targets, 0, 0, true);
    CHECK(std::equal(trained.begin(), trained.end(), runner.nll().begin()));
    for (std::size_t i = 0; i < trained.size(); ++i) CHECK((trained[i] == 0) == (batch.targets[i] < 0));
  }
}

TEST_CASE("the head's chunk changes rounding only") {
  ReferenceOps ops;
  const Outcome whole = run({.architecture = tiny_architecture("qwen2", {{"tie_word_embeddings", "true"}}), .chunk = 24}, ops);
  const Outcome chunked = run({.architecture = tiny_architecture("qwen2", {{"tie_word_embeddings", "true"}}), .chunk = 5}, ops);
  CHECK(whole.nll == chunked.nll);
  for (const auto& [tensor, gradient] : whole.gradients) {
    const std::vector<float>& other = chunked.gradients.at(tensor);
    for (std::size_t i = 0; i < gradient.size(); ++i) REQUIRE(other[i] == Approx(gradient[i]).epsilon(1e-4).margin(1e-6));
  }
}

TEST_CASE("a micro-batch without targets adds nothing") {
  ReferenceOps ops;
  const model::ModelShape shape =
      model::make_shape(tiny_architecture("llama"), {.micro = 1, .seq_len = 12, .head_chunk = 7}, DType::f32);
  UnitRunner runner(shape, ops);
  set_random_parameters(runner, 5);
  const Batch batch = random_batch(shape, 70);
  const std::vector<std::int32_t> masked(batch.targets.size(), -1);
  runner.run_micro_batch(batch.tokens, batch.targets, 0.1F, 0, true);
  runner.finish_gradients();
  const auto alone = runner.gradients();
  runner.run_micro_batch(batch.tokens, masked, 0.1F, 1, false);
  for (const float v : runner.nll()) CHECK(v == 0);
  runner.finish_gradients();
  CHECK(runner.gradients() == alone);
  CHECK(runner.global_norm() > 0);
}

TEST_CASE("dropout follows seed, step and sequence, and its gradient is the one of the loss") {
  ReferenceOps ops;
  model::Architecture a = tiny_architecture("gpt2");
  a.dropout_embedding = 0.1;
  a.dropout_attention_out = 0.2;
  a.dropout_mlp_out = 0.3;
  Setup setup{.architecture = a};
  const Outcome expected = run(setup, ops);
  CHECK_FALSE(expected == run({.architecture = tiny_architecture("gpt2")}, ops));
  setup.options.recompute = true;
  setup.options.alias_gradients = false;
  CHECK(run(setup, ops) == expected);
  setup.options.step = 2;
  CHECK_FALSE(run(setup, ops) == expected);
  setup.options = {.seed = 2};
  CHECK_FALSE(run(setup, ops) == expected);

  setup.options = {};
  for (const char* tensor :
       {"transformer.h.0.mlp.c_proj.weight", "transformer.h.0.attn.c_proj.weight", "transformer.wpe.weight"}) {
    check_gradient(setup, ops, tensor, expected.gradients.at(tensor));
  }
}

TEST_CASE("OPT adds row position + 2 of its table") {
  ReferenceOps ops;
  const model::ModelShape shape =
      model::make_shape(tiny_architecture("opt"), {.micro = 1, .seq_len = 16, .head_chunk = 16}, DType::f32);
  UnitRunner runner(shape, ops);
  std::vector<float> rows(18 * 32);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i / 32);
  runner.set_parameter("model.decoder.embed_positions.weight", rows);
  const std::vector<std::int32_t> tokens(16, 3), targets(16, 4);
  runner.run_micro_batch(tokens, targets, 0, 0, true);
  const std::vector<float> embedded = runner.boundary(0);
  CHECK(embedded[0] == 2);
  CHECK(embedded[15 * 32] == 17);
}

TEST_CASE("biases count: qkv biases of Qwen2 change the logits") {
  ReferenceOps ops;
  const model::ModelShape shape =
      model::make_shape(tiny_architecture("qwen2"), {.micro = 1, .seq_len = 12, .head_chunk = 12}, DType::f32);
  const auto logits = [&](float bias) {
    UnitRunner runner(shape, ops);
    set_random_parameters(runner, 5);
    for (const char* name : {"q_proj", "k_proj", "v_proj"}) {
      const std::string tensor = std::string("model.layers.0.self_attn.") + name + ".bias";
      runner.set_parameter(tensor, std::vector<float>(runner.parameter(tensor).size(), bias));
    }
    const Batch batch = random_batch(shape, 70);
    runner.run_micro_batch(batch.tokens, batch.targets, 0, 0, true);
    return runner.logits(11);
  };
  CHECK(logits(0.5F) != logits(0));
}

TEST_CASE("calls that lack something are internal errors, not crashes") {
  ReferenceOps ops;
  const model::ModelShape shape =
      model::make_shape(tiny_architecture("llama"), {.micro = 1, .seq_len = 4, .head_chunk = 4}, DType::f32);
  model::UnitCall call;
  CHECK_THROWS_AS(model::unit_forward(shape, 1, call), InternalError);
  call.ops = &ops;
  CHECK_THROWS_AS(model::unit_forward(shape, 1, call), InternalError);
  CHECK_THROWS_AS(model::unit_backward(shape, 1, call), InternalError);
  CHECK_THROWS_AS(model::head_loss(shape, call), InternalError);
  CHECK_THROWS_AS(model::unit_forward(shape, 9, call), InternalError);
}

}  // namespace spipe::test
