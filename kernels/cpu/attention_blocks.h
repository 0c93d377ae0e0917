// What attention forward and backward share: which keys a panel of queries sees, and packing of blocks.
#pragma once

#include "kernels/cpu/ops_attention.h"
#include "kernels/cpu/simd.h"

namespace spipe::cpu::SPIPE_ISA {

inline constexpr std::int64_t kPanel = 16;  // queries masked and multiplied together
inline constexpr std::int64_t kKeys = kAttentionBlock;

SPIPE_INLINE std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
SPIPE_INLINE std::int64_t most(std::int64_t a, std::int64_t b) { return a > b ? a : b; }
SPIPE_INLINE std::int64_t up_to_lanes(std::int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

struct Range {
  std::int64_t begin = 0, end = 0;
};
SPIPE_INLINE bool empty(Range r) { return r.begin >= r.end; }

// Keys of the block starting at `first_key` (as offsets into it) that the query at `position` sees.
SPIPE_INLINE Range visible(std::int64_t position, std::int64_t window, std::int64_t first_key) {
  const std::int64_t oldest = window > 0 ? most(0, position - window + 1) : 0;
  return {most(oldest - first_key, 0), least(position + 1 - first_key, kKeys)};
}
// The same for queries position .. position + rows - 1 together, widened to whole vectors.
SPIPE_INLINE Range visible_to_panel(std::int64_t position, std::int64_t rows, std::int64_t window, std::int64_t first_key) {
  const Range all{visible(position, window, first_key).begin, visible(position + rows - 1, window, first_key).end};
  if (empty(all)) return {};
  return {all.begin / kLanes * kLanes, up_to_lanes(all.end)};
}
// Lanes at..at+15 that lie in the range.
SPIPE_INLINE Mask lanes_in(Range r, std::int64_t at) {
  const IVec index = iadd(iota(), iset(static_cast<std::int32_t>(at)));
  return mask_and(igreater(index, iset(static_cast<std::int32_t>(r.begin - 1))),
                  igreater(iset(static_cast<std::int32_t>(r.end)), index));
}

// dst[rows][padded] = src[rows][cols], widened, zeros up to the padded row; rows beyond `rows` up to `all_rows` are zero.
template <typename T>
inline void pack_rows(const T* src, std::int64_t stride, std::int64_t rows, std::int64_t all_rows, std::int64_t cols,
                      float* dst) {
  const std::int64_t padded = up_to_lanes(cols);
  for (std::int64_t r = 0; r < all_rows; ++r) {
    for (std::int64_t c = 0; c < padded; c += kLanes) {
      store(dst + r * padded + c, r < rows ? load_n(src + r * stride + c, cols - c) : zero());
    }
  }
}

// dst[cols padded][kKeys] = transpose of src[rows][cols], widened; rows up to the next multiple of 16 are zero, later columns
// of dst are left alone.
template <typename T>
inline void pack_transposed(const T* src, std::int64_t stride, std::int64_t rows, std::int64_t cols, float* dst) {
  for (std::int64_t r = 0; r < rows; r += kLanes) {
    for (std::int64_t c = 0; c < cols; c += kLanes) {
      Vec block[kLanes];
      for (std::int64_t i = 0; i < kLanes; ++i) {
        block[i] = r + i < rows ? load_n(src + (r + i) * stride + c, cols - c) : zero();
      }
      transpose(block);
      for (std::int64_t i = 0; i < kLanes; ++i) store(dst + (c + i) * kKeys + r, block[i]);
    }
  }
}

// Element (row, 0) of one head in a [tokens, heads, head_dim] operand.
template <typename T>
SPIPE_INLINE T* at(const void* data, std::int64_t row, std::int64_t stride, std::int64_t head, std::int64_t head_dim) {
  return static_cast<T*>(const_cast<void*>(data)) + row * stride + head * head_dim;
}

}  // namespace spipe::cpu::SPIPE_ISA
