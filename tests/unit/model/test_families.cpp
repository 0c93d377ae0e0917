#include <catch2/catch.hpp>

#include "configs.h"
#include "spipe/base/error.h"
#include "spipe/model/families.h"

namespace spipe::test {

using Catch::Contains;
using model::Architecture;

TEST_CASE("missing keys take the family's defaults") {
  const Architecture gpt2 = tiny_architecture("gpt2", {{"n_inner", "null"}, {"n_positions", ""}});
  CHECK(gpt2.ffn_size == 4 * 32);
  CHECK(gpt2.max_positions == 1024);
  CHECK(gpt2.tied_embeddings);
  CHECK(gpt2.mlp == model::MlpKind::gelu_tanh);
  CHECK(gpt2.norm_eps == 1e-5);
  CHECK((gpt2.fused_qkv && gpt2.conv1d && gpt2.qkv_bias && gpt2.out_bias && gpt2.mlp_bias));

  const Architecture opt = tiny_architecture("opt");
  CHECK(opt.position_offset == 2);
  CHECK(opt.tied_embeddings);
  CHECK(opt.mlp == model::MlpKind::relu);
  CHECK(opt.norm_eps == 1e-5);

  const Architecture llama = tiny_architecture("llama", {{"num_key_value_heads", ""}, {"max_position_embeddings", ""}});
  CHECK(llama.kv_heads == 4);
  CHECK(llama.max_positions == 2048);
  CHECK(llama.norm_eps == 1e-6);
  CHECK(llama.rope.theta == 10000);
  CHECK_FALSE((llama.tied_embeddings || llama.qkv_bias || llama.out_bias || llama.mlp_bias || llama.qk_norm));
  CHECK(tiny_architecture("llama", {{"num_key_value_heads", "null"}}).kv_heads == 4);

  const Architecture qwen2 = tiny_architecture("qwen2");
  CHECK((qwen2.qkv_bias && !qwen2.out_bias && !qwen2.tied_embeddings));
  CHECK(tiny_architecture("qwen3").qk_norm);
  CHECK_FALSE(tiny_architecture("qwen3").qkv_bias);
  CHECK_THAT(refusal(tiny_config("qwen2", {{"num_key_value_heads", ""}})), Contains("num_key_value_heads"));
}

TEST_CASE("biases follow the config and the family") {
  const Architecture llama = tiny_architecture("llama", {{"attention_bias", "true"}, {"mlp_bias", "true"}});
  CHECK((llama.qkv_bias && llama.out_bias && llama.mlp_bias));
  const Architecture opt = tiny_architecture("opt", {{"enable_bias", "false"}});
  CHECK_FALSE((opt.qkv_bias || opt.out_bias || opt.mlp_bias));
  CHECK_THAT(refusal(tiny_config("mistral", {{"attention_bias", "true"}})), Contains("attention_bias"));
  CHECK_THAT(refusal(tiny_config("qwen2", {{"attention_bias", "true"}})), Contains("attention_bias"));
  CHECK_THAT(refusal(tiny_config("qwen3", {{"mlp_bias", "true"}})), Contains("mlp_bias"));
}

TEST_CASE("windows are taken where all layers have them, and refused where layers differ") {
  CHECK(tiny_architecture("mistral", {{"sliding_window", "8"}}).sliding_window == 8);
  CHECK(tiny_architecture("mistral", {{"sliding_window", "null"}}).sliding_window == 0);
  CHECK(tiny_architecture("mistral").sliding_window == 4096);
  CHECK(tiny_architecture("qwen2", {{"sliding_window", "8"}}).sliding_window == 0);
  CHECK(tiny_architecture("qwen2", {{"sliding_window", "8"}, {"use_sliding_window", "true"}, {"max_window_layers", "2"}})
            .sliding_window == 0);
  CHECK(tiny_architecture("qwen2", {{"sliding_window", "8"}, {"use_sliding_window", "true"}, {"max_window_layers", "0"}})
            .sliding_window == 8);
  CHECK_THAT(
      refusal(tiny_config("qwen2", {{"sliding_window", "8"}, {"use_sliding_window", "true"}, {"max_window_layers", "1"}})),
      Contains("max_window_layers"));
  const char* const full = R"(["full_attention", "full_attention"])";
  const char* const sliding = R"(["sliding_attention", "sliding_attention"])";
  const char* const mixed = R"(["full_attention", "sliding_attention"])";
  CHECK(tiny_architecture("qwen3", {{"layer_types", full}}).sliding_window == 0);
  CHECK(tiny_architecture("qwen3", {{"layer_types", sliding}, {"use_sliding_window", "true"}, {"sliding_window", "8"}})
            .sliding_window == 8);
  CHECK_THAT(refusal(tiny_config("qwen3", {{"layer_types", mixed}, {"use_sliding_window", "true"}, {"sliding_window", "8"}})),
             Contains("layer_types"));
  CHECK_THAT(refusal(tiny_config("qwen3", {{"layer_types", sliding}})), Contains("layer_types"));
  CHECK_THAT(refusal(tiny_config("llama", {{"layer_types", R"(["full_attention", "linear_attention"])"}})),
             Contains("layer_types"));
  CHECK_THAT(refusal(tiny_config("llama", {{"layer_types", R"(["full_attention"])"}})), Contains("layer_types"));
}

TEST_CASE("keys that change the math are refused by name, their neutral values are not") {
  struct Key {
    const char *family, *key, *value, *neutral;
  };
  for (const Key& k : {Key{"llama", "quantization_config", R"({"bits": 4})", "null"},
                       Key{"llama", "num_local_experts", "8", "0"},
                       Key{"qwen2", "num_experts", "60", "null"},
                       Key{"llama", "attention_multiplier", "0.5", "null"},
                       Key{"llama", "residual_multiplier", "0.22", "1.0"},
                       Key{"llama", "embedding_multiplier", "12", "1"},
                       Key{"llama", "logits_scaling", "8.0", "1.0"},
                       Key{"llama", "final_logit_softcapping", "30.0", "null"},
                       Key{"llama", "attn_logit_softcapping", "50.0", "null"},
                       Key{"llama", "partial_rotary_factor", "0.5", "1.0"},
                       Key{"llama", "use_parallel_residual", "true", "false"},
                       Key{"gpt2", "scale_attn_by_inverse_layer_idx", "true", "false"},
                       Key{"gpt2", "scale_attn_weights", "false", "true"},
                       Key{"gpt2", "add_cross_attention", "true", "false"},
                       Key{"opt", "do_layer_norm_before", "false", "true"},
                       Key{"opt", "word_embed_proj_dim", "16", "32"},
                       Key{"opt", "_remove_final_layer_norm", "true", "false"},
                       Key{"opt", "layer_norm_elementwise_affine", "false", "true"},
                       Key{"llama", "hidden_act", "\"gelu\"", "\"silu\""},
                       Key{"gpt2", "activation_function", "\"quick_gelu\"", "\"gelu_new\""},
                       Key{"opt", "activation_function", "\"silu\"", "\"relu\""}}) {
    INFO(k.key);
    const std::string message = refusal(tiny_config(k.family, {{k.key, k.value}}));
    CHECK_THAT(message, Catch::StartsWith("config.json: ") && Contains(k.key));
    CHECK(message.find('\n') == std::string::npos);
    CHECK(refusal(tiny_config(k.family, {{k.key, k.neutral}})).empty());
  }
}

TEST_CASE("misspelt keys are refused with the key that was meant") {
  CHECK_THAT(refusal(tiny_config("llama", {{"rope_thetta", "500000"}})), Contains("rope_thetta") && Contains("'rope_theta'"));
  CHECK_THAT(refusal(tiny_config("gpt2", {{"n_embed", "64"}, {"layer_norm_epsilom", "1e-6"}})), Contains("layer_norm_epsilon"));
  CHECK_THAT(refusal(tiny_config("llama", {{"hidden_size", ""}, {"hidden_sise", "32"}})), Contains("hidden_size"));
  CHECK(refusal(tiny_config("llama", {{"some_new_key", "1"}})).empty());  // named in a warning
}

TEST_CASE("files that are not a config are refused with the place") {
  CHECK_THAT(refusal("{\n\"model_type\": \"llama\",\n \"vocab_size\" 3}"), Contains("config.json:3: not valid JSON"));
  CHECK_THAT(refusal("[]"), Contains("not a JSON object"));
  CHECK_THAT(refusal(""), Contains("not valid JSON"));
  CHECK_THAT(refusal("{\"model_type\": " + std::string(200000, '[')), Contains("nested deeper"));
  CHECK_THAT(refusal("{\"vocab_size\": 3}"), Contains("'model_type' is missing"));
  CHECK_THAT(refusal(R"({"model_type": "lama"})"), Contains("did you mean 'llama'?"));
  CHECK_THAT(refusal(R"({"model_type": "mixtral"})"), Contains("'mixtral'") && Contains("gpt2, opt, llama"));
  CHECK_THAT(refusal(tiny_config("llama", {{"vocab_size", "\"97\""}})),
             Contains("'vocab_size' is \"97\"") && Contains("integer"));
  CHECK_THAT(refusal(tiny_config("llama", {{"vocab_size", "97.5"}})), Contains("integer"));
  CHECK_THAT(refusal(tiny_config("llama", {{"vocab_size", "[97]"}})), Contains("a list"));
  CHECK_THAT(refusal(tiny_config("llama", {{"vocab_size", ""}})), Contains("'vocab_size' is missing"));
  CHECK_THAT(refusal(tiny_config("llama", {{"tie_word_embeddings", "1"}})), Contains("true or false"));
}

TEST_CASE("a written config reads back to the same architecture") {
  const char* const llama3 = R"({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                 "original_max_position_embeddings": 64})";
  const std::vector<Architecture> architectures = {
      tiny_architecture("gpt2",
                        {{"attn_pdrop", "0.1"}, {"embd_pdrop", "0.1"}, {"bos_token_id", "50256"}, {"eos_token_id", "50256"}}),
      tiny_architecture(
          "gpt2", {{"tie_word_embeddings", "false"}, {"activation_function", "\"gelu\""}, {"layer_norm_epsilon", "1e-6"}}),
      tiny_architecture("opt", {{"enable_bias", "false"}, {"activation_function", "\"gelu_new\""}, {"init_std", "0.006"}}),
      tiny_architecture("llama",
                        {{"rope_theta", "500000"}, {"rope_scaling", llama3}, {"head_dim", "16"}, {"attention_bias", "true"}}),
      tiny_architecture(
          "llama", {{"rope_scaling", R"({"type": "linear", "factor": 2})"}, {"mlp_bias", "true"}, {"eos_token_id", "[1, 2]"}}),
      tiny_architecture("qwen2", {{"use_sliding_window", "true"}, {"sliding_window", "8"}, {"max_window_layers", "0"}}),
      tiny_architecture("qwen2", {{"tie_word_embeddings", "true"}}),
      tiny_architecture("qwen3", {{"head_dim", "16"}, {"rms_norm_eps", "1e-05"}}),
      tiny_architecture("mistral", {{"sliding_window", "8"}}),
      tiny_architecture("mistral", {{"sliding_window", "null"}}),
  };
  for (const Architecture& a : architectures) {
    const std::string text = model::hf_config_text(a, "bfloat16");
    INFO(text);
    CHECK(model::architecture_from_hf_text(text, "written") == a);
    CHECK_THAT(text, Contains("\"torch_dtype\": \"bfloat16\""));
    Architecture other = a;
    other.norm_eps *= 2;
    CHECK_FALSE(model::architecture_from_hf_text(text, "written") == other);
  }
  CHECK_THAT(model::hf_config_text(architectures[0], "float32"),
             Contains("\"attn_pdrop\": 0.1") && Contains("\"eos_token_id\": 50256"));
}

TEST_CASE("dropout keys of a config are not obeyed") {
  const Architecture gpt2 = tiny_architecture("gpt2", {{"attn_pdrop", "0.1"}, {"embd_pdrop", "0.1"}, {"resid_pdrop", "0.1"}});
  CHECK(gpt2.dropout_embedding == 0);
  CHECK(gpt2.dropout_attention_out == 0);
  CHECK(gpt2.dropout_mlp_out == 0);
}

TEST_CASE("tensor names are known with and without the usual prefixes, and buffers are ignored") {
  const Architecture gpt2 = tiny_architecture("gpt2"), opt = tiny_architecture("opt"), llama = tiny_architecture("llama");
  const auto name = [](const Architecture& a, const char* n) { return model::canonical_tensor_name(a, n); };
  CHECK(name(gpt2, "h.0.attn.c_attn.bias") == "transformer.h.0.attn.c_attn.bias");
  CHECK(name(gpt2, "transformer.h.0.attn.c_attn.bias") == "transformer.h.0.attn.c_attn.bias");
  CHECK(name(gpt2, "wte.weight") == "transformer.wte.weight");
  CHECK(name(gpt2, "wpe.weight") == "transformer.wpe.weight");
  CHECK(name(gpt2, "ln_f.bias") == "transformer.ln_f.bias");
  CHECK(name(gpt2, "lm_head.weight") == "lm_head.weight");
  CHECK(name(gpt2, "h.11.attn.bias").empty());
  CHECK(name(gpt2, "transformer.h.11.attn.masked_bias").empty());
  CHECK(name(gpt2, "foo.weight") == "foo.weight");
  CHECK(name(opt, "decoder.layers.0.fc1.weight") == "model.decoder.layers.0.fc1.weight");
  CHECK(name(opt, "model.decoder.layers.0.fc1.weight") == "model.decoder.layers.0.fc1.weight");
  CHECK(name(llama, "layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight");
  CHECK(name(llama, "model.layers.0.self_attn.q_proj.bias") == "model.layers.0.self_attn.q_proj.bias");
  CHECK(name(llama, "model.layers.0.self_attn.rotary_emb.inv_freq").empty());
}

}  // namespace spipe::test
