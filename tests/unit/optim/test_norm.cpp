#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "spipe/base/error.h"
#include "spipe/optim/optim.h"

namespace spipe::optim {
namespace {

model::Parameter parameter(const std::string& name, std::int64_t elements) {
  model::Parameter result;
  result.name = name;
  result.shape = Shape{elements};
  return result;
}

model::ModelShape shape_of(const std::vector<std::vector<model::Parameter>>& units) {
  model::ModelShape shape;
  for (const auto& parameters : units) {
    model::StoreUnit unit;
    unit.parameters = parameters;
    shape.store_units.push_back(unit);
  }
  return shape;
}

}  // namespace

TEST_CASE("a tensor has one block sum for every started 4,096 elements") {
  NormTable table(shape_of({{parameter("a", 4096), parameter("b", 4097)}}));
  table.blocks(0, 0)[0] = 9;
  table.blocks(0, 1)[0] = 7;
  table.blocks(0, 1)[1] = 9;
  CHECK(table.combine().norm == 5);
  CHECK(table.unit_norm(0) == 5);
  CHECK_THROWS_AS(table.blocks(0, 2), InternalError);
  CHECK_THROWS_AS(table.blocks(1, 0), InternalError);
}

// 2^53 + 1 is not a double: ones added to 2^53 one by one vanish, sixteen ones added first do not. So the result tells the
// order.
namespace {

constexpr double kBig = 9007199254740992.0;
constexpr int kOnes = 16;
const double kOnesKept = std::sqrt(kBig + kOnes);
const double kOnesLost = std::sqrt(kBig);

}  // namespace

TEST_CASE("tensors are added by name, not by position") {
  REQUIRE(kOnesKept != kOnesLost);
  std::vector<model::Parameter> ascending, descending;
  for (int i = 0; i <= kOnes; ++i) {
    ascending.push_back(parameter(std::string(1, static_cast<char>('a' + i)), 1));
    descending.push_back(parameter(std::string(1, static_cast<char>('z' - i)), 1));
  }
  NormTable big_first(shape_of({ascending})), big_last(shape_of({descending}));
  for (std::size_t i = 0; i <= kOnes; ++i) {
    *big_first.blocks(0, i) = *big_last.blocks(0, i) = i == 0 ? kBig : 1;
  }
  CHECK(big_first.combine().norm == kOnesLost);
  CHECK(big_last.combine().norm == kOnesKept);
}

TEST_CASE("blocks are added in ascending order within their tensor") {
  NormTable table(shape_of({{parameter("a", (kOnes + 1) * 4096)}}));
  double* blocks = table.blocks(0, 0);
  std::fill_n(blocks, kOnes, 1.0);
  blocks[kOnes] = kBig;
  CHECK(table.combine().norm == kOnesKept);
  std::swap(blocks[0], blocks[kOnes]);
  CHECK(table.combine().norm == kOnesLost);
}

TEST_CASE("units are added in ascending order") {
  NormTable table(shape_of(std::vector<std::vector<model::Parameter>>(kOnes + 1, {parameter("a", 1)})));
  for (int unit = 0; unit < kOnes; ++unit) {
    *table.blocks(unit, 0) = 1;
  }
  *table.blocks(kOnes, 0) = kBig;
  CHECK(table.combine().norm == kOnesKept);
  std::swap(*table.blocks(0, 0), *table.blocks(kOnes, 0));
  CHECK(table.combine().norm == kOnesLost);
}

TEST_CASE("a tensor's sum is closed before it is added to the unit's, and a unit's before the total") {
  NormTable tensors(shape_of({{parameter("a", 1), parameter("b", kOnes * 4096)}}));
  *tensors.blocks(0, 0) = kBig;
  std::fill_n(tensors.blocks(0, 1), kOnes, 1.0);
  CHECK(tensors.combine().norm == kOnesKept);

  NormTable units(shape_of({{parameter("a", 1)}, std::vector<model::Parameter>(kOnes, parameter("b", 1))}));
  *units.blocks(0, 0) = kBig;
  for (std::size_t i = 0; i < kOnes; ++i) {
    *units.blocks(1, i) = 1;
  }
  CHECK(units.combine().norm == kOnesKept);
}

TEST_CASE("the first unit with a non-finite gradient is named") {
  NormTable table(shape_of({{parameter("a", 1)}, {}, {parameter("b", 1)}, {parameter("c", 1)}}));
  CHECK(table.combine().finite);
  CHECK(table.combine().first_bad_unit == -1);
  *table.nonfinite(3) = 1;
  *table.nonfinite(2) = 1;
  *table.blocks(0, 0) = 4;
  CHECK_FALSE(table.combine().finite);
  CHECK(table.combine().first_bad_unit == 2);
  CHECK(table.combine().norm == 2);
  *table.nonfinite(2) = *table.nonfinite(3) = 0;
  CHECK(table.combine().finite);
}

TEST_CASE("a unit's part carries its flag and its sums to another host's table") {
  const model::ModelShape shape = shape_of({{parameter("a", 4097)}, {}, {parameter("b", 1), parameter("c", 9000)}});
  CHECK(NormTable::bytes(shape) == 8 * (3 + 2 + 1 + 3));
  std::vector<double> memory(NormTable::bytes(shape) / 8, 0.0);
  NormTable here(shape, std::as_writable_bytes(std::span(memory))), there(shape);
  here.blocks(2, 0)[0] = 9;
  here.blocks(2, 1)[2] = 7;
  there.blocks(0, 0)[1] = 9;
  *here.nonfinite(2) = 1;
  for (const int unit : {1, 2}) {
    REQUIRE(here.part(unit).size() == there.part(unit).size());
    std::ranges::copy(here.part(unit), there.part(unit).begin());
  }
  CHECK(there.combine().norm == 5);
  CHECK(there.combine().first_bad_unit == 2);
  CHECK(here.combine().norm == 4);
}

}  // namespace spipe::optim
