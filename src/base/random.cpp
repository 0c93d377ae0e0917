#include "spipe/base/random.h"

#include <bit>
#include <cmath>
#include <numbers>

#include "spipe/base/error.h"

namespace spipe {
namespace {

std::uint32_t low(std::uint64_t value) { return static_cast<std::uint32_t>(value); }
std::uint32_t high(std::uint64_t value) { return static_cast<std::uint32_t>(value >> 32); }

// 53 random bits in [0, 1).
double uniform53(std::uint32_t a, std::uint32_t b) {
  const std::uint64_t bits = (static_cast<std::uint64_t>(a) << 21) ^ (b >> 11);
  return static_cast<double>(bits) * 0x1p-53;
}

constexpr int kFeistelRounds = 6;

// One pass of a balanced Feistel network over 2 * half_bits bits.
std::uint64_t feistel(PhiloxKey key, int half_bits, std::uint64_t value) {
  const std::uint64_t mask = (std::uint64_t{1} << half_bits) - 1;
  std::uint64_t left = value >> half_bits;
  std::uint64_t right = value & mask;
  for (std::uint32_t round = 0; round < kFeistelRounds; ++round) {
    const auto random = philox4x32({low(right), round, static_cast<std::uint32_t>(half_bits), 0x5045524dU}, key);
    const std::uint64_t next = left ^ (random[0] & mask);
    left = right;
    right = next;
  }
  return (left << half_bits) | right;
}

}  // namespace

std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter, PhiloxKey key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t first = std::uint64_t{0xD2511F53U} * counter[0];
    const std::uint64_t second = std::uint64_t{0xCD9E8D57U} * counter[2];
    counter = {high(second) ^ counter[1] ^ key.lo, low(second), high(first) ^ counter[3] ^ key.hi, low(first)};
    key.lo += 0x9E3779B9U;
    key.hi += 0xBB67AE85U;
  }
  return counter;
}

PhiloxKey make_key(std::uint64_t seed, std::uint64_t purpose) {
  const auto words = philox4x32({low(seed), high(seed), low(purpose), high(purpose)}, {0x73706970U, 0x65747261U});
  return {words[0], words[1]};
}

float uniform_at(PhiloxKey key, std::uint64_t stream, std::uint64_t i) {
  const auto words = philox4x32({low(i / 4), high(i / 4), low(stream), high(stream)}, key);
  return static_cast<float>(words[i % 4] >> 8) * 0x1p-24F;
}

double normal_at(PhiloxKey key, std::uint64_t stream, std::uint64_t i) {
  const auto words = philox4x32({low(i / 2), high(i / 2), low(stream), high(stream)}, key);
  const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform53(words[0], words[1])));
  const double angle = 2.0 * std::numbers::pi * uniform53(words[2], words[3]);
  return radius * (i % 2 == 0 ? std::cos(angle) : std::sin(angle));
}

std::uint64_t permuted_index(PhiloxKey key, std::uint64_t n, std::uint64_t i) {
  SPIPE_CHECK(i < n, "permuted_index: index outside the permutation");
  if (n == 1) return 0;
  const int half_bits = (std::bit_width(n - 1) + 1) / 2;
  // Values outside 0..n-1 are permuted on until one falls inside: the cycle through i has one, i itself at the latest.
  std::uint64_t value = i;
  do {
    value = feistel(key, half_bits, value);
  } while (value >= n);
  return value;
}

}  // namespace spipe
