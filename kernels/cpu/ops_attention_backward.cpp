// Attention backward by recomputation: with P = exp(scale q k - lse), delta = rowsum(dout * out),
//   dv = P^T dout,   dS = P * (dout v - delta) * scale,   dk = dS^T q,   dq = dS k.
// An item is one key block of a kv head against every query block that sees it. Compiled once for each instruction set.
#include <sched.h>

#include "kernels/cpu/attention_backward.h"
#include "kernels/cpu/attention_blocks.h"
#include "kernels/cpu/simd_gemm.h"
#include "kernels/cpu/simd_math.h"

namespace spipe::cpu::SPIPE_ISA {
namespace {

constexpr std::int64_t kQueries = kAttentionBlock;
constexpr std::int64_t kPanels = kQueries / kPanel;
static_assert(kPanel == kLanes && kQueries == kKeys);

struct BackwardBuffers {
  float *k, *v, *k_rows;  // transposes [padded, kKeys]; keys as rows [kKeys, padded]
  float *q, *dout;        // [kQueries, padded]
  float *p, *ds;          // [kQueries, kKeys]
  float *dk, *dv, *dq;    // [kKeys, padded], [kQueries, padded]
};

std::int64_t carve_backward(std::int64_t head_dim, float* base, BackwardBuffers* buffers) {
  const std::int64_t block = kKeys * up_to_lanes(head_dim);
  std::int64_t used = 0;
  const auto take = [&](std::int64_t floats) {
    float* p = base + used;
    used += floats;
    return p;
  };
  *buffers = {.k = take(block),
              .v = take(block),
              .k_rows = take(block),
              .q = take(block),
              .dout = take(block),
              .p = take(kQueries * kKeys),
              .ds = take(kQueries * kKeys),
              .dk = take(block),
              .dv = take(block),
              .dq = take(block)};
  return used;
}

template <typename T>
void delta_typed(const T* out, std::int64_t out_stride, const T* dout, std::int64_t dout_stride, std::int64_t rows,
                 std::int64_t dim, float* delta) {
  for (std::int64_t r = 0; r < rows; ++r) {
    Vec total = zero();
    for (std::int64_t c = 0; c < dim; c += kLanes) {
      total = fma(load_n(out + r * out_stride + c, dim - c), load_n(dout + r * dout_stride + c, dim - c), total);
    }
    delta[r] = sum(total);
  }
}

// The probabilities and score gradients of a panel from its scores (in p) and dout v (in ds).
void backward_rows(const AttentionBackwardArgs& args, const BackwardBuffers& s, std::int64_t row, std::int64_t rows,
                   std::int64_t position, std::int64_t first_key, Range keys, const float* lse, const float* delta) {
  const Vec scale = set(args.scale);
  for (std::int64_t r = row; r < row + rows; ++r) {
    const Range seen = visible(position + r, args.window, first_key);
    const bool all = seen.begin <= keys.begin && seen.end >= keys.end;
    const Vec minus_lse = set(-lse[r]), minus_delta = set(-delta[r]);
    for (std::int64_t c = keys.begin; c < keys.end; c += kLanes) {
      float* p_at = s.p + r * kKeys + c;
      float* ds_at = s.ds + r * kKeys + c;
      Vec p = exp(fma(load(p_at), scale, minus_lse));
      Vec ds = (p * scale) * (load(ds_at) + minus_delta);
      if (!all) {
        const Mask inside = lanes_in(seen, c);
        p = select(inside, p, zero());
        ds = select(inside, ds, zero());
      }
      store(p_at, p);
      store(ds_at, ds);
    }
  }
}

// One query block against the packed key block; leaves its dq contribution in s.dq.
void backward_pair(const AttentionBackwardArgs& args, const BackwardBuffers& s, std::int64_t first_query, std::int64_t queries,
                   std::int64_t first_key, const float* lse, const float* delta) {
  const std::int64_t dim = args.head_dim, padded = up_to_lanes(dim), vectors = padded / kLanes;
  const std::int64_t panels = (queries + kPanel - 1) / kPanel;
  Range keys[kPanels] = {};
  for (std::int64_t i = 0; i < panels; ++i) {
    const std::int64_t row = i * kPanel, rows = least(kPanel, queries - row);
    keys[i] = visible_to_panel(first_query + row, rows, args.window, first_key);
    const std::int64_t begin = keys[i].begin, width = keys[i].end - begin;
    if (width > 0) {
      const SmallGemm scores{.a = s.q + row * padded,
                             .a_row = padded,
                             .a_k = 1,
                             .b = s.k + begin,
                             .ldb = kKeys,
                             .c = s.p + row * kKeys + begin,
                             .ldc = kKeys,
                             .rows = static_cast<int>(rows),
                             .vectors = static_cast<int>(width / kLanes),
                             .depth = static_cast<int>(dim)};
      SmallGemm dp = scores;
      dp.a = s.dout + row * padded;
      dp.b = s.v + begin;
      dp.c = s.ds + row * kKeys + begin;
      small_gemm(scores);
      small_gemm(dp);
      backward_rows(args, s, row, rows, first_query, first_key, keys[i], lse, delta);
    }
    small_gemm({.a = s.ds + row * kKeys + begin,
                .a_row = kKeys,
                .a_k = 1,
                .b = s.k_rows + begin * padded,
                .ldb = padded,
                .c = s.dq + row * padded,
                .ldc = padded,
                .rows = static_cast<int>(rows),
                .vectors = static_cast<int>(vectors),
                .depth = static_cast<int>(width)});
  }
  // Transposed products, a vector of keys at a time, over the panels that see it (they are neighbours).
  for (std::int64_t key = 0; key < kKeys; key += kPanel) {
    std::int64_t first = panels, last = -1;
    for (std::int64_t i = 0; i < panels; ++i) {
      if (key < keys[i].begin || key >= keys[i].end) continue;
      first = least(first, i);
      last = i;
    }
    if (last < 0) continue;
    const std::int64_t row = first * kPanel, depth = least(queries, (last + 1) * kPanel) - row;
    const SmallGemm dv{.a = s.p + row * kKeys + key,
                       .a_row = 1,
                       .a_k = kKeys,
                       .b = s.dout + row * padded,
                       .ldb = padded,
                       .c = s.dv + key * padded,
                       .ldc = padded,
                       .rows = kPanel,
                       .vectors = static_cast<int>(vectors),
                       .depth = static_cast<int>(depth),
                       .accumulate = true};
    SmallGemm dk = dv;
    dk.a = s.ds + row * kKeys + key;
    dk.b = s.q + row * padded;
    dk.c = s.dk + key * padded;
    small_gemm(dv);
    small_gemm(dk);
  }
}

// dst[rows, dim] = or += the block in s.dq.
void add_dq(const float* block, std::int64_t rows, std::int64_t dim, bool first, float* dst, std::int64_t stride) {
  const std::int64_t padded = up_to_lanes(dim);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < dim; c += kLanes) {
      const Vec x = load(block + r * padded + c);
      float* to = dst + r * stride + c;
      store_n(to, first ? x : load_n(to, dim - c) + x, dim - c);
    }
  }
}

