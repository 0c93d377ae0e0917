// See ops_basic.h; compiled once for each instruction set.
#include "kernels/cpu/ops_basic.h"

#include "kernels/cpu/simd_math.h"

namespace spipe::cpu::SPIPE_ISA {
namespace {

SPIPE_INLINE std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

template <typename S, typename D>
void convert_typed(const S* src, D* dst, std::int64_t elements) {
  for (std::int64_t i = 0; i < elements; i += kLanes) store_n(dst + i, load_n(src + i, elements - i), elements - i);
}

void convert_half_up(const float* src, Bf16* dst, std::int64_t elements) {
  std::int64_t i = 0;
  for (; i + kLanes <= elements; i += kLanes) store_half_up(dst + i, load(src + i));
  for (; i < elements; ++i) narrow_half_up(dst + i, src[i]);
}

void convert(const void* src, DType src_type, void* dst, DType dst_type, bool half_up, std::int64_t elements) {
  if (half_up) return convert_half_up(static_cast<const float*>(src), static_cast<Bf16*>(dst), elements);
  with_storage(src_type, [&](auto s) {
    with_storage(dst_type, [&](auto d) {
      convert_typed(static_cast<const decltype(s)*>(src), static_cast<decltype(d)*>(dst), elements);
    });
  });
}

template <typename A, typename B, typename O>
void add_typed(const A* a, const B* b, O* out, std::int64_t elements) {
  for (std::int64_t i = 0; i < elements; i += kLanes) {
    store_n(out + i, load_n(a + i, elements - i) + load_n(b + i, elements - i), elements - i);
  }
}

void add_arrays(const void* a, DType a_type, const void* b, DType b_type, void* out, DType out_type, std::int64_t elements) {
  with_storage(a_type, [&](auto x) {
    with_storage(b_type, [&](auto y) {
      with_storage(out_type, [&](auto z) {
        add_typed(static_cast<const decltype(x)*>(a), static_cast<const decltype(y)*>(b), static_cast<decltype(z)*>(out),
                  elements);
      });
    });
  });
}

// Blocks of kRows rows, then the block sums, both in ascending order: the error grows with rows / kRows only.
template <typename T>
void column_sum_typed(const T* x, std::int64_t ldx, std::int64_t rows, std::int64_t cols, bool accumulate, float* out) {
  constexpr std::int64_t kRows = 64, kGroup = 4;  // kGroup vectors of columns at a time
  for (std::int64_t c = 0; c < cols; c += kGroup * kLanes) {
    Vec total[kGroup];
    for (std::int64_t g = 0; g < kGroup; ++g) {
      const std::int64_t at = c + g * kLanes;
      total[g] = accumulate && at < cols ? load_n(out + at, cols - at) : zero();
    }
    for (std::int64_t first = 0; first < rows; first += kRows) {
      const std::int64_t end = first + kRows < rows ? first + kRows : rows;
      Vec block[kGroup] = {zero(), zero(), zero(), zero()};
      if (cols - c >= kGroup * kLanes) {
        for (std::int64_t r = first; r < end; ++r) {
          for (std::int64_t g = 0; g < kGroup; ++g) block[g] = block[g] + load(x + r * ldx + c + g * kLanes);
        }
      } else {
        for (std::int64_t g = 0; g < kGroup && c + g * kLanes < cols; ++g) {
          const std::int64_t at = c + g * kLanes;
          for (std::int64_t r = first; r < end; ++r) block[g] = block[g] + load_n(x + r * ldx + at, cols - at);
        }
      }
      for (std::int64_t g = 0; g < kGroup; ++g) total[g] = total[g] + block[g];
    }
    for (std::int64_t g = 0; g < kGroup && c + g * kLanes < cols; ++g) {
      store_n(out + c + g * kLanes, total[g], cols - c - g * kLanes);
    }
  }
}

void column_sum(const void* x, DType type, std::int64_t ldx, std::int64_t rows, std::int64_t cols, bool accumulate,
                float* out) {
  with_storage(type, [&](auto t) { column_sum_typed(static_cast<const decltype(t)*>(x), ldx, rows, cols, accumulate, out); });
}

// log(1 + y) for y >= 0, also where 1 + y loses y's low bits.
float log1p(float y) {
  const float u = 1.0f + y;
  return u == 1.0f ? y : log(u) * (y / (u - 1.0f));
}

// The largest of a row. Four accumulators hide the latency; they are joined in one order.
float largest(const float* x, std::int64_t count) {
  const Vec lowest = set(-__builtin_inff());
  Vec m[4] = {lowest, lowest, lowest, lowest};
  std::int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) m[j] = max(m[j], load(x + i + j * kLanes));
  }
  float top = max_lane(max(max(m[0], m[1]), max(m[2], m[3])));
  for (; i < count; ++i) top = top > x[i] ? top : x[i];
  return top;
}

