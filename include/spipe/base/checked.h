// Checked size arithmetic: for every number that came from a file, a config or a model's shape.
#pragma once

#include <concepts>
#include <cstdint>
#include <limits>
#include <utility>

#include "spipe/base/error.h"

namespace spipe {

// a * b and a + b in 64 bits; throws Error ("size overflow") instead of wrapping.
[[nodiscard]] std::uint64_t checked_mul(std::uint64_t a, std::uint64_t b);
[[nodiscard]] std::uint64_t checked_add(std::uint64_t a, std::uint64_t b);

[[nodiscard]] constexpr std::uint64_t ceil_div(std::uint64_t a, std::uint64_t b) { return a / b + (a % b != 0 ? 1 : 0); }
[[nodiscard]] constexpr std::uint64_t round_up(std::uint64_t a, std::uint64_t multiple) {
  return ceil_div(a, multiple) * multiple;
}
// a / b; SPIPE_CHECKs that nothing remains.
[[nodiscard]] std::uint64_t div_exact(std::uint64_t a, std::uint64_t b);

// Integer conversion that refuses to lose a bit.
template <std::integral To, std::integral From>
[[nodiscard]] To narrow(From value) {
  SPIPE_CHECK(std::in_range<To>(value), "integer does not fit its narrower type");
  return static_cast<To>(value);
}

}  // namespace spipe
