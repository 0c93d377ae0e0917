// The gradient norm of a step. The order of additions is fixed: blocks within a tensor, tensors of a unit by name, units
// ascending, each level into a sum of its own, so that a unit's owner can hand over one number.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/optim/optim.h"

namespace spipe::optim {
namespace {

std::size_t blocks_of(const model::Parameter& parameter) {
  return ceil_div(parameter.elements(), static_cast<std::uint64_t>(kNormBlock));
}

}  // namespace

std::uint64_t NormTable::bytes(const model::ModelShape& shape) {
  std::uint64_t words = 0;
  for (const model::StoreUnit& unit : shape.store_units) {
    ++words;
    for (const model::Parameter& parameter : unit.parameters) words += blocks_of(parameter);
  }
  return words * sizeof(double);
}

NormTable::NormTable(const model::ModelShape& shape) : NormTable(shape, {}) {
  own_.assign(bytes(shape) / sizeof(double), 0.0);
  words_ = own_.data();
}

NormTable::NormTable(const model::ModelShape& shape, std::span<std::byte> place)
    : words_(reinterpret_cast<double*>(place.data())) {
  SPIPE_CHECK(place.empty() || place.size() >= bytes(shape), "the place of a norm table is too small");
  std::size_t words = 0;
  for (const model::StoreUnit& unit : shape.store_units) {
    Unit own;
    own.first = words;
    own.words = 1;  // the flag
    for (const model::Parameter& parameter : unit.parameters) {
      own.blocks.push_back(own.words);
      own.counts.push_back(blocks_of(parameter));
      own.words += own.counts.back();
    }
    own.by_name.resize(unit.parameters.size());
    std::iota(own.by_name.begin(), own.by_name.end(), std::size_t{0});
    std::sort(own.by_name.begin(), own.by_name.end(),
              [&](std::size_t a, std::size_t b) { return unit.parameters[a].name < unit.parameters[b].name; });
    words += own.words;
    units_.push_back(std::move(own));
  }
}

const NormTable::Unit& NormTable::at(int unit) const {
  SPIPE_CHECK(unit >= 0 && static_cast<std::size_t>(unit) < units_.size(), "no such store unit");
  return units_[static_cast<std::size_t>(unit)];
}

double* NormTable::blocks(int unit, std::size_t parameter) {
  const Unit& own = at(unit);
  SPIPE_CHECK(parameter < own.blocks.size(), "no such parameter");
  return words_ + own.first + own.blocks[parameter];
}

std::uint32_t* NormTable::nonfinite(int unit) { return reinterpret_cast<std::uint32_t*>(words_ + at(unit).first); }

std::span<std::byte> NormTable::part(int unit) {
  const Unit& own = at(unit);
  return std::as_writable_bytes(std::span(words_ + own.first, own.words));
}

double NormTable::sum(const Unit& unit) const {
  double total = 0;
  for (const std::size_t parameter : unit.by_name) {
    double tensor = 0;
    const double* blocks = words_ + unit.first + unit.blocks[parameter];
    for (std::size_t b = 0; b < unit.counts[parameter]; ++b) tensor += blocks[b];
    total += tensor;
  }
  return total;
}

GradientNorm NormTable::combine(std::span<double> unit_norms) const {
  SPIPE_CHECK(unit_norms.empty() || unit_norms.size() == units_.size(), "a place for the norms of another number of units");
  GradientNorm result;
  double total = 0;
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    const double squares = sum(units_[unit]);
    total += squares;
    if (!unit_norms.empty()) unit_norms[unit] = std::sqrt(squares);
    if (*reinterpret_cast<const std::uint32_t*>(words_ + units_[unit].first) != 0 && result.finite) {
      result.finite = false;
      result.first_bad_unit = static_cast<int>(unit);
    }
  }
  result.norm = std::sqrt(total);
  return result;
}

double NormTable::unit_norm(int unit) const { return std::sqrt(sum(at(unit))); }

}  // namespace spipe::optim
