#include <catch2/catch.hpp>
#include <random>
#include <set>

#include "configs.h"
#include "spipe/base/error.h"
#include "spipe/model/families.h"
#include "spipe/model/shape.h"

namespace spipe::test {
namespace {

model::ModelShape shape_of(const model::Architecture& a, std::int64_t micro = 2, std::int64_t seq_len = 16,
                           std::int64_t chunk = 10) {
  return model::make_shape(a, {.micro = micro, .seq_len = seq_len, .head_chunk = chunk}, DType::f32);
}

const model::Parameter& parameter(const std::vector<model::StoreUnit>& units, const std::string& name) {
  for (const model::StoreUnit& unit : units) {
    for (const model::Parameter& p : unit.parameters) {
      if (p.name == name) return p;
    }
  }
  throw std::runtime_error("no " + name);
}

struct Published {
  const char* config;
  std::uint64_t parameters;
};

}  // namespace

TEST_CASE("parameter counts are those of the published models") {
  const std::vector<Published> models = {
      {R"({"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024})",
       124439808},
      {R"({"model_type": "opt", "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
           "ffn_dim": 3072, "max_position_embeddings": 2048})",
       125239296},
      {R"({"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
           "intermediate_size": 11008})",
       6738415616},
      {R"({"model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "intermediate_size": 14336, "sliding_window": 4096})",
       7241732096},
      {R"({"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
           "num_key_value_heads": 2, "intermediate_size": 4864, "tie_word_embeddings": true})",
       494032768},
      {R"({"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
           "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "tie_word_embeddings": true})",
       596049920},
  };
  for (const Published& published : models) {
    const model::Architecture a = model::architecture_from_hf_text(published.config, "config.json");
    CHECK(shape_of(a).parameters() == published.parameters);
  }
}

TEST_CASE("store units come in order and hold aligned tensors that do not overlap") {
  for (const char* family : {"gpt2", "opt", "llama", "qwen2", "qwen3", "mistral"}) {
    for (const char* tied : {"true", "false"}) {
      const model::ModelShape shape = shape_of(tiny_architecture(family, {{"tie_word_embeddings", tied}}));
      INFO(family << " tied " << tied);
      REQUIRE(shape.unit_count() == 4);
      REQUIRE(shape.store_unit_count() == (shape.tied_unit >= 0 ? 5 : 4));
      CHECK((shape.tied_unit == 4) == (std::string(tied) == "true"));
      CHECK(shape.units[0].name == "embedding");
      CHECK(shape.units[1].name == "layer 0");
      CHECK(shape.units[3].name == "head");
      std::set<std::string> names;
      for (const model::StoreUnit& unit : shape.store_units) {
        std::uint64_t end = 0;
        for (const model::Parameter& p : unit.parameters) {
          CHECK(p.offset % 128 == 0);
          CHECK(p.offset >= end);
          CHECK(p.decay == (p.shape.rank() >= 2));
          CHECK(names.insert(p.name).second);
          end = p.offset + p.elements();
        }
        CHECK(unit.elements % 128 == 0);
        CHECK(unit.elements >= end);
      }
    }
  }
}

TEST_CASE("a tied matrix is a unit of its own with two gradient sources, the head first") {
  const model::ModelShape tied = shape_of(tiny_architecture("qwen2", {{"tie_word_embeddings", "true"}}));
  CHECK(tied.units[0].store_units == std::vector<int>{0, 4});
  CHECK(tied.units[1].store_units == std::vector<int>{1});
  CHECK(tied.units[3].store_units == std::vector<int>{3, 4});
  CHECK(tied.gradient_sources(4) == std::vector<int>{3, 0});
  CHECK(tied.gradient_sources(2) == std::vector<int>{2});
  CHECK(tied.gradient_sources(0).empty());  // rotary and tied: nothing left in the embedding unit
  CHECK(tied.store_units[0].elements == 0);
  CHECK(tied.store_units[4].parameters.at(0).name == "model.embed_tokens.weight");

  const model::ModelShape gpt2 = shape_of(tiny_architecture("gpt2"));
  CHECK(gpt2.gradient_sources(0) == std::vector<int>{0});  // its position table
  CHECK(gpt2.store_units[4].parameters.at(0).name == "transformer.wte.weight");
}

