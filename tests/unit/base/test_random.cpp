#include <catch2/catch.hpp>
#include <cmath>
#include <set>
#include <unordered_set>
#include <vector>

#include "spipe/base/error.h"
#include "spipe/base/random.h"

using namespace spipe;

TEST_CASE("Philox gives the vectors published with it") {
  using Words = std::array<std::uint32_t, 4>;
  CHECK(philox4x32({0, 0, 0, 0}, {0, 0}) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  constexpr std::uint32_t kOnes = 0xffffffff;
  CHECK(philox4x32({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}) == Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
        Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("keys differ by seed and by purpose") {
  std::set<std::uint64_t> keys;
  for (std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 32, ~std::uint64_t{0}}) {
    for (std::uint64_t purpose = 1; purpose <= 5; ++purpose) {
      const PhiloxKey key = make_key(seed, purpose);
      keys.insert((std::uint64_t{key.hi} << 32) | key.lo);
    }
  }
  CHECK(keys.size() == 20);
}

TEST_CASE("uniform numbers lie in 0 <= x < 1 and have the right mean and variance") {
  const PhiloxKey key = make_key(1, 1);
  constexpr int kCount = 200'000;
  double sum = 0, squares = 0;
  for (int i = 0; i < kCount; ++i) {
    const double value = uniform_at(key, 3, static_cast<std::uint64_t>(i));
    REQUIRE((value >= 0 && value < 1));
    sum += value;
    squares += value * value;
  }
  const double mean = sum / kCount;
  CHECK(mean == Approx(0.5).margin(0.004));  // 6 standard errors
  CHECK(squares / kCount - mean * mean == Approx(1.0 / 12).margin(0.002));
  CHECK(uniform_at(key, 3, 5) == uniform_at(key, 3, 5));
  CHECK(uniform_at(key, 3, 5) != uniform_at(key, 4, 5));
  CHECK(uniform_at(key, 3, 5) != uniform_at(key, 3, 5 + (std::uint64_t{1} << 34)));
}

TEST_CASE("normal numbers have the moments of a normal distribution and no correlation between neighbours") {
  const PhiloxKey key = make_key(7, 1);
  constexpr int kCount = 200'000;
  double sum = 0, squares = 0, fourth = 0, neighbours = 0, previous = 0;
  for (int i = 0; i < kCount; ++i) {
    const double value = normal_at(key, 0, static_cast<std::uint64_t>(i));
    REQUIRE(std::isfinite(value));
    sum += value;
    squares += value * value;
    fourth += value * value * value * value;
    neighbours += value * previous;
    previous = value;
  }
  CHECK(sum / kCount == Approx(0).margin(0.0135));
  CHECK(squares / kCount == Approx(1).margin(0.02));
  CHECK(fourth / kCount == Approx(3).margin(0.15));
  CHECK(neighbours / kCount == Approx(0).margin(0.0135));
}

TEST_CASE("permuted_index is a bijection of 0..n-1 for every n up to 300") {
  for (std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{99}}) {
    const PhiloxKey key = make_key(seed, 2);
    for (std::uint64_t n = 1; n <= 300; ++n) {
      std::vector<bool> seen(n, false);
      for (std::uint64_t i = 0; i < n; ++i) {
        const std::uint64_t value = permuted_index(key, n, i);
        if (value >= n || seen[value]) FAIL("n " << n << ", i " << i << " -> " << value);
        seen[value] = true;
      }
    }
  }
  CHECK_THROWS_AS(permuted_index({1, 2}, 5, 5), InternalError);
}

TEST_CASE("permuted_index neither collides nor leaves the range for large n") {
  const PhiloxKey key = make_key(5, 2);
  for (std::uint64_t n : {(std::uint64_t{1} << 20) + 1, (std::uint64_t{1} << 32) - 1, std::uint64_t{1} << 32,
                          (std::uint64_t{1} << 48) + 12345, ~std::uint64_t{0}}) {
    std::unordered_set<std::uint64_t> seen;
    for (std::uint64_t i = 0; i < 2000; ++i) {
      const std::uint64_t value = permuted_index(key, n, i % 2 == 0 ? i / 2 : n - 1 - i / 2);
      REQUIRE(value < n);
      seen.insert(value);
    }
    CHECK(seen.size() == 2000);
  }
}

TEST_CASE("permuted_index mixes: every place is about equally likely over keys") {
  constexpr int kKeys = 6000;
  std::array<int, 6> counts{};
  for (int k = 0; k < kKeys; ++k) {
    ++counts.at(permuted_index(make_key(static_cast<std::uint64_t>(k), 2), counts.size(), 0));
  }
  for (const int count : counts) CHECK(std::abs(count - kKeys / 6) < 180);  // 6 standard deviations
}
