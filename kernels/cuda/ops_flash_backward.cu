// Attention on tensor cores, backward, in the manner of ops_attention_backward.cu: one kernel for dq, one for dk and dv, each
// sum with one owner and a fixed order. Probabilities and the scores' gradients are rounded to the operands' type before they
// meet q, k and dout; sums are fp32.
#include "kernels/cuda/flash.cuh"

namespace spipe::cuda {
namespace {

template <int kDim>
inline constexpr int kKeys = kDim > 128 ? 32 : 64;  // of a tile of the kernel for dq
inline constexpr int kQueries = 32;                 // of a tile of the kernel for dk and dv
template <int kDim>
inline constexpr std::size_t kTileBytes = static_cast<std::size_t>(kFlashStride<kDim>) * 2;  // of a row

template <typename T>
struct FlashHeads {
  FlashHead<T> q, k, v, out, dout;
  __device__ __forceinline__ FlashHeads(const AttentionBackwardArgs& a, std::int64_t batch, std::int64_t head)
      : q(of(a, a.q.data, batch, head, a.q_stride)),
        k(of(a, a.k.data, batch, head / (a.heads / a.kv_heads), a.k_stride)),
        v(of(a, a.v.data, batch, head / (a.heads / a.kv_heads), a.v_stride)),
        out(of(a, a.out.data, batch, head, a.out_stride)),
        dout(of(a, a.dout.data, batch, head, a.dout_stride)) {}
  static __device__ __forceinline__ FlashHead<T> of(const AttentionBackwardArgs& a, const void* data, std::int64_t batch,
                                                    std::int64_t head, std::int64_t stride) {
    return flash_head<T>(data, batch * a.seq_len * stride + head * a.head_dim, stride);
  }
};

// deltas[head of the slice, query] = dout * out. A warp takes a query. Bytes: out and dout once; 2 head_dim FLOPs a query.
template <typename T>
__global__ void __launch_bounds__(kFlashThreads)
    delta_kernel(const AttentionBackwardArgs args, std::int64_t first_head, std::int64_t rows, float* deltas) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kFlashWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const std::int64_t batch_head = first_head + row / args.seq_len, query = row % args.seq_len;
  const FlashHeads<T> heads(args, batch_head / args.heads, batch_head % args.heads);
  const T* out = heads.out.data + query * heads.out.stride;
  const T* dout = heads.dout.data + query * heads.dout.stride;
  float sum = 0;
  for (std::int64_t d = threadIdx.x % 32; d < args.head_dim; d += 32) sum = __fmaf_rn(widen(dout[d]), widen(out[d]), sum);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) deltas[row] = sum;
}

