// Generation over a cache gives what the whole sequence in one forward gives, for every family.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>

#include "golden_model.h"
#include "kernels/cpu/cpu_ops.h"
#include "spipe/model/decoder.h"
#include "spipe/model/sampler.h"
#include "tests/kernels/reference_ops.h"
#include "unit_runner.h"

namespace spipe::test {
namespace {

std::vector<GoldenModel> models() {
  std::vector<GoldenModel> found;
  for (const auto& folder : golden_folders()) {
    if (auto model = read_golden(folder)) found.push_back(std::move(*model));
  }
  return found;
}

// The parameters of a golden model as slabs of store units. Weights are made larger than a trained model's, so that the
// likeliest token hangs on the tokens before.
struct Slabs {
  explicit Slabs(const GoldenModel& golden) {
    const model::ModelShape shape =
        model::make_shape(golden.architecture, {.micro = 1, .seq_len = 1, .head_chunk = 1}, DType::f32);
    for (const model::StoreUnit& unit : shape.store_units) {
      slabs.emplace_back(unit.elements);
      for (const model::Parameter& p : unit.parameters) {
        std::vector<float> values = golden.parameters.at(p.name);
        if (p.shape.rank() == 2) {
          for (float& value : values) value *= 4;
        }
        std::copy(values.begin(), values.end(), slabs.back().begin() + static_cast<std::ptrdiff_t>(p.offset));
        tensors.emplace(p.name, std::move(values));
      }
    }
  }
  [[nodiscard]] std::vector<const void*> pointers() const {
    std::vector<const void*> result;
    for (const auto& slab : slabs) result.push_back(slab.empty() ? nullptr : slab.data());
    return result;
  }
  std::vector<std::vector<float>> slabs;
  std::map<std::string, std::vector<float>> tensors;
};

std::int32_t likeliest(std::span<const float> logits) {
  return static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

using Rows = std::vector<std::vector<float>>;

// Logits behind every token, from one forward of the whole sequence without a cache.
Rows whole_forward(const GoldenModel& golden, const Slabs& slabs, Ops& ops, std::span<const std::int32_t> tokens) {
  const auto length = static_cast<std::int64_t>(tokens.size());
  UnitRunner runner(model::make_shape(golden.architecture, {.micro = 1, .seq_len = length, .head_chunk = length}, DType::f32),
                    ops);
  for (const auto& [name, values] : slabs.tensors) runner.set_parameter(name, values);
  const std::vector<std::int32_t> targets(tokens.size(), 0);
  runner.run_micro_batch(tokens, targets, 0, 0, true);
  Rows rows;
  for (std::int64_t row = 0; row < length; ++row) rows.push_back(runner.logits(row));
  return rows;
}

// The same from a cache that gets `chunk` tokens at a time; rows in between are empty.
Rows cached_forward(const GoldenModel& golden, const Slabs& slabs, Ops& ops, std::span<const std::int32_t> tokens,
                    std::size_t chunk) {
  model::Decoder decoder(golden.architecture, DType::f32, slabs.pointers(), ops, static_cast<std::int64_t>(tokens.size()));
  Rows rows(tokens.size());
  for (std::size_t at = 0; at < tokens.size(); at += chunk) {
    const auto part = tokens.subspan(at, std::min(chunk, tokens.size() - at));
    const auto logits = decoder.append(part);
    rows[at + part.size() - 1].assign(logits.begin(), logits.end());
  }
  return rows;
}

// The largest difference relative to the largest logit; only rows that both have.
double difference(const Rows& a, const Rows& b) {
  double worst = 0, size = 0;
  for (std::size_t row = 0; row < a.size(); ++row) {
    for (std::size_t i = 0; i < std::min(a[row].size(), b[row].size()); ++i) {
      worst = std::max(worst, std::abs(static_cast<double>(a[row][i]) - b[row][i]));
      size = std::max(size, std::abs(static_cast<double>(a[row][i])));
    }
  }
  return worst / size;
}

std::vector<std::int32_t> some_tokens(const GoldenModel& golden, std::size_t count) {
  std::vector<std::int32_t> tokens;
  for (std::size_t i = 0; i < count; ++i) {
    tokens.push_back(
        static_cast<std::int32_t>((i * i * 7 + i * 3 + 5) % static_cast<std::size_t>(golden.architecture.vocab_size)));
  }
  return tokens;
}

constexpr std::size_t kLength = 32;  // of the position tables, and longer than the golden model's sliding window
constexpr double kTolerance = 2e-5;  // the same sums in other tiles

void check_all(Ops& ops) {
  bool window = false;
  const std::vector<GoldenModel> all = models();
  for (const GoldenModel& golden : all) {
    INFO(golden.name);
    const Slabs slabs(golden);
    const std::vector<std::int32_t> tokens = some_tokens(golden, kLength);
    const Rows whole = whole_forward(golden, slabs, ops, tokens);
    for (const std::size_t chunk : {1, 5, 13, 32}) {
      INFO("tokens at a time: " << chunk);
      CHECK(difference(whole, cached_forward(golden, slabs, ops, tokens, chunk)) < kTolerance);
    }
    // The comparison sees a token, and the order of two: what a wrong position or a lost row would do.
    std::vector<std::int32_t> other = tokens;
    std::swap(other[3], other[4]);
    CHECK(difference(whole, cached_forward(golden, slabs, ops, other, 1)) > 100 * kTolerance);
    window =
        window || (golden.architecture.sliding_window > 0 && golden.architecture.sliding_window < std::int64_t{kLength} / 2);
  }
  if (std::getenv("SPIPE_GOLDEN_DIR") == nullptr) {
    CHECK(all.size() >= 7);
    CHECK(window);
  }
}

}  // namespace

TEST_CASE("a cache of keys and values gives the logits of the whole forward at every position, all families, reference ops") {
  ReferenceOps ops;
  check_all(ops);
}

TEST_CASE("a cache of keys and values gives the logits of the whole forward at every position, all families, CPU") {
  ThreadPool pool(2);
  const auto ops = make_cpu_ops(pool);
  check_all(*ops);
}

TEST_CASE("a cache in bf16 stays as near to the whole forward as bf16 is") {
  ThreadPool pool(2);
  const auto ops = make_cpu_ops(pool);
  for (const GoldenModel& golden : models()) {
    INFO(golden.name);
    const Slabs slabs(golden);
    std::vector<std::vector<std::uint16_t>> halves;
    std::vector<const void*> pointers;
    for (const auto& slab : slabs.slabs) {
      halves.emplace_back(slab.size());
      std::transform(slab.begin(), slab.end(), halves.back().begin(), bf16_from_f32);
      pointers.push_back(halves.back().empty() ? nullptr : halves.back().data());
    }
    const std::vector<std::int32_t> tokens = some_tokens(golden, kLength);
    model::Decoder decoder(golden.architecture, DType::bf16, pointers, *ops, kLength);
    const auto logits = decoder.append(tokens);
    const Rows whole = whole_forward(golden, slabs, *ops, tokens);
    CHECK(difference({whole.back()}, {{logits.begin(), logits.end()}}) < 0.1);
    CHECK(difference({whole.front()}, {{logits.begin(), logits.end()}}) > 0.1);
  }
}

TEST_CASE("greedy text over the cache is the argmax of the whole forward at every position, all families") {
  ThreadPool pool(2);
  const auto ops = make_cpu_ops(pool);
  for (const GoldenModel& golden : models()) {
    INFO(golden.name);
    const Slabs slabs(golden);
    std::vector<std::int32_t> text = some_tokens(golden, 4);
    model::Decoder decoder(golden.architecture, DType::f32, slabs.pointers(), *ops, kLength);
    std::span<const float> logits = decoder.append(text);
    while (text.size() < kLength) {
      const auto choices = model::next_choices({.temperature = 0}, logits, text, golden.architecture.vocab_size);
      text.push_back(choices.front().token);
      logits = decoder.append(std::span(text).last(1));
    }
    CHECK(decoder.length() == decoder.capacity());
    const Rows whole = whole_forward(golden, slabs, *ops, text);
    for (std::size_t at = 3; at + 1 < kLength; ++at) {
      INFO("position " << at);
      CHECK(likeliest(whole[at]) == text[at + 1]);
    }
    // Not one token over and over, which any position would give.
    CHECK(std::set<std::int32_t>(text.begin() + 4, text.end()).size() >= 3);
    // A cleared decoder forgets.
    decoder.clear();
    const auto again = decoder.append(std::span(text).first(4));
    CHECK(likeliest(again) == text[4]);
  }
}

}  // namespace spipe::test
