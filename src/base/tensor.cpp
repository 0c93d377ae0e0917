#include "spipe/base/tensor.h"

#include "spipe/base/checked.h"
#include "spipe/base/error.h"

namespace spipe {

Shape::Shape(std::initializer_list<std::int64_t> dims) : rank_(static_cast<int>(dims.size())) {
  SPIPE_CHECK(dims.size() <= static_cast<std::size_t>(kMaxRank), "a shape has at most 4 dimensions");
  std::size_t axis = 0;
  for (const std::int64_t dim : dims) {
    SPIPE_CHECK(dim >= 0, "negative dimension " + std::to_string(dim));
    dims_[axis++] = dim;
  }
}

std::uint64_t Shape::elements() const {
  std::uint64_t product = 1;
  for (int axis = 0; axis < rank_; ++axis) product = checked_mul(product, static_cast<std::uint64_t>((*this)[axis]));
  return product;
}

std::string Shape::text() const {
  std::string text = "[";
  for (int axis = 0; axis < rank_; ++axis) {
    if (axis > 0) text += ", ";
    text += std::to_string((*this)[axis]);
  }
  return text + "]";
}

}  // namespace spipe
