// Element access of the reference ops.
#include <bit>
#include <cmath>

#include "spipe/base/error.h"
#include "tests/kernels/reference_ops.h"

namespace spipe::test {
namespace {

// Nearest float "to odd": truncated, with the last bit set when anything was cut. A second rounding to a format with at least
// two bits fewer then equals one rounding of the double.
float to_odd_float(double value) {
  float f = static_cast<float>(value);
  if (static_cast<double>(f) == value || std::isnan(value)) return f;
  if (std::fabs(static_cast<double>(f)) > std::fabs(value)) f = std::nextafterf(f, 0.0F);
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(f) | 1U);
}

}  // namespace

double load(ConstPtr p, std::int64_t i) {
  switch (p.dtype) {
    case DType::f32:
      return static_cast<double>(static_cast<const float*>(p.data)[i]);
    case DType::f64:
      return static_cast<const double*>(p.data)[i];
    case DType::bf16:
      return static_cast<double>(f32_from_bf16(static_cast<const std::uint16_t*>(p.data)[i]));
    case DType::f16:
      return static_cast<double>(f32_from_f16(static_cast<const std::uint16_t*>(p.data)[i]));
    default:
      SPIPE_CHECK(false, "not a floating-point type");
  }
  return 0;
}

void store(Ptr p, std::int64_t i, double value) {
  switch (p.dtype) {
    case DType::f32:
      static_cast<float*>(p.data)[i] = static_cast<float>(value);
      return;
    case DType::f64:
      static_cast<double*>(p.data)[i] = value;
      return;
    case DType::bf16:
      static_cast<std::uint16_t*>(p.data)[i] = bf16_from_f32(to_odd_float(value));
      return;
    case DType::f16:
      static_cast<std::uint16_t*>(p.data)[i] = f16_from_f32(to_odd_float(value));
      return;
    default:
      SPIPE_CHECK(false, "not a floating-point type");
  }
}

}  // namespace spipe::test
