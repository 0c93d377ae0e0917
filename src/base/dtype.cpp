#include "spipe/base/dtype.h"

#include <array>
#include <bit>
#include <string>

#include "spipe/base/error.h"

namespace spipe {
namespace {

struct DTypeInfo {
  DType dtype;
  std::string_view name;
  std::uint64_t size;
};

// In the order of the enum.
constexpr std::array kDTypes = {DTypeInfo{DType::f32, "fp32", 4},   DTypeInfo{DType::bf16, "bf16", 2},
                                DTypeInfo{DType::f16, "fp16", 2},   DTypeInfo{DType::f64, "fp64", 8},
                                DTypeInfo{DType::i32, "int32", 4},  DTypeInfo{DType::i64, "int64", 8},
                                DTypeInfo{DType::u8, "uint8", 1},   DTypeInfo{DType::u16, "uint16", 2},
                                DTypeInfo{DType::u32, "uint32", 4}, DTypeInfo{DType::boolean, "bool", 1}};

const DTypeInfo& info(DType dtype) {
  const auto index = static_cast<std::size_t>(dtype);
  SPIPE_CHECK(index < kDTypes.size() && kDTypes[index].dtype == dtype, "unknown dtype " + std::to_string(index));
  return kDTypes[index];
}

constexpr std::uint32_t kExponentMask = 0x7f800000U;

bool is_nan_bits(std::uint32_t bits) { return (bits & 0x7fffffffU) > kExponentMask; }
std::uint16_t quiet_bf16_nan(std::uint32_t bits) { return static_cast<std::uint16_t>(((bits >> 16) & 0x8000U) | 0x7fc0U); }

}  // namespace

std::uint64_t dtype_size(DType dtype) { return info(dtype).size; }

std::string_view dtype_name(DType dtype) { return info(dtype).name; }

DType dtype_from_name(std::string_view name) {
  if (name == "fp32") return DType::f32;
  if (name == "bf16") return DType::bf16;
  if (name == "fp16") return DType::f16;
  throw Error("unknown dtype '" + std::string(name) + "'", {}, "use fp32, bf16 or fp16");
}

std::uint16_t bf16_from_f32_half_up(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (is_nan_bits(bits)) return quiet_bf16_nan(bits);
  return static_cast<std::uint16_t>((bits + 0x8000U) >> 16);
}

std::uint16_t low_half(float value) { return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) & 0xffffU); }

float f32_from_halves(std::uint16_t copy, std::uint16_t low) {
  const std::uint32_t signed_low = (static_cast<std::uint32_t>(low) ^ 0x8000U) - 0x8000U;
  return std::bit_cast<float>((static_cast<std::uint32_t>(copy) << 16) + signed_low);
}

std::uint16_t bf16_from_f32(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (is_nan_bits(bits)) return quiet_bf16_nan(bits);
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

float f32_from_bf16(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

std::uint16_t f16_from_f32(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > kExponentMask) return static_cast<std::uint16_t>(sign | 0x7e00U);  // NaN
  if (magnitude >= 0x47800000U) return static_cast<std::uint16_t>(sign | 0x7c00U);   // >= 65536
  if (magnitude < 0x33000000U) return static_cast<std::uint16_t>(sign);              // < 2^-25
  const int exponent = static_cast<int>(magnitude >> 23) - 127;
  const std::uint32_t significand = (magnitude & 0x7fffffU) | 0x800000U;
  // Bits dropped from the 24-bit significand: 13 for normal numbers, more below 2^-14.
  const int shift = exponent < -14 ? -exponent - 1 : 13;
  const std::uint32_t kept = significand >> shift;
  const std::uint32_t dropped = significand & ((1U << shift) - 1U);
  const std::uint32_t half = 1U << (shift - 1);
  const std::uint32_t rounded = kept + ((dropped > half || (dropped == half && (kept & 1U) != 0)) ? 1U : 0U);
  // For normal numbers `rounded` still holds the implicit bit; adding lets a carry run into the exponent (and to infinity).
  const std::uint32_t base = exponent < -14 ? 0U : static_cast<std::uint32_t>(exponent + 14) << 10;
  return static_cast<std::uint16_t>(sign | (base + rounded));
}

float f32_from_f16(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fU;
  const std::uint32_t fraction = bits & 0x3ffU;
  if (exponent == 0x1fU) return std::bit_cast<float>(sign | kExponentMask | (fraction << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112U) << 23) | (fraction << 13));
  const float value = static_cast<float>(fraction) * 0x1p-24F;  // zero and subnormals, exact
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | sign);
}

}  // namespace spipe