TEST_CASE("the head size is the config's when it is given") {
  for (const char* head_dim : {"16", "null", ""}) {
    const bool given = std::string(head_dim) == "16";
    const model::Architecture a = tiny_architecture("llama", {{"hidden_size", "24"}, {"head_dim", head_dim}});
    CHECK(a.head_dim == (given ? 16 : 6));
    const auto units = model::store_units_of(a);
    CHECK(parameter(units, "model.layers.1.self_attn.q_proj.weight").shape == (given ? Shape{64, 24} : Shape{24, 24}));
    CHECK(parameter(units, "model.layers.1.self_attn.k_proj.weight").shape == (given ? Shape{32, 24} : Shape{12, 24}));
    CHECK(parameter(units, "model.layers.1.self_attn.v_proj.weight").shape == (given ? Shape{32, 24} : Shape{12, 24}));
    CHECK(parameter(units, "model.layers.1.self_attn.o_proj.weight").shape == (given ? Shape{24, 64} : Shape{24, 24}));
  }
}

TEST_CASE("GPT-2 matrices are stored in by out, OPT tables have two rows more") {
  const auto gpt2 = model::store_units_of(tiny_architecture("gpt2"));
  CHECK(parameter(gpt2, "transformer.h.1.attn.c_attn.weight").shape == Shape{32, 96});
  CHECK(parameter(gpt2, "transformer.h.1.mlp.c_fc.weight").shape == Shape{32, 64});
  CHECK(parameter(gpt2, "transformer.wpe.weight").shape == Shape{16, 32});
  const auto opt = model::store_units_of(tiny_architecture("opt"));
  CHECK(parameter(opt, "model.decoder.embed_positions.weight").shape == Shape{18, 32});
}

TEST_CASE("the head's chunk covers the rows evenly within its budget") {
  std::mt19937_64 random(11);
  const model::Architecture tiny = tiny_architecture("llama");
  for (int i = 0; i < 2000; ++i) {
    model::Architecture a = tiny;
    a.vocab_size = 1 + static_cast<std::int64_t>(random() % 300000);
    const std::int64_t tokens = 1 + static_cast<std::int64_t>(random() % 20000);
    const std::int64_t chunk = model::default_head_chunk(a, tokens);
    INFO("vocab " << a.vocab_size << " tokens " << tokens << " chunk " << chunk);
    REQUIRE(chunk >= std::min<std::int64_t>(128, tokens));
    REQUIRE(chunk <= tokens);
    REQUIRE(chunk <= std::max<std::int64_t>(256, (8 << 20) / 4 / a.vocab_size));
    const std::int64_t chunks = (tokens + chunk - 1) / chunk, last = tokens - (chunks - 1) * chunk;
    REQUIRE(chunk - last < chunks);  // as even as whole rows allow
  }
}

TEST_CASE("FLOPs count matmuls and the pairs that attention sees") {
  const model::Architecture a = tiny_architecture("mistral", {{"sliding_window", "4"}});
  const model::ModelShape shape = shape_of(a, 2, 16);
  const double weights = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 64, pairs = 1 + 2 + 3 + 13 * 4;
  CHECK(shape.units[1].forward_flops == 2 * 32 * weights + 4 * pairs * 2 * 32);
  CHECK(shape.units[1].backward_flops == 4 * 32 * weights + 10 * pairs * 2 * 32);
  CHECK(shape.units[3].forward_flops == 2.0 * 32 * 32 * 97);
  CHECK(model::model_flops_per_token(shape) ==
        Approx(6 * (2 * weights + 32 * 97) + 3 * 2 * 4 * pairs * 2 * 32 / 32).epsilon(1e-12));
}

TEST_CASE("sizes that depend on the batch are checked") {
  const model::Architecture a = tiny_architecture("llama");
  CHECK_THROWS_AS(shape_of(a, std::int64_t{1} << 40, std::int64_t{1} << 40), Error);
  const model::ModelShape shape = shape_of(a, 3, 16);
  CHECK(shape.boundary_bytes == 3 * 16 * 32 * 4);
  CHECK(shape.input_bytes == 3 * 16 * 8);
  CHECK(shape.tokens_per_micro() == 48);
  for (const model::ComputeUnit& unit : shape.units) {
    CHECK(unit.saved.bytes % 64 == 0);
    for (const model::Field& field : unit.saved.fields) CHECK(field.offset % 64 == 0);
  }
}

}  // namespace spipe::test
