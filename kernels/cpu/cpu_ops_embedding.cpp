// CpuOps: the embedding and its gradient.
#include "kernels/cpu/cpu_ops_impl.h"
#include "kernels/cpu/ops_embedding.h"

namespace spipe::cpu {
namespace {

void check_tokens(const std::int32_t* tokens, std::int64_t count, std::int64_t vocab) {
  for (std::int64_t t = 0; t < count; ++t) SPIPE_CHECK(tokens[t] >= 0 && tokens[t] < vocab, "token beyond the vocabulary");
}

// Positions 0..count-1 ordered by token, ascending within each token: a counting sort in `workspace`.
// begin[v]..begin[v+1] is the range of token v in order.
struct TokenOrder {
  std::int64_t* begin;
  std::int64_t* order;
};
TokenOrder order_by_token(const std::int32_t* tokens, std::int64_t count, std::int64_t vocab, void* workspace) {
  auto* begin = static_cast<std::int64_t*>(workspace);  // vocab + 2 entries, counted two places up so that filling
  std::int64_t* order = begin + vocab + 2;              // leaves begin[v] where token v starts
  std::fill(begin, order, 0);
  for (std::int64_t t = 0; t < count; ++t) ++begin[tokens[t] + 2];
  for (std::int64_t v = 2; v <= vocab; ++v) begin[v] += begin[v - 1];
  for (std::int64_t t = 0; t < count; ++t) order[begin[tokens[t] + 1]++] = t;
  return {begin, order};
}

}  // namespace

void CpuOps::embedding_forward(StreamHandle*, const EmbeddingForwardArgs& args) {
  SPIPE_CHECK(is_storage(args.out.dtype) && args.table.dtype == args.out.dtype, "embedding: one of fp32, bf16, fp16");
  SPIPE_CHECK(!args.positions || args.positions.dtype == args.out.dtype, "embedding: positions of the table's type");
  SPIPE_CHECK(args.count >= 0 && args.cols >= 0 && (!args.positions || args.seq_len > 0), "embedding: size");
  check_tokens(args.tokens, args.count, args.vocab);
  const EmbeddingTable& table = SPIPE_TABLE(isa_, embedding_table);
  const std::int64_t rows = std::max<std::int64_t>(1, 16384 / std::max<std::int64_t>(1, args.cols));
  for_blocks(args.count, rows, [&](std::int64_t first, std::int64_t count, int) { table.forward(args, first, count); });
}

void CpuOps::embedding_backward(StreamHandle*, const EmbeddingBackwardArgs& args) {
  SPIPE_CHECK(is_storage(args.dout.dtype), "embedding: one of fp32, bf16, fp16");
  SPIPE_CHECK((!args.dtable || args.dtable.dtype == DType::f32) && (!args.dpositions || args.dpositions.dtype == DType::f32),
              "embedding: gradients are fp32");
  SPIPE_CHECK(args.count >= 0 && args.cols >= 0 && args.vocab >= 0, "embedding: size");
  const EmbeddingTable& table = SPIPE_TABLE(isa_, embedding_table);
  constexpr std::int64_t kColumns = 256;  // columns an item takes: a frequent token is shared among threads
  const std::int64_t column_items = (args.cols + kColumns - 1) / kColumns;
  // Row `row` of `out`, columns of `item`.
  const auto sum = [&](const RowList& list, std::int64_t row, std::int64_t item, Ptr out) {
    if (list.count == 0 && args.accumulate) return;
    const std::int64_t first = item * kColumns;
    table.sum_rows(offset(args.dout, first).data, args.dout.dtype, args.cols, list, std::min(kColumns, args.cols - first),
                   args.accumulate, static_cast<float*>(out.data) + row * args.cols + first);
  };
  if (args.dtable) {
    check_tokens(args.tokens, args.count, args.vocab);
    const auto [begin, order] = order_by_token(args.tokens, args.count, args.vocab, args.workspace);
    constexpr std::int64_t kRows = 64;  // vocabulary entries an item takes
    pool_.parallel_for((args.vocab + kRows - 1) / kRows * column_items, [&](std::int64_t item, int) {
      const std::int64_t first = item / column_items * kRows;
      for (std::int64_t v = first; v < std::min(first + kRows, args.vocab); ++v) {
        sum({.rows = order + begin[v], .count = begin[v + 1] - begin[v]}, v, item % column_items, args.dtable);
      }
    });
  }
  if (args.dpositions) {
    SPIPE_CHECK(args.seq_len > 0, "embedding: seq_len");
    pool_.parallel_for(args.position_rows * column_items, [&](std::int64_t item, int) {
      const std::int64_t row = item / column_items, i = row - args.first_position;
      const bool used = i >= 0 && i < std::min(args.seq_len, args.count);
      const std::int64_t count = used ? (args.count - i - 1) / args.seq_len + 1 : 0;
      sum({.first = i, .step = args.seq_len, .count = count}, row, item % column_items, args.dpositions);
    });
  }
}

}  // namespace spipe::cpu
