#include <catch2/catch.hpp>

#include "configs.h"
#include "spipe/base/error.h"

namespace spipe::test {

using Catch::Contains;
using Catch::StartsWith;

TEST_CASE("heads that do not divide the hidden size are refused with both values and the nearest legal ones") {
  const std::string message =
      refusal(tiny_config("llama", {{"hidden_size", "1600"}, {"num_attention_heads", "48"}, {"num_key_value_heads", "48"}}));
  CHECK_THAT(message, StartsWith("config.json: "));
  CHECK_THAT(message, Contains("num_attention_heads 48") && Contains("hidden_size 1600") && Contains("40 or 50"));
  CHECK_THAT(refusal(tiny_config("gpt2", {{"n_embd", "1600"}, {"n_head", "48"}})),
             Contains("n_head 48") && Contains("n_embd 1600"));
}

TEST_CASE("kv heads must divide the heads") {
  const std::string message = refusal(tiny_config("llama", {{"num_key_value_heads", "3"}}));
  CHECK_THAT(message, Contains("num_key_value_heads 3") && Contains("num_attention_heads 4") && Contains("2 or 4"));
  CHECK_THAT(refusal(tiny_config("llama", {{"num_key_value_heads", "8"}})),
             Contains("num_key_value_heads 8") && Contains("num_attention_heads 4") && Contains("is 4"));
}

TEST_CASE("rotary positions need an even head size") {
  const std::string message =
      refusal(tiny_config("llama", {{"hidden_size", "30"}, {"num_attention_heads", "6"}, {"num_key_value_heads", "6"}}));
  CHECK_THAT(message, Contains("head size is 5") && Contains("hidden_size 30") && Contains("num_attention_heads 6"));
  CHECK(refusal(tiny_config("gpt2", {{"n_embd", "30"}, {"n_head", "6"}})).empty());  // learned positions do not
}

TEST_CASE("sizes must be positive") {
  CHECK_THAT(refusal(tiny_config("llama", {{"num_attention_heads", "0"}})), Contains("num_attention_heads 0"));
  CHECK_THAT(refusal(tiny_config("llama", {{"num_attention_heads", "-4"}})), Contains("num_attention_heads -4"));
  CHECK_THAT(refusal(tiny_config("llama", {{"num_hidden_layers", "0"}})), Contains("num_hidden_layers 0"));
  CHECK_THAT(refusal(tiny_config("llama", {{"vocab_size", "0"}})), Contains("vocab_size 0"));
  CHECK_THAT(refusal(tiny_config("llama", {{"head_dim", "0"}})), Contains("head_dim"));
  CHECK_THAT(refusal(tiny_config("gpt2", {{"n_positions", "0"}})), Contains("n_positions 0"));
  CHECK_THAT(refusal(tiny_config("mistral", {{"sliding_window", "0"}})), Contains("sliding_window"));
  CHECK_THAT(refusal(tiny_config("llama", {{"rms_norm_eps", "0"}})), Contains("epsilon"));
}

TEST_CASE("sizes whose products overflow are refused") {
  CHECK_THAT(refusal(tiny_config("llama", {{"vocab_size", "4611686018427387904"}})), Contains("too large"));
  CHECK_THAT(refusal(tiny_config("llama", {{"intermediate_size", "9223372036854775807"}})), Contains("too large"));
  CHECK_THAT(refusal(tiny_config("llama", {{"head_dim", "4611686018427387904"}})), Contains("too large"));
  CHECK_THAT(refusal(tiny_config("llama", {{"hidden_size", "18446744073709551615"}})), Contains("hidden_size"));
  CHECK_THAT(refusal(tiny_config("gpt2", {{"n_embd", "9223372036854775804"}, {"n_inner", "null"}})), Contains("n_inner"));
  CHECK_THAT(refusal(tiny_config("llama", {{"num_hidden_layers", "1000000000"}})), Contains("num_hidden_layers"));
}

TEST_CASE("sequences longer than a learned position table are refused, longer than rotary advice only warned about") {
  for (const char* family : {"gpt2", "opt"}) {
    const model::Architecture a = tiny_architecture(family);
    CHECK_NOTHROW(model::check_sequence_length(a, 16, "run.yaml:3"));
    CHECK_THROWS_WITH(model::check_sequence_length(a, 17, "run.yaml:3"),
                      StartsWith("run.yaml:3: ") && Contains("17") && Contains("16"));
  }
  CHECK_NOTHROW(model::check_sequence_length(tiny_architecture("llama"), 17, "run.yaml:3"));
}

}  // namespace spipe::test
