// The sampler on logits made by hand.
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <map>

#include "spipe/base/error.h"
#include "spipe/model/sampler.h"

using namespace spipe;
using model::Choice;
using model::next_choices;
using model::pick;
using model::SamplingOptions;

namespace {

// Probabilities 0.4, 0.3, 0.2, 0.1 of tokens 2, 0, 3, 1.
const std::vector<float> kLogits = {std::log(0.3F), std::log(0.1F), std::log(0.4F), std::log(0.2F)};

std::map<std::int32_t, double> chances(const SamplingOptions& options, const std::vector<float>& logits = kLogits,
                                       const std::vector<std::int32_t>& sequence = {}, std::int64_t vocab = 4) {
  std::map<std::int32_t, double> result;
  double sum = 0;
  for (const Choice& c : next_choices(options, logits, sequence, vocab)) {
    CHECK(result.emplace(c.token, c.probability).second);
    sum += c.probability;
  }
  CHECK(sum == Approx(1).epsilon(1e-12));
  return result;
}

void check(const std::map<std::int32_t, double>& found, const std::map<std::int32_t, double>& wanted) {
  REQUIRE(found.size() == wanted.size());
  for (const auto& [token, probability] : wanted) {
    INFO("token " << token);
    REQUIRE(found.contains(token));
    CHECK(found.at(token) == Approx(probability).epsilon(1e-6));
  }
}

}  // namespace

TEST_CASE("without cuts a token has the softmax's probability") {
  check(chances({}), {{0, 0.3}, {1, 0.1}, {2, 0.4}, {3, 0.2}});
}

TEST_CASE("temperature sharpens, flattens, and at zero leaves one token") {
  // Squares at 0.5, square roots at 2, normalised.
  const double squares = 0.16 + 0.09 + 0.04 + 0.01;
  check(chances({.temperature = 0.5}), {{0, 0.09 / squares}, {1, 0.01 / squares}, {2, 0.16 / squares}, {3, 0.04 / squares}});
  const double roots = std::sqrt(0.4) + std::sqrt(0.3) + std::sqrt(0.2) + std::sqrt(0.1);
  CHECK(chances({.temperature = 2})[1] == Approx(std::sqrt(0.1) / roots).epsilon(1e-6));
  check(chances({.temperature = 0}), {{2, 1}});
  check(chances({.temperature = 0}, {1, 5, 5, 5}), {{1, 1}});  // the lowest id among equals
}

TEST_CASE("top-k keeps the k likeliest, top-p the fewest that reach p") {
  check(chances({.top_k = 1}), {{2, 1}});
  check(chances({.top_k = 2}), {{0, 3.0 / 7}, {2, 4.0 / 7}});
  check(chances({.top_k = 4}), chances({}));
  check(chances({.top_k = 400}), chances({}));
  check(chances({.top_p = 0.39}), {{2, 1}});
  check(chances({.top_p = 0.69}), {{0, 3.0 / 7}, {2, 4.0 / 7}});
  check(chances({.top_p = 0.71}), {{0, 3.0 / 9}, {2, 4.0 / 9}, {3, 2.0 / 9}});
  check(chances({.top_p = 1e-6}), {{2, 1}});  // never none
  // Top-p counts within what top-k has left: 4/7 of two tokens is enough for 0.5.
  check(chances({.top_k = 2, .top_p = 0.5}), {{2, 1}});
  // Equals at the border: the lower id stays.
  check(chances({.top_k = 2}, {1, 3, 1, 1}), {{0, 1 / (1 + std::exp(2.0))}, {1, 1 / (1 + std::exp(-2.0))}});
  // Top-p sees the probabilities at the temperature.
  check(chances({.temperature = 0.1, .top_p = 0.9}), {{2, 1}});
}

TEST_CASE("the repetition penalty divides positive logits and multiplies negative ones, once a token") {
  const std::vector<float> logits = {2, -1, 0, 1};
  const double sum = std::exp(1) + std::exp(-2) + 1 + std::exp(1);
  check(chances({.repetition_penalty = 2}, logits, {0, 1, 0, 0, 2}),
        {{0, std::exp(1) / sum}, {1, std::exp(-2) / sum}, {2, 1 / sum}, {3, std::exp(1) / sum}});
  check(chances({.repetition_penalty = 2}, logits, {}), chances({}, logits));
  check(chances({.repetition_penalty = 1}, logits, {0, 1}), chances({}, logits));
  check(chances({.repetition_penalty = 2}, logits, {99, -1}), chances({}, logits));  // ids of no logit change nothing
}

TEST_CASE("ids beyond the vocabulary never take part, however likely") {
  const std::vector<float> logits = {1, 2, 3, 50};
  CHECK_FALSE(chances({}, logits, {}, 3).contains(3));
  check(chances({.temperature = 0}, logits, {}, 3), {{2, 1}});
  check(chances({.top_k = 1}, logits, {}, 3), {{2, 1}});
}

TEST_CASE("logits that are no finite numbers are an error, minus infinity is no chance") {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  CHECK_THROWS_WITH(next_choices({}, std::vector<float>{0, nan}, {}, 2), Catch::Contains("token 1"));
  CHECK_THROWS_AS(next_choices({}, std::vector<float>{inf, 0}, {}, 2), Error);
  CHECK_THROWS_AS(next_choices({}, std::vector<float>{-inf, -inf}, {}, 2), Error);
  CHECK_NOTHROW(next_choices({}, std::vector<float>{0, nan}, {}, 1));
  check(chances({}, {0, -inf, 0, 0}), {{0, 1.0 / 3}, {1, 0}, {2, 1.0 / 3}, {3, 1.0 / 3}});
  const auto choices = next_choices({}, std::vector<float>{-inf, 0, -inf}, {}, 3);
  for (std::uint64_t i = 0; i < 100; ++i) CHECK(pick({}, choices, i) == 1);
}

TEST_CASE("picks come as often as their probabilities say, and are functions of seed and index") {
  const auto choices = next_choices({}, kLogits, {}, 4);
  constexpr std::uint64_t kDraws = 40000;
  std::map<std::int32_t, double> counts;
  for (std::uint64_t i = 0; i < kDraws; ++i) counts[pick({.seed = 5}, choices, i)] += 1.0 / kDraws;
  const std::map<std::int32_t, double> wanted = {{0, 0.3}, {1, 0.1}, {2, 0.4}, {3, 0.2}};
  for (const auto& [token, probability] : wanted) {
    // Five standard deviations of a binomial count.
    CHECK(std::abs(counts[token] - probability) < 5 * std::sqrt(probability * (1 - probability) / kDraws));
  }
  int same = 0, again = 0;
  for (std::uint64_t i = 0; i < 200; ++i) {
    same += pick({.seed = 5}, choices, i) == pick({.seed = 6}, choices, i) ? 1 : 0;
    again += pick({.seed = 5}, choices, i) == pick({.seed = 5}, choices, i) ? 1 : 0;
  }
  CHECK(again == 200);
  CHECK(same < 120);  // 60 expected of independent draws
}