template <typename T>
void store_rows(const float* src, std::int64_t src_stride, std::int64_t rows, std::int64_t dim, T* dst, std::int64_t stride) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < dim; c += kLanes) {
      store_n(dst + r * stride + c, load_n(src + r * src_stride + c, dim - c), dim - c);
    }
  }
}

// Waits until `done` key blocks have added to the query block. False when another item failed.
bool wait_for_turn(const std::uint32_t* progress, std::uint32_t done, const std::uint32_t* stop) {
  for (int tries = 0; __atomic_load_n(progress, __ATOMIC_ACQUIRE) != done; ++tries) {
    if (__atomic_load_n(stop, __ATOMIC_RELAXED) != 0) return false;
    if (tries < 2000) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    } else {
      sched_yield();
    }
  }
  return true;
}

template <typename T, typename G>
void backward_typed(const AttentionBackwardArgs& args, const AttentionBackwardItem& item) {
  const std::int64_t dim = args.head_dim, padded = up_to_lanes(dim), group = args.heads / args.kv_heads;
  const std::int64_t first_key = item.key_block * kKeys, keys = least(kKeys, args.seq_len - first_key);
  const std::int64_t blocks = (args.seq_len + kQueries - 1) / kQueries, sequence = item.batch * args.seq_len;
  BackwardBuffers s;
  carve_backward(dim, item.scratch, &s);
  const T* k = at<const T>(args.k.data, sequence + first_key, args.k_stride, item.kv_head, dim);
  pack_transposed(k, args.k_stride, keys, dim, s.k);
  pack_rows(k, args.k_stride, keys, kKeys, dim, s.k_rows);
  pack_transposed(at<const T>(args.v.data, sequence + first_key, args.v_stride, item.kv_head, dim), args.v_stride, keys, dim,
                  s.v);
  for (std::int64_t i = 0; i < kKeys * padded; i += kLanes) {
    store(s.dk + i, zero());
    store(s.dv + i, zero());
  }

  // Query blocks that see the key block: from the diagonal to the last query whose window reaches its last key.
  const std::int64_t last_query =
      args.window > 0 ? least(args.seq_len - 1, first_key + keys - 1 + args.window - 1) : args.seq_len - 1;
  for (std::int64_t g = 0; g < group; ++g) {
    const std::int64_t head = item.kv_head * group + g;
    const float* lse = args.lse + (item.batch * args.heads + head) * args.seq_len;
    const float* delta = item.delta + (item.batch * args.heads + head) * args.seq_len;
    for (std::int64_t block = item.key_block; block <= last_query / kQueries; ++block) {
      const std::int64_t query = block * kQueries, queries = least(kQueries, args.seq_len - query);
      pack_rows(at<const T>(args.q.data, sequence + query, args.q_stride, head, dim), args.q_stride, queries, queries, dim,
                s.q);
      pack_rows(at<const T>(args.dout.data, sequence + query, args.dout_stride, head, dim), args.dout_stride, queries, queries,
                dim, s.dout);
      backward_pair(args, s, query, queries, first_key, lse + query, delta + query);

      const std::int64_t first_block = args.window > 0 ? most(0, query - args.window + 1) / kKeys : 0;
      std::uint32_t* progress = item.progress == nullptr ? nullptr : item.progress + g * blocks + block;
      const auto turn = static_cast<std::uint32_t>(item.key_block - first_block);
      if (progress != nullptr && !wait_for_turn(progress, turn, item.stop)) return;
      G* dq = at<G>(args.dq.data, sequence + query, args.dq_stride, head, dim);
      if (item.dq_sum == nullptr) {
        add_dq(s.dq, queries, dim, turn == 0, at<float>(args.dq.data, sequence + query, args.dq_stride, head, dim),
               args.dq_stride);
      } else {
        float* sums = item.dq_sum + (g * args.seq_len + query) * dim;
        add_dq(s.dq, queries, dim, turn == 0, sums, dim);
        if (block == item.key_block) store_rows(sums, dim, queries, dim, dq, args.dq_stride);  // the diagonal comes last
      }
      if (progress != nullptr) __atomic_store_n(progress, turn + 1, __ATOMIC_RELEASE);
    }
  }
  store_rows(s.dk, padded, keys, dim, at<G>(args.dk.data, sequence + first_key, args.dk_stride, item.kv_head, dim),
             args.dk_stride);
  store_rows(s.dv, padded, keys, dim, at<G>(args.dv.data, sequence + first_key, args.dv_stride, item.kv_head, dim),
             args.dv_stride);
}

}  // namespace

std::int64_t attention_backward_scratch(std::int64_t head_dim) {
  BackwardBuffers unused;
  float none = 0;
  return carve_backward(head_dim, &none, &unused);
}

void attention_delta(const AttentionBackwardArgs& args, std::int64_t batch, std::int64_t head, float* delta) {
  const std::int64_t token = batch * args.seq_len, dim = args.head_dim;
  with_storage(args.out.dtype, [&](auto t) {
    using T = decltype(t);
    delta_typed(at<const T>(args.out.data, token, args.out_stride, head, dim), args.out_stride,
                at<const T>(args.dout.data, token, args.dout_stride, head, dim), args.dout_stride, args.seq_len, dim, delta);
  });
}

void attention_backward(const AttentionBackwardArgs& args, const AttentionBackwardItem& item) {
  with_storage(args.q.dtype, [&](auto t) {
    with_storage(args.dq.dtype, [&](auto g) { backward_typed<decltype(t), decltype(g)>(args, item); });
  });
}

}  // namespace spipe::cpu::SPIPE_ISA
