#include "spipe/model/sampler.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "spipe/base/error.h"
#include "spipe/base/random.h"

namespace spipe::model {
namespace {

// Uniform in [0, 1) with 53 bits: 24 would never pick what is rarer than one in 16 million.
double uniform53(std::uint64_t seed, std::uint64_t index) {
  const PhiloxKey key = make_key(seed, static_cast<std::uint64_t>(RandomPurpose::sample));
  const auto words = philox4x32({static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32), 0, 1}, key);
  const std::uint64_t bits = (std::uint64_t{words[0]} << 32 | words[1]) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

bool likelier(const Choice& a, const Choice& b) {
  return a.probability != b.probability ? a.probability > b.probability : a.token < b.token;
}

void penalise(double penalty, std::span<const std::int32_t> sequence, std::vector<Choice>& scores) {
  if (penalty == 1) return;
  std::vector<bool> done(scores.size());
  for (const std::int32_t token : sequence) {
    if (token < 0 || static_cast<std::size_t>(token) >= scores.size() || done[static_cast<std::size_t>(token)]) continue;
    done[static_cast<std::size_t>(token)] = true;
    double& score = scores[static_cast<std::size_t>(token)].probability;
    score = score > 0 ? score / penalty : score * penalty;
  }
}

// Scores become probabilities.
void softmax(std::vector<Choice>& choices, double highest, double temperature) {
  double sum = 0;
  for (Choice& c : choices) sum += c.probability = std::exp((c.probability - highest) / temperature);
  for (Choice& c : choices) c.probability /= sum;
}

// The fewest likeliest that reach `top_p`; they are sorted already.
void cut_tail(std::vector<Choice>& choices, double top_p) {
  double sum = 0;
  std::size_t kept = 0;
  while (kept < choices.size() && (kept == 0 || sum < top_p)) sum += choices[kept++].probability;
  choices.resize(kept);
  for (Choice& c : choices) c.probability /= sum;
}

}  // namespace

std::vector<Choice> next_choices(const SamplingOptions& options, std::span<const float> logits,
                                 std::span<const std::int32_t> sequence, std::int64_t vocab) {
  const std::size_t count = std::min(logits.size(), static_cast<std::size_t>(std::max<std::int64_t>(vocab, 0)));
  SPIPE_CHECK(count > 0, "nothing to choose from");
  std::vector<Choice> choices(count);
  for (std::size_t i = 0; i < count; ++i) {
    const double logit = logits[i];
    if (std::isnan(logit) || logit == HUGE_VAL) {
      throw Error("the model gives a logit that is no finite number (token " + std::to_string(i) + ")", {},
                  "its parameters are broken: use an older checkpoint");
    }
    choices[i] = {static_cast<std::int32_t>(i), logit};
  }
  penalise(options.repetition_penalty, sequence, choices);
  const Choice best = *std::min_element(choices.begin(), choices.end(), likelier);
  if (best.probability == -HUGE_VAL) throw Error("the model gives no token a chance: every logit is -inf");
  if (options.temperature == 0) return {{best.token, 1}};
  const auto top_k = static_cast<std::size_t>(options.top_k);
  const bool cut = options.top_k > 0 && top_k < count;
  if (cut) {
    std::partial_sort(choices.begin(), choices.begin() + static_cast<std::ptrdiff_t>(top_k), choices.end(), likelier);
    choices.resize(top_k);
  } else if (options.top_p < 1) {
    std::sort(choices.begin(), choices.end(), likelier);
  }
  softmax(choices, best.probability, options.temperature);
  if (options.top_p < 1) cut_tail(choices, options.top_p);
  return choices;
}

std::int32_t pick(const SamplingOptions& options, std::span<const Choice> choices, std::uint64_t index) {
  SPIPE_CHECK(!choices.empty(), "nothing to choose from");
  const double at = uniform53(options.seed, index);
  double sum = 0;
  std::int32_t last = choices.front().token;  // of those that have a chance, should rounding leave the sum below 1
  for (const Choice& c : choices) {
    if (c.probability <= 0) continue;
    sum += c.probability;
    last = c.token;
    if (at < sum) break;
  }
  return last;
}

}  // namespace spipe::model