// Sum of exp(x - shift); the exponentials replace x when `keep`.
float sum_of_exponentials(float* x, std::int64_t count, float shift, bool keep) {
  Vec s[4] = {zero(), zero(), zero(), zero()};
  const Vec minus_shift = set(-shift);
  std::int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const Vec e = exp(load(x + i + j * kLanes) + minus_shift);
      if (keep) store(x + i + j * kLanes, e);
      s[j] = s[j] + e;
    }
  }
  for (; i < count; i += kLanes) {  // lanes beyond the row become exp(-inf) = 0
    const Mask inside = igreater(iset(static_cast<std::int32_t>(least(count - i, kLanes))), iota());
    const Vec e = exp(select(inside, load_n(x + i, count - i), set(-__builtin_inff())) + minus_shift);
    if (keep) store_n(x + i, e, count - i);
    s[0] = s[0] + e;
  }
  return sum((s[0] + s[1]) + (s[2] + s[3]));
}

// The target's own exponential stays out of the sum: nll = log(others + own) - (target - largest) and the target's gradient
// softmax - 1 = -others / (others + own) then lose nothing when the target is nearly certain.
float cross_entropy(float* logits, std::int64_t cols, std::int64_t target, float scale) {
  const float highest = largest(logits, cols), target_logit = logits[target];
  logits[target] = -__builtin_inff();
  const float others = sum_of_exponentials(logits, cols, highest, scale != 0);
  const float total = others + exp(target_logit - highest);
  if (scale != 0) {
    const Vec factor = set(scale / total);
    for (std::int64_t i = 0; i < cols; i += kLanes) store_n(logits + i, load_n(logits + i, cols - i) * factor, cols - i);
    logits[target] = -scale * (others / total);
  } else {
    logits[target] = target_logit;
  }
  return target_logit == highest ? log1p(others) : log(total) + (highest - target_logit);
}

template <typename T>
void widen_typed(const T* src, std::int64_t src_ld, float* dst, std::int64_t dst_ld, std::int64_t rows, std::int64_t cols) {
  for (std::int64_t r = 0; r < rows; ++r) convert_typed(src + r * src_ld, dst + r * dst_ld, cols);
}

void widen_matrix(const void* src, DType type, std::int64_t src_ld, float* dst, std::int64_t dst_ld, std::int64_t rows,
                  std::int64_t cols) {
  with_storage(type, [&](auto t) { widen_typed(static_cast<const decltype(t)*>(src), src_ld, dst, dst_ld, rows, cols); });
}

void finish_tile(const float* tile, std::int64_t tile_ld, const void* bias, DType bias_type, void* c, DType c_type,
                 std::int64_t ldc, std::int64_t rows, std::int64_t cols) {
  for (std::int64_t r = 0; r < rows; ++r) {
    with_storage(c_type, [&](auto t) {
      auto* out = static_cast<decltype(t)*>(c) + r * ldc;
      if (bias == nullptr) return convert_typed(tile + r * tile_ld, out, cols);
      with_storage(bias_type, [&](auto b) { add_typed(tile + r * tile_ld, static_cast<const decltype(b)*>(bias), out, cols); });
    });
  }
}

}  // namespace

extern const BasicTable basic_table;
const BasicTable basic_table = {.convert = convert,
                                .add = add_arrays,
                                .column_sum = column_sum,
                                .cross_entropy = cross_entropy,
                                .widen_matrix = widen_matrix,
                                .finish_tile = finish_tile};

}  // namespace spipe::cpu::SPIPE_ISA
