// Attention forward: online softmax over key blocks (Milakov and Gimelshein 2018; Dao et al. 2022), for a chunk of queries of
// one head. Compiled once for each instruction set.
#include "kernels/cpu/ops_attention.h"

#include "kernels/cpu/attention_backward.h"
#include "kernels/cpu/attention_blocks.h"
#include "kernels/cpu/simd_gemm.h"
#include "kernels/cpu/simd_math.h"

namespace spipe::cpu::SPIPE_ISA {
namespace {

struct ForwardBuffers {
  float *q, *out;     // [kQueryChunk, padded]
  float *k, *v;       // [padded, kKeys] and [kKeys, padded]
  float* scores;      // [kPanel, kKeys]
  float* highest;     // [kQueryChunk] running maximum of the scaled scores
  float* sums;        // [kQueryChunk, 16] running sums of exponentials, by lane
  float* correction;  // [kPanel] what the maximum's rise makes of old sums
};

std::int64_t carve_forward(std::int64_t head_dim, float* base, ForwardBuffers* buffers) {
  const std::int64_t padded = up_to_lanes(head_dim);
  std::int64_t used = 0;
  const auto take = [&](std::int64_t floats) {
    float* p = base + used;
    used += floats;
    return p;
  };
  *buffers = {.q = take(kQueryChunk * padded),
              .out = take(kQueryChunk * padded),
              .k = take(padded * kKeys),
              .v = take(kKeys * padded),
              .scores = take(kPanel * kKeys),
              .highest = take(kQueryChunk),
              .sums = take(kQueryChunk * kLanes),
              .correction = take(kPanel)};
  return used;
}

std::int64_t forward_scratch(std::int64_t head_dim) {
  ForwardBuffers unused;
  float none = 0;
  return carve_forward(head_dim, &none, &unused);
}

// One panel against one key block: scores, their maximum, exponentials, and the weighted sum of values.
void forward_panel(const AttentionForwardArgs& args, const ForwardBuffers& s, std::int64_t row, std::int64_t rows,
                   std::int64_t position, std::int64_t first_key, std::int64_t padded) {
  const Range keys = visible_to_panel(position, rows, args.window, first_key);
  if (empty(keys)) return;
  const std::int64_t width = keys.end - keys.begin;
  small_gemm({.a = s.q + row * padded,
              .a_row = padded,
              .a_k = 1,
              .b = s.k + keys.begin,
              .ldb = kKeys,
              .c = s.scores + keys.begin,
              .ldc = kKeys,
              .rows = static_cast<int>(rows),
              .vectors = static_cast<int>(width / kLanes),
              .depth = static_cast<int>(args.head_dim)});

  const Vec lowest = set(-__builtin_inff());
  float block_highest[kPanel] = {};
  for (std::int64_t r = 0; r < rows; ++r) {
    float* score = s.scores + r * kKeys;
    const Range seen = visible(position + r, args.window, first_key);
    const bool all = seen.begin <= keys.begin && seen.end >= keys.end;
    Vec top = lowest;
    for (std::int64_t c = keys.begin; c < keys.end; c += kLanes) {
      Vec x = load(score + c);
      if (!all) {
        x = select(lanes_in(seen, c), x, lowest);
        store(score + c, x);
      }
      top = max(top, x);
    }
    block_highest[r] = max_lane(top);
  }
  // A row that has seen no key yet keeps the maximum -inf; zero in its place keeps inf - inf away.
  const Vec before = load(s.highest + row), now = max(before, load(block_highest) * set(args.scale));
  const Vec shift = select(equal(now, lowest), zero(), now);
  float shifts[kPanel];
  store(shifts, shift);
  store(s.correction, exp(before - shift));
  store(s.highest + row, now);

  const Vec scale = set(args.scale);
  for (std::int64_t r = 0; r < rows; ++r) {
    float* score = s.scores + r * kKeys;
    const Vec minus_shift = set(-shifts[r]);
    Vec total = load(s.sums + (row + r) * kLanes) * set(s.correction[r]);
    for (std::int64_t c = keys.begin; c < keys.end; c += kLanes) {
      const Vec e = exp(fma(load(score + c), scale, minus_shift));
      store(score + c, e);
      total = total + e;
    }
    store(s.sums + (row + r) * kLanes, total);
  }
  small_gemm({.a = s.scores + keys.begin,
              .a_row = kKeys,
              .a_k = 1,
              .b = s.v + keys.begin * padded,
              .ldb = padded,
              .c = s.out + row * padded,
              .ldc = padded,
              .rows = static_cast<int>(rows),
              .vectors = static_cast<int>(padded / kLanes),
              .depth = static_cast<int>(width),
              .accumulate = true,
              .row_scale = s.correction});
}

// out = sum / total, lse = maximum + log(total), for the rows of a panel.
template <typename O>
void finish_panel(const ForwardBuffers& s, std::int64_t row, std::int64_t rows, std::int64_t head_dim, O* out,
                  std::int64_t out_stride, float* lse) {
  const std::int64_t padded = up_to_lanes(head_dim);
  float totals[kPanel];
  for (std::int64_t r = 0; r < kPanel; ++r) totals[r] = r < rows ? sum(load(s.sums + (row + r) * kLanes)) : 1.0f;
  if (lse != nullptr) store_n(lse, load(s.highest + row) + log(load(totals)), rows);
  for (std::int64_t r = 0; r < rows; ++r) {
    const Vec inverse = set(1.0f / totals[r]);
    for (std::int64_t c = 0; c < head_dim; c += kLanes) {
      store_n(out + r * out_stride + c, load(s.out + (row + r) * padded + c) * inverse, head_dim - c);
    }
  }
}

template <typename T, typename O>
void forward_typed(const AttentionForwardArgs& args, const AttentionForwardItem& item) {
  const std::int64_t dim = args.head_dim, padded = up_to_lanes(dim);
  const std::int64_t queries = least(kQueryChunk, args.q_len - item.first_query);
  const std::int64_t kv_head = item.head / (args.heads / args.kv_heads);
  ForwardBuffers s;
  carve_forward(dim, item.scratch, &s);

  const std::int64_t token = item.batch * args.q_len + item.first_query;
  pack_rows(at<const T>(args.q.data, token, args.q_stride, item.head, dim), args.q_stride, queries, queries, dim, s.q);
  for (std::int64_t i = 0; i < queries * padded; i += kLanes) store(s.out + i, zero());
  for (std::int64_t i = 0; i < kQueryChunk; i += kLanes) store(s.highest + i, set(-__builtin_inff()));
  for (std::int64_t i = 0; i < queries * kLanes; i += kLanes) store(s.sums + i, zero());

  const std::int64_t position = args.kv_len - args.q_len + item.first_query;
  const std::int64_t oldest = args.window > 0 ? most(0, position - args.window + 1) : 0;
  const std::int64_t apart = args.kv_batch_stride;  // 0: sequences follow each other
  const T* k = at<const T>(args.k.data, 0, args.k_stride, kv_head, dim) +
               item.batch * (apart != 0 ? apart : args.kv_len * args.k_stride);
  const T* v = at<const T>(args.v.data, 0, args.v_stride, kv_head, dim) +
               item.batch * (apart != 0 ? apart : args.kv_len * args.v_stride);
  for (std::int64_t key = oldest / kKeys * kKeys; key < position + queries; key += kKeys) {
    const std::int64_t count = least(kKeys, args.kv_len - key);
    pack_transposed(k + key * args.k_stride, args.k_stride, count, dim, s.k);
    pack_rows(v + key * args.v_stride, args.v_stride, count, up_to_lanes(count), dim, s.v);
    for (std::int64_t row = 0; row < queries; row += kPanel) {
      forward_panel(args, s, row, least(kPanel, queries - row), position + row, key, padded);
    }
  }
  for (std::int64_t row = 0; row < queries; row += kPanel) {
    float* lse =
        args.lse == nullptr ? nullptr : args.lse + (item.batch * args.heads + item.head) * args.q_len + item.first_query + row;
    finish_panel(s, row, least(kPanel, queries - row), dim, at<O>(args.out.data, token + row, args.out_stride, item.head, dim),
                 args.out_stride, lse);
  }
}

void forward(const AttentionForwardArgs& args, const AttentionForwardItem& item) {
  with_storage(args.q.dtype, [&](auto t) {
    with_storage(args.out.dtype, [&](auto o) { forward_typed<decltype(t), decltype(o)>(args, item); });
  });
}

}  // namespace

extern const AttentionTable attention_table;
const AttentionTable attention_table = {.forward_scratch = forward_scratch,
                                        .backward_scratch = attention_backward_scratch,
                                        .forward = forward,
                                        .delta = attention_delta,
                                        .backward = attention_backward};

}  // namespace spipe::cpu::SPIPE_ISA
