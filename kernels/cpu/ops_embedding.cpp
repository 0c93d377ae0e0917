// See ops_embedding.h; compiled once for each instruction set.
#include "kernels/cpu/ops_embedding.h"

#include "kernels/cpu/simd.h"

namespace spipe::cpu::SPIPE_ISA {
namespace {

template <typename T>
void forward_typed(const EmbeddingForwardArgs& args, std::int64_t first, std::int64_t count) {
  const std::int64_t cols = args.cols;
  for (std::int64_t t = first; t < first + count; ++t) {
    const T* row = static_cast<const T*>(args.table.data) + args.tokens[t] * cols;
    const T* position = static_cast<const T*>(args.positions.data);
    T* out = static_cast<T*>(args.out.data) + t * cols;
    if (position == nullptr) {
      for (std::int64_t i = 0; i < cols; i += kLanes) store_n(out + i, load_n(row + i, cols - i), cols - i);
      continue;
    }
    position += (args.first_position + t % args.seq_len) * cols;
    for (std::int64_t i = 0; i < cols; i += kLanes) {
      store_n(out + i, load_n(row + i, cols - i) + load_n(position + i, cols - i), cols - i);
    }
  }
}

void forward(const EmbeddingForwardArgs& args, std::int64_t first, std::int64_t count) {
  with_storage(args.out.dtype, [&](auto t) { forward_typed<decltype(t)>(args, first, count); });
}

// kWide vectors of columns stay in registers while the rows go by; the first row is taken as it is.
template <int kWide, typename T>
SPIPE_INLINE void sum_columns(const T* x, std::int64_t ldx, const RowList& list, std::int64_t n, bool accumulate, float* out) {
  Vec total[kWide];
  for (int g = 0; g < kWide; ++g) total[g] = zero();
  for (std::int64_t j = 0; j < list.count; ++j) {
    const T* row = x + (list.rows != nullptr ? list.rows[j] : list.first + j * list.step) * ldx;
    for (int g = 0; g < kWide; ++g) {
      const Vec value = load_n(row + g * kLanes, n);
      total[g] = j == 0 ? value : total[g] + value;
    }
  }
  for (int g = 0; g < kWide; ++g) {
    store_n(out + g * kLanes, accumulate ? load_n(out + g * kLanes, n) + total[g] : total[g], n);
  }
}

template <typename T>
void sum_rows_typed(const T* x, std::int64_t ldx, const RowList& list, std::int64_t cols, bool accumulate, float* out) {
  constexpr int kWide = 4;
  std::int64_t c = 0;
  for (; c + kWide * kLanes <= cols; c += kWide * kLanes) sum_columns<kWide>(x + c, ldx, list, kLanes, accumulate, out + c);
  for (; c < cols; c += kLanes) sum_columns<1>(x + c, ldx, list, cols - c, accumulate, out + c);
}

void sum_rows(const void* x, DType type, std::int64_t ldx, const RowList& list, std::int64_t cols, bool accumulate,
              float* out) {
  with_storage(type, [&](auto t) { sum_rows_typed(static_cast<const decltype(t)*>(x), ldx, list, cols, accumulate, out); });
}

}  // namespace

extern const EmbeddingTable embedding_table;
const EmbeddingTable embedding_table = {.forward = forward, .sum_rows = sum_rows};

}  // namespace spipe::cpu::SPIPE_ISA