// A block takes 64 queries of a head of the slice, keys ascending. 6 head_dim FLOPs a visible pair; q, dout and dq once, k and
// v once for every 64 queries.
template <typename T, int kDim>
__global__ void __launch_bounds__(kFlashThreads) flash_dq_kernel(const AttentionBackwardArgs args, std::int64_t first_head,
                                                                 std::int64_t tiles, const float* deltas, bool pairs) {
  constexpr int kStride = kFlashStride<kDim>, kTile = kKeys<kDim>;
  T* q_tile = reinterpret_cast<T*>(spipe_dynamic_shared);
  T* dout_tile = q_tile + kFlashRows * kStride;
  T* k_tile = dout_tile + kFlashRows * kStride;
  T* v_tile = k_tile + kTile * kStride;
  const std::int64_t dim = args.head_dim, length = args.seq_len, of_slice = blockIdx.x / tiles;
  const std::int64_t batch_head = first_head + of_slice, batch = batch_head / args.heads, head = batch_head % args.heads;
  const FlashHeads<T> heads(args, batch, head);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const std::int64_t q0 = (tiles - 1 - blockIdx.x % tiles) * kFlashRows;
  const std::int64_t last_key = q0 + kFlashRows < length ? q0 + kFlashRows - 1 : length - 1;
  const std::int64_t first_key = args.window > 0 && q0 >= args.window ? q0 - args.window + 1 : 0;
  const float scale = args.scale * kLog2E;
  float lse[2], delta[2];
  for (int half = 0; half < 2; ++half) {
    const std::int64_t query = q0 + 16 * warp + g + 8 * half;
    const bool there = query < length;
    lse[half] = there ? args.lse[batch_head * length + query] * kLog2E : 0.0F;
    delta[half] = there ? deltas[of_slice * length + query] : 0.0F;
  }
  load_flash_tile<kFlashRows, kDim>(q_tile, heads.q, q0, length, dim);
  load_flash_tile<kFlashRows, kDim>(dout_tile, heads.dout, q0, length, dim);
  float dq[kDim / 8][4] = {};
  for (std::int64_t key0 = first_key / kTile * kTile; key0 <= last_key; key0 += kTile) {
    load_flash_tile<kTile, kDim>(k_tile, heads.k, key0, length, dim);
    load_flash_tile<kTile, kDim>(v_tile, heads.v, key0, length, dim);
    __syncthreads();
    float s[kTile / 8][4], dp[kTile / 8][4];
    multiply_rows<kTile, kDim>(s, q_tile, 16 * warp, k_tile);
    multiply_rows<kTile, kDim>(dp, dout_tile, 16 * warp, v_tile);
    SPIPE_UNROLL
    for (int j = 0; j < kTile / 8; ++j) {
      SPIPE_UNROLL
      for (int e = 0; e < 4; ++e) {
        const std::int64_t query = q0 + 16 * warp + g + e / 2 * 8, key = key0 + 8 * j + 2 * t + e % 2;
        const bool visible = query < length && sees(query, key, args.window);
        const float p = visible ? exp2f(s[j][e] * scale - lse[e / 2]) : 0.0F;
        s[j][e] = p * (dp[j][e] - delta[e / 2]) * args.scale;
      }
    }
    accumulate_rows<kTile, kDim>(dq, s, k_tile);
    __syncthreads();
  }
  SPIPE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const std::int64_t query = q0 + 16 * warp + g + 8 * half;
    if (query >= length) continue;
    const std::int64_t at = (batch * length + query) * args.dq_stride + head * dim;
    SPIPE_UNROLL
    for (int d = 0; d < kDim / 8; ++d) {
      store_pair<T>(args.dq.data, at, 8 * d + 2 * t, dim, pairs, dq[d][2 * half], dq[d][2 * half + 1]);
    }
  }
}

