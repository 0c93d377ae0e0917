// Shapes and non-owning tensor views.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "spipe/base/dtype.h"

namespace spipe {

// Up to four dimensions, row-major.
class Shape {
 public:
  static constexpr int kMaxRank = 4;
  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims);  // SPIPE_CHECKs rank <= 4 and dims >= 0
  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] std::int64_t operator[](int axis) const { return dims_[static_cast<std::size_t>(axis)]; }
  [[nodiscard]] std::uint64_t elements() const;  // checked product; 1 for rank 0
  [[nodiscard]] std::string text() const;        // "[2, 3]"
  bool operator==(const Shape&) const = default;

 private:
  std::array<std::int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

// Non-owning, contiguous row-major.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::f32;
  Shape shape;
  [[nodiscard]] std::uint64_t bytes() const { return shape.elements() * dtype_size(dtype); }
};

}  // namespace spipe
