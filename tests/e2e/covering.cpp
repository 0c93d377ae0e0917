#include "covering.h"

#include <set>
#include <tuple>

namespace spipe::test {

namespace {

using Pair = std::tuple<std::size_t, std::size_t, std::size_t, std::size_t>;  // factor, choice, later factor, choice

std::vector<Pair> pairs_of(const Row& row) {
  std::vector<Pair> pairs;
  for (std::size_t a = 0; a < row.size(); ++a) {
    for (std::size_t b = a + 1; b < row.size(); ++b) pairs.emplace_back(a, row[a], b, row[b]);
  }
  return pairs;
}

}  // namespace

std::vector<Row> whole_product(const std::vector<std::size_t>& choices) {
  std::vector<Row> rows = {{}};
  for (const std::size_t count : choices) {
    std::vector<Row> longer;
    for (const Row& row : rows) {
      for (std::size_t choice = 0; choice < count; ++choice) {
        longer.push_back(row);
        longer.back().push_back(choice);
      }
    }
    rows = std::move(longer);
  }
  return rows;
}

std::vector<Row> pairwise_cover(const std::vector<std::size_t>& choices) {
  const std::vector<Row> all = whole_product(choices);
  std::set<Pair> open;
  for (const Row& row : all) {
    for (const Pair& pair : pairs_of(row)) open.insert(pair);
  }
  std::vector<Row> cover;
  while (!open.empty()) {
    const Row* best = nullptr;
    std::size_t most = 0;
    for (const Row& row : all) {
      std::size_t covered = 0;
      for (const Pair& pair : pairs_of(row)) covered += open.count(pair);
      if (covered > most) {
        most = covered;
        best = &row;
      }
    }
    for (const Pair& pair : pairs_of(*best)) open.erase(pair);
    cover.push_back(*best);
  }
  return cover;
}

}  // namespace spipe::test
