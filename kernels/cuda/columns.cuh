// Sums over the rows of a matrix, column by column, in a fixed order without atomics: parts of the rows are summed into
// scratch, then the parts in ascending order. The split depends on the shape only.
#pragma once

#include <algorithm>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"

namespace spipe::cuda {

struct ColumnTerm {
  float v[2];  // what an element adds to the first and to the second sum
};

inline constexpr int kColumnLanes = 8;  // rows that a block takes at a time
inline constexpr std::int64_t kColumnsOfBlock = 32;
inline constexpr unsigned kColumnThreads = kColumnLanes * static_cast<unsigned>(kColumnsOfBlock);

// partials[part][output][cols]. A lane sums the rows of its part that are its own modulo 8, ascending; then the lanes follow
// each other. `term(row, col)` gives a ColumnTerm. Reads what term reads once; writes 1/rows_of_part of it.
template <int outputs, typename Term>
__global__ void __launch_bounds__(kColumnThreads)
    column_partials_kernel(Term term, std::int64_t rows, std::int64_t cols, std::int64_t rows_of_part, float* partials) {
  __shared__ float sums[outputs][kColumnLanes][kColumnsOfBlock];
  const int lane = static_cast<int>(threadIdx.x) / static_cast<int>(kColumnsOfBlock);
  const int own = static_cast<int>(threadIdx.x) % static_cast<int>(kColumnsOfBlock);
  const std::int64_t col = blockIdx.x * kColumnsOfBlock + own;
  const std::int64_t first = blockIdx.y * rows_of_part, end = first + rows_of_part < rows ? first + rows_of_part : rows;
  float sum[outputs] = {};
  if (col < cols) {
    for (std::int64_t row = first + lane; row < end; row += kColumnLanes) {
      const ColumnTerm t = term(row, col);
      for (int o = 0; o < outputs; ++o) sum[o] = __fadd_rn(sum[o], t.v[o]);
    }
  }
  for (int o = 0; o < outputs; ++o) sums[o][lane][own] = sum[o];
  __syncthreads();
  if (lane != 0 || col >= cols) return;
  for (int o = 0; o < outputs; ++o) {
    for (int other = 1; other < kColumnLanes; ++other) sum[o] = __fadd_rn(sum[o], sums[o][other][own]);
    partials[(blockIdx.y * outputs + o) * cols + col] = sum[o];
  }
}

// out[cols] (+)= sum over the parts, ascending; parts are `stride` floats apart.
void combine_columns(StreamHandle* stream, const float* partials, std::int64_t parts, std::int64_t stride, std::int64_t cols,
                     bool accumulate, void* out);

// outs[o][cols] (+)= sum over rows of term's v[o].
template <int outputs, typename Term>
void sum_columns(StreamHandle* stream, const Term& term, std::int64_t rows, std::int64_t cols, float* scratch, bool accumulate,
                 const Ptr (&outs)[outputs]) {
  if (cols == 0) return;
  const std::int64_t room = static_cast<std::int64_t>(kCudaScratchBytes / sizeof(float)) / (outputs * cols);
  SPIPE_CHECK(room > 0, "a row is longer than the scratch for its sums");
  const std::int64_t rows_of_part = std::max<std::int64_t>(16, blocks_of(rows, std::min<std::int64_t>(64, room)));
  const std::int64_t parts = blocks_of(rows, rows_of_part);
  if (parts > 0) {
    launch(stream, {.blocks_x = blocks_of(cols, kColumnsOfBlock), .blocks_y = parts, .threads = kColumnThreads},
           column_partials_kernel<outputs, Term>, term, rows, cols, rows_of_part, scratch);
  }
  for (int o = 0; o < outputs; ++o) {
    combine_columns(stream, scratch + o * cols, parts, outputs * cols, cols, accumulate, outs[o].data);
  }
}

}  // namespace spipe::cuda
