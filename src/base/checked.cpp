#include "spipe/base/checked.h"

#include <string>

namespace spipe {

std::uint64_t checked_mul(std::uint64_t a, std::uint64_t b) {
  std::uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) {
    throw Error("size overflow: " + std::to_string(a) + " * " + std::to_string(b) + " does not fit 64 bits");
  }
  return product;
}

std::uint64_t checked_add(std::uint64_t a, std::uint64_t b) {
  std::uint64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) {
    throw Error("size overflow: " + std::to_string(a) + " + " + std::to_string(b) + " does not fit 64 bits");
  }
  return sum;
}

std::uint64_t div_exact(std::uint64_t a, std::uint64_t b) {
  SPIPE_CHECK(b != 0 && a % b == 0, std::to_string(a) + " is not a multiple of " + std::to_string(b));
  return a / b;
}

}  // namespace spipe
