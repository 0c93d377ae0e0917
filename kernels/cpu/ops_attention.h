// Attention kernels. Work is cut in blocks of queries and keys by constants; an item owns what it writes, or adds to it in an
// order that does not depend on who runs first.
#pragma once

#include "kernels/cpu/kernel_table.h"
#include "kernels/ops.h"

namespace spipe::cpu {

inline constexpr std::int64_t kQueryChunk = 256;     // queries of a forward item
inline constexpr std::int64_t kAttentionBlock = 64;  // keys of a block; queries of a backward block

struct AttentionForwardItem {
  std::int64_t batch = 0, head = 0, first_query = 0;
  float* scratch = nullptr;  // forward_scratch floats
};

// One key block against all queries that see it: writes its dk and dv, adds to dq. Key blocks of a sequence add to a query
// block's dq in ascending order: `progress[query head of the group][query block]` counts those done, and an item waits for its
// turn (null: the caller runs key blocks in order). Items must be started in ascending key block order.
struct AttentionBackwardItem {
  std::int64_t batch = 0, kv_head = 0, key_block = 0;
  const float* delta = nullptr;  // [batch, heads, seq_len] row sums of dout * out
  float* dq_sum = nullptr;       // fp32 [group, seq_len, head_dim] of this kv head; null: dq itself is fp32
  std::uint32_t* progress = nullptr;
  const std::uint32_t* stop = nullptr;  // non-zero: another item failed, give up waiting
  float* scratch = nullptr;             // backward_scratch floats
};

struct AttentionTable {
  std::int64_t (*forward_scratch)(std::int64_t head_dim);
  std::int64_t (*backward_scratch)(std::int64_t head_dim);
  void (*forward)(const AttentionForwardArgs& args, const AttentionForwardItem& item);
  // delta[seq_len] of one head: sums over head_dim of dout * out.
  void (*delta)(const AttentionBackwardArgs& args, std::int64_t batch, std::int64_t head, float* delta);
  void (*backward)(const AttentionBackwardArgs& args, const AttentionBackwardItem& item);
};
SPIPE_DECLARE_TABLES(AttentionTable, attention_table)

}  // namespace spipe::cpu
