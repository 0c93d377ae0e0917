// Kernels of the embedding.
#pragma once

#include "kernels/cpu/kernel_table.h"
#include "kernels/ops.h"

namespace spipe::cpu {

// Rows of a matrix that are summed: rows[0..count), or first, first + step, ... when rows is null.
struct RowList {
  const std::int64_t* rows = nullptr;
  std::int64_t first = 0, step = 0, count = 0;
};

struct EmbeddingTable {
  // Checks nothing: tokens lie in the vocabulary.
  void (*forward)(const EmbeddingForwardArgs& args, std::int64_t first, std::int64_t count);
  // out[cols] (+)= the listed rows of x (ldx elements apart), in the list's order.
  void (*sum_rows)(const void* x, DType type, std::int64_t ldx, const RowList& list, std::int64_t cols, bool accumulate,
                   float* out);
};
SPIPE_DECLARE_TABLES(EmbeddingTable, embedding_table)

}  // namespace spipe::cpu
