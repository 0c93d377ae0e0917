// Covering sets: few rows of a product of choices that hold every pair of choices of two factors.
#pragma once

#include <cstddef>
#include <vector>

namespace spipe::test {

using Row = std::vector<std::size_t>;  // a choice per factor

[[nodiscard]] std::vector<Row> whole_product(const std::vector<std::size_t>& choices);
// Greedy, deterministic: every pair of choices of two factors is in a row.
[[nodiscard]] std::vector<Row> pairwise_cover(const std::vector<std::size_t>& choices);

}  // namespace spipe::test
