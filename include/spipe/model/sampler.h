// From logits to the next token.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace spipe::model {

// Applied in this order: penalty, temperature, top_k, top_p.
struct SamplingOptions {
  double temperature = 1;  // logits are divided by it; 0: always the likeliest token, the lowest id among equals
  std::int64_t top_k = 0;  // the k likeliest; 0: all. Among equals the lower id comes first
  double top_p = 1;        // the fewest likeliest whose probabilities sum to at least this (Holtzman et al. 2020)
  // Logits of tokens that the sequence already has are divided by it where positive, multiplied where negative (Keskar et al.
  // 2019, CTRL, section 4.1); 1: none.
  double repetition_penalty = 1;
  std::uint64_t seed = 1;
};

struct Choice {
  std::int32_t token = 0;
  double probability = 0;
};
// What may come next, with probabilities that sum to 1; likeliest first where top_k or top_p cut. `sequence`: the tokens so far
// (penalty). Ids from `vocab` on never take part. Error when a logit that takes part is NaN or +inf, or all are -inf.
[[nodiscard]] std::vector<Choice> next_choices(const SamplingOptions& options, std::span<const float> logits,
                                               std::span<const std::int32_t> sequence, std::int64_t vocab);
// One of them: a function of (seed, index) and the choices alone; `index` counts the tokens picked.
[[nodiscard]] std::int32_t pick(const SamplingOptions& options, std::span<const Choice> choices, std::uint64_t index);

}  // namespace spipe::model
