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

double unit_sum(const std::vector<std::vector<double>>& tensors, const std::vector<std::size_t>& by_name) {
  double sum = 0;
  for (const std::size_t parameter : by_name) {
    double tensor = 0;
    for (const double block : tensors[parameter]) {
      tensor += block;
    }
    sum += tensor;
  }
  return sum;
}

}  // namespace

NormTable::NormTable(const model::ModelShape& shape) {
  for (const model::StoreUnit& unit : shape.store_units) {
    std::vector<std::vector<double>> tensors;
    for (const model::Parameter& parameter : unit.parameters) {
      tensors.emplace_back(ceil_div(parameter.elements(), static_cast<std::uint64_t>(kNormBlock)), 0.0);
    }
    blocks_.push_back(std::move(tensors));
    std::vector<std::size_t> order(unit.parameters.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(),
              [&](std::size_t a, std::size_t b) { return unit.parameters[a].name < unit.parameters[b].name; });
    by_name_.push_back(std::move(order));
  }
  nonfinite_.assign(shape.store_units.size(), 0);
}

double* NormTable::blocks(int unit, std::size_t parameter) {
  SPIPE_CHECK(unit >= 0 && static_cast<std::size_t>(unit) < blocks_.size(), "no such store unit");
  auto& tensors = blocks_[static_cast<std::size_t>(unit)];
  SPIPE_CHECK(parameter < tensors.size(), "no such parameter");
  return tensors[parameter].data();
}

std::uint32_t* NormTable::nonfinite(int unit) {
  SPIPE_CHECK(unit >= 0 && static_cast<std::size_t>(unit) < nonfinite_.size(), "no such store unit");
  return &nonfinite_[static_cast<std::size_t>(unit)];
}

void NormTable::clear() {
  for (auto& tensors : blocks_) {
    for (auto& tensor : tensors) {
      std::fill(tensor.begin(), tensor.end(), 0.0);
    }
  }
  std::fill(nonfinite_.begin(), nonfinite_.end(), 0U);
}

GradientNorm NormTable::combine() const {
  GradientNorm result;
  double sum = 0;
  for (std::size_t unit = 0; unit < blocks_.size(); ++unit) {
    sum += unit_sum(blocks_[unit], by_name_[unit]);
    if (nonfinite_[unit] != 0 && result.finite) {
      result.finite = false;
      result.first_bad_unit = static_cast<int>(unit);
    }
  }
  result.norm = std::sqrt(sum);
  return result;
}

double NormTable::unit_norm(int unit) const {
  SPIPE_CHECK(unit >= 0 && static_cast<std::size_t>(unit) < blocks_.size(), "no such store unit");
  return std::sqrt(unit_sum(blocks_[static_cast<std::size_t>(unit)], by_name_[static_cast<std::size_t>(unit)]));
}

}  // namespace spipe::optim
