// Counter-based random numbers: pure functions of (key, counter), so nothing needs to be saved or replayed.
// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
#pragma once

#include <array>
#include <cstdint>

namespace spipe {

struct PhiloxKey {
  std::uint32_t lo = 0, hi = 0;
};

[[nodiscard]] std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter, PhiloxKey key);

// A stream of numbers named by (seed, purpose, index); `purpose` separates uses (init, shuffle, dropout, ...).
[[nodiscard]] PhiloxKey make_key(std::uint64_t seed, std::uint64_t purpose);
// Element i of the stream: uniform in [0, 1) with 24 bits; standard normal by Box-Muller in double.
[[nodiscard]] float uniform_at(PhiloxKey key, std::uint64_t stream, std::uint64_t i);
[[nodiscard]] double normal_at(PhiloxKey key, std::uint64_t stream, std::uint64_t i);

// A keyed pseudo-random permutation of 0..n-1 that needs no table: element i of it. Bijective for every n >= 1
// (Feistel network over the next power of four, cycle-walking).
[[nodiscard]] std::uint64_t permuted_index(PhiloxKey key, std::uint64_t n, std::uint64_t i);

enum class RandomPurpose : std::uint64_t { init = 1, shuffle = 2, dropout = 3, sample = 4, rounding = 5 };

}  // namespace spipe
