// Numbers as people write and read them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace spipe {

// "8 GiB", "512MiB", "1.5 GB", "4096" (bytes) -> bytes. KiB/MiB/GiB/TiB are powers of 1024, kB/MB/GB/TB of 1000.
// Throws Error naming the found text and the allowed forms; negative, NaN and overflow are refused.
[[nodiscard]] std::uint64_t parse_bytes(std::string_view text);
[[nodiscard]] std::string format_bytes(std::uint64_t bytes);  // "1.50 GiB", three significant digits
[[nodiscard]] std::string format_count(double value);         // "1.87 M", "12.3 k"
[[nodiscard]] std::string format_duration(double seconds);    // "3 m 07 s", "1 h 02 m", "0.41 s"
// The candidate nearest to `word` by edit distance (at most a third of its length + 1), or empty.
template <typename Range>
[[nodiscard]] std::string nearest_word(std::string_view word, const Range& candidates);
[[nodiscard]] int edit_distance(std::string_view a, std::string_view b);

template <typename Range>
std::string nearest_word(std::string_view word, const Range& candidates) {
  std::string best;
  int best_distance = static_cast<int>(word.size()) / 3 + 2;
  for (const auto& candidate : candidates) {
    const int distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = std::string(candidate);
    }
  }
  return best;
}

}  // namespace spipe
