// CpuOps: attention. Items and their order of accumulation are functions of the arguments only.
#include <atomic>

#include "kernels/cpu/cpu_ops_impl.h"
#include "kernels/cpu/ops_attention.h"

namespace spipe::cpu {
namespace {

std::int64_t blocks_of(std::int64_t n, std::int64_t block) { return (n + block - 1) / block; }

void default_stride(std::int64_t& stride, std::int64_t packed) {
  if (stride == 0) stride = packed;
  SPIPE_CHECK(stride >= packed, "attention: a token's heads are longer than the distance to the next token");
}

void check_heads(std::int64_t heads, std::int64_t kv_heads, std::int64_t head_dim, float scale) {
  SPIPE_CHECK(head_dim > 0 && kv_heads > 0 && heads % kv_heads == 0, "attention: heads are a multiple of kv_heads");
  SPIPE_CHECK(scale > 0, "attention: scale is positive");
}

}  // namespace

void CpuOps::attention_forward(StreamHandle*, const AttentionForwardArgs& given) {
  AttentionForwardArgs args = given;
  if (args.batch == 0 || args.q_len == 0) return;
  check_heads(args.heads, args.kv_heads, args.head_dim, args.scale);
  SPIPE_CHECK(args.q_len <= args.kv_len && args.window >= 0, "attention: every query sees its own key");
  SPIPE_CHECK(args.q.dtype == args.k.dtype && args.q.dtype == args.v.dtype && is_storage(args.q.dtype),
              "attention: q, k and v have one type");
  SPIPE_CHECK(is_storage(args.out.dtype), "attention: out is fp32, bf16 or fp16");
  default_stride(args.q_stride, args.heads * args.head_dim);
  default_stride(args.out_stride, args.heads * args.head_dim);
  default_stride(args.k_stride, args.kv_heads * args.head_dim);
  default_stride(args.v_stride, args.kv_heads * args.head_dim);

  const AttentionTable& table = SPIPE_TABLE(isa_, attention_table);
  const std::int64_t scratch = table.forward_scratch(args.head_dim);
  const std::int64_t chunks = blocks_of(args.q_len, kQueryChunk), heads = args.batch * args.heads;
  // Late chunks see the most keys: they go first, so that the loop does not end with one long item.
  pool_.parallel_for(chunks * heads, [&](std::int64_t i, int worker) {
    const std::int64_t chunk = chunks - 1 - i / heads, head = i % heads;
    table.forward(args, {.batch = head / args.heads,
                         .head = head % args.heads,
                         .first_query = chunk * kQueryChunk,
                         .scratch = scratch_.get(worker, scratch)});
  });
}

void CpuOps::attention_backward(StreamHandle*, const AttentionBackwardArgs& given) {
  AttentionBackwardArgs args = given;
  if (args.batch == 0 || args.seq_len == 0) return;
  check_heads(args.heads, args.kv_heads, args.head_dim, args.scale);
  SPIPE_CHECK(args.window >= 0 && args.lse != nullptr, "attention backward: window and lse");
  const DType type = args.q.dtype, grad = args.dq.dtype;
  SPIPE_CHECK(
      is_storage(type) && args.k.dtype == type && args.v.dtype == type && args.out.dtype == type && args.dout.dtype == type,
      "attention backward: q, k, v, out and dout have one type");
  SPIPE_CHECK(is_storage(grad) && args.dk.dtype == grad && args.dv.dtype == grad, "attention: dq, dk and dv have one type");
  for (std::int64_t* stride : {&args.q_stride, &args.out_stride, &args.dout_stride, &args.dq_stride}) {
    default_stride(*stride, args.heads * args.head_dim);
  }
  for (std::int64_t* stride : {&args.k_stride, &args.v_stride, &args.dk_stride, &args.dv_stride}) {
    default_stride(*stride, args.kv_heads * args.head_dim);
  }

  const AttentionTable& table = SPIPE_TABLE(isa_, attention_table);
  const std::int64_t length = args.seq_len, group = args.heads / args.kv_heads, blocks = blocks_of(length, kAttentionBlock);
  const std::int64_t kv_heads = args.batch * args.kv_heads, head_floats = group * length * args.head_dim;
  const std::unique_ptr<float[]> delta(new float[static_cast<std::size_t>(args.batch * args.heads * length)]);
  pool_.parallel_for(args.batch * args.heads,
                     [&](std::int64_t i, int) { table.delta(args, i / args.heads, i % args.heads, delta.get() + i * length); });

  const std::int64_t scratch = table.backward_scratch(args.head_dim);
  const std::int64_t own_sums = grad == DType::f32 ? 0 : head_floats;
  constexpr std::int64_t kEnoughItems = 8;
  if (kv_heads >= kEnoughItems) {  // an item runs all key blocks of its head in order
    pool_.parallel_for(kv_heads, [&](std::int64_t i, int worker) {
      float* buffer = scratch_.get(worker, scratch + own_sums);
      for (std::int64_t block = 0; block < blocks; ++block) {
        table.backward(args, {.batch = i / args.kv_heads,
                              .kv_head = i % args.kv_heads,
                              .key_block = block,
                              .delta = delta.get(),
                              .dq_sum = own_sums > 0 ? buffer + scratch : nullptr,
                              .scratch = buffer});
      }
    });
    return;
  }
  // Few heads: key blocks are items of their own, which take turns at each query block's dq. The pool hands items out in
  // ascending order, so an item only ever waits for one that has started. Same bits as above.
  const std::unique_ptr<float[]> sums(own_sums > 0 ? new float[static_cast<std::size_t>(kv_heads * head_floats)] : nullptr);
  std::vector<std::uint32_t> progress(static_cast<std::size_t>(kv_heads * group * blocks), 0);
  std::uint32_t stop = 0;
  pool_.parallel_for(kv_heads * blocks, [&](std::int64_t item, int worker) {
    const std::int64_t i = item % kv_heads;
    try {
      table.backward(args, {.batch = i / args.kv_heads,
                            .kv_head = i % args.kv_heads,
                            .key_block = item / kv_heads,
                            .delta = delta.get(),
                            .dq_sum = sums ? sums.get() + i * head_floats : nullptr,
                            .progress = progress.data() + i * group * blocks,
                            .stop = &stop,
                            .scratch = scratch_.get(worker, scratch)});
    } catch (...) {
      std::atomic_ref(stop).store(1);
      throw;
    }
  });
}

}  // namespace spipe::cpu
