// Element types of tensors and files.
#pragma once

#include <cstdint>
#include <string_view>

namespace spipe {

enum class DType : std::uint8_t { f32, bf16, f16, f64, i32, i64, u8, u16, u32, boolean };

[[nodiscard]] std::uint64_t dtype_size(DType dtype);     // bytes per element
[[nodiscard]] std::string_view dtype_name(DType dtype);  // "fp32", "bf16", ... as in configs and logs
// Our config names ("fp32", "bf16", "fp16"); throws Error naming the allowed ones.
[[nodiscard]] DType dtype_from_name(std::string_view name);

// Half types as plain 16-bit patterns (no arithmetic here: DESIGN, run-time dispatch).
// bf16 rounding for compute copies of masters: (bits + 0x8000) >> 16, NaN -> quiet NaN of its sign.
[[nodiscard]] std::uint16_t bf16_from_f32_half_up(float value);
// A float in two halves: its bf16 copy as above, and its low 16 bits, which as a signed number say how the copy was rounded.
// Joined again they are the float, but for the payload of a NaN.
[[nodiscard]] std::uint16_t low_half(float value);
[[nodiscard]] float f32_from_halves(std::uint16_t copy, std::uint16_t low);
// IEEE round-to-nearest-even, used for export and activations.
[[nodiscard]] std::uint16_t bf16_from_f32(float value);
[[nodiscard]] float f32_from_bf16(std::uint16_t bits);
[[nodiscard]] std::uint16_t f16_from_f32(float value);  // nearest even, overflow to infinity
[[nodiscard]] float f32_from_f16(std::uint16_t bits);

}  // namespace spipe