// A block takes 64 keys of a KV head of the slice and goes over the heads that use it, ascending, and their queries that see
// one of the keys, ascending. 8 head_dim FLOPs a visible pair; k, v, dk and dv once, q and dout once for every 64 keys.
template <typename T, int kDim>
__global__ void __launch_bounds__(kFlashThreads) flash_dkv_kernel(const AttentionBackwardArgs args, std::int64_t first_head,
                                                                  std::int64_t tiles, const float* deltas, bool pairs) {
  constexpr int kStride = kFlashStride<kDim>;
  T* k_tile = reinterpret_cast<T*>(spipe_dynamic_shared);
  T* v_tile = k_tile + kFlashRows * kStride;
  T* q_tile = v_tile + kFlashRows * kStride;
  T* dout_tile = q_tile + kQueries * kStride;
  const std::int64_t dim = args.head_dim, length = args.seq_len, group = args.heads / args.kv_heads;
  const std::int64_t batch_kv = first_head / group + blockIdx.x / tiles, batch = batch_kv / args.kv_heads;
  const std::int64_t kv_head = batch_kv % args.kv_heads, key0 = blockIdx.x % tiles * kFlashRows;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  std::int64_t last_query = length - 1;
  if (args.window > 0 && key0 + kFlashRows - 2 + args.window < last_query) last_query = key0 + kFlashRows - 2 + args.window;
  const float scale = args.scale * kLog2E;
  const FlashHeads<T> first(args, batch, kv_head * group);
  load_flash_tile<kFlashRows, kDim>(k_tile, first.k, key0, length, dim);
  load_flash_tile<kFlashRows, kDim>(v_tile, first.v, key0, length, dim);
  float dk[kDim / 8][4] = {}, dv[kDim / 8][4] = {};
  for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const FlashHeads<T> heads(args, batch, head);
    const std::int64_t batch_head = batch * args.heads + head;
    for (std::int64_t q0 = key0; q0 <= last_query; q0 += kQueries) {
      load_flash_tile<kQueries, kDim>(q_tile, heads.q, q0, length, dim);
      load_flash_tile<kQueries, kDim>(dout_tile, heads.dout, q0, length, dim);
      __syncthreads();
      float p[kQueries / 8][4], ds[kQueries / 8][4];
      multiply_rows<kQueries, kDim>(p, k_tile, 16 * warp, q_tile);
      multiply_rows<kQueries, kDim>(ds, v_tile, 16 * warp, dout_tile);
      SPIPE_UNROLL
      for (int j = 0; j < kQueries / 8; ++j) {
        SPIPE_UNROLL
        for (int e = 0; e < 4; ++e) {
          const std::int64_t key = key0 + 16 * warp + g + e / 2 * 8, query = q0 + 8 * j + 2 * t + e % 2;
          const bool visible = query < length && sees(query, key, args.window);
          const float lse = visible ? args.lse[batch_head * length + query] * kLog2E : 0.0F;
          const float delta = visible ? deltas[(batch_head - first_head) * length + query] : 0.0F;
          p[j][e] = visible ? exp2f(p[j][e] * scale - lse) : 0.0F;
          ds[j][e] = p[j][e] * (ds[j][e] - delta) * args.scale;
        }
      }
      accumulate_rows<kQueries, kDim>(dv, p, dout_tile);
      accumulate_rows<kQueries, kDim>(dk, ds, q_tile);
      __syncthreads();
    }
  }
  SPIPE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const std::int64_t key = key0 + 16 * warp + g + 8 * half;
    if (key >= length) continue;
    const std::int64_t dk_at = (batch * length + key) * args.dk_stride + kv_head * dim;
    const std::int64_t dv_at = (batch * length + key) * args.dv_stride + kv_head * dim;
    SPIPE_UNROLL
    for (int d = 0; d < kDim / 8; ++d) {
      store_pair<T>(args.dk.data, dk_at, 8 * d + 2 * t, dim, pairs, dk[d][2 * half], dk[d][2 * half + 1]);
      store_pair<T>(args.dv.data, dv_at, 8 * d + 2 * t, dim, pairs, dv[d][2 * half], dv[d][2 * half + 1]);
    }
  }
}

bool takes_pairs(const Ptr& p, std::int64_t stride) {
  return reinterpret_cast<std::uintptr_t>(p.data) % 4 == 0 && stride % 2 == 0;
}

}  // namespace

// Slices of whole groups of heads, as many as the scratch holds deltas for.
bool flash_backward(StreamHandle* stream, const AttentionBackwardArgs& args, float* deltas, std::int64_t delta_count) {
  const std::int64_t group = args.heads / args.kv_heads, all = args.batch * args.heads;
  const std::int64_t groups = delta_count / (args.seq_len * group);
  if (groups == 0) return false;
  const std::int64_t tiles = blocks_of(args.seq_len, kFlashRows);
  const bool dq_pairs = takes_pairs(args.dq, args.dq_stride);
  const bool dkv_pairs = takes_pairs(args.dk, args.dk_stride) && takes_pairs(args.dv, args.dv_stride);
  for (std::int64_t first = 0; first < all; first += groups * group) {
    const std::int64_t heads = first + groups * group < all ? groups * group : all - first;
    with_flash_form(args.q.dtype, args.head_dim, [&](auto t, auto dim) {
      using T = decltype(t);
      constexpr std::size_t row = kTileBytes<dim()>;
      launch(stream, {.blocks_x = blocks_of(heads * args.seq_len, kFlashWarps), .threads = kFlashThreads}, delta_kernel<T>,
             args, first, heads * args.seq_len, deltas);
      launch(stream, {.blocks_x = tiles * heads, .threads = kFlashThreads, .shared_bytes = 2 * (kFlashRows + kKeys<dim()>)*row},
             flash_dq_kernel<T, dim()>, args, first, tiles, static_cast<const float*>(deltas), dq_pairs);
      launch(stream,
             {.blocks_x = tiles * (heads / group), .threads = kFlashThreads, .shared_bytes = 2 * (kFlashRows + kQueries) * row},
             flash_dkv_kernel<T, dim()>, args, first, tiles, static_cast<const float*>(deltas), dkv_pairs);
    });
  }
  return true;
}

}  // namespace spipe::cuda
