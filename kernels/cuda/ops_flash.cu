// Attention on tensor cores, forward: blockwise online softmax (Milakov and Gimelshein 2018; tiled as in Dao's
// FlashAttention-2, 2023). Probabilities are rounded to the operands' type before they meet v; sums are fp32, in an order that
// the shape decides.
#include "kernels/cuda/flash.cuh"

namespace spipe::cuda {
namespace {

template <int kDim>
inline constexpr int kKeys = kDim > 128 ? 32 : 64;  // of a tile
template <int kDim>
inline constexpr std::size_t kSharedBytes = static_cast<std::size_t>(kFlashRows + 2 * kKeys<kDim>) * kFlashStride<kDim> * 2;

// 4 head_dim FLOPs a visible pair; q and out once, k and v once for every 64 queries.
template <typename T, int kDim>
__global__ void __launch_bounds__(kFlashThreads)
    flash_forward_kernel(const AttentionForwardArgs args, std::int64_t query_tiles, bool pairs) {
  constexpr int kStride = kFlashStride<kDim>, kTile = kKeys<kDim>;
  T* q_tile = reinterpret_cast<T*>(spipe_dynamic_shared);
  T* k_tile = q_tile + kFlashRows * kStride;
  T* v_tile = k_tile + kTile * kStride;
  const std::int64_t dim = args.head_dim, batch_head = blockIdx.x / query_tiles;
  const std::int64_t tile = query_tiles - 1 - blockIdx.x % query_tiles;  // those with the most keys first
  const std::int64_t batch = batch_head / args.heads, head = batch_head % args.heads;
  const std::int64_t kv_head = head / (args.heads / args.kv_heads);
  const std::int64_t k_batch = args.kv_batch_stride != 0 ? args.kv_batch_stride : args.kv_len * args.k_stride;
  const std::int64_t v_batch = args.kv_batch_stride != 0 ? args.kv_batch_stride : args.kv_len * args.v_stride;
  const auto q = flash_head<T>(args.q.data, batch * args.q_len * args.q_stride + head * dim, args.q_stride);
  const auto k = flash_head<T>(args.k.data, batch * k_batch + kv_head * dim, args.k_stride);
  const auto v = flash_head<T>(args.v.data, batch * v_batch + kv_head * dim, args.v_stride);

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const std::int64_t q0 = tile * kFlashRows, offset = args.kv_len - args.q_len;
  const std::int64_t last_query = q0 + kFlashRows < args.q_len ? q0 + kFlashRows - 1 : args.q_len - 1;
  const std::int64_t last_key = last_query + offset;
  const std::int64_t first_key = args.window > 0 && q0 + offset >= args.window ? q0 + offset - args.window + 1 : 0;
  const float scale = args.scale * kLog2E, kNone = __uint_as_float(0xff800000U);  // -inf

  load_flash_tile<kFlashRows, kDim>(q_tile, q, q0, args.q_len, dim);
  float sum[kDim / 8][4] = {}, largest[2] = {kNone, kNone}, total[2] = {};
  for (std::int64_t key0 = first_key / kTile * kTile; key0 <= last_key; key0 += kTile) {
    load_flash_tile<kTile, kDim>(k_tile, k, key0, args.kv_len, dim);
    load_flash_tile<kTile, kDim>(v_tile, v, key0, args.kv_len, dim);
    __syncthreads();
    float s[kTile / 8][4];
    multiply_rows<kTile, kDim>(s, q_tile, 16 * warp, k_tile);
    float top[2] = {largest[0], largest[1]};
    SPIPE_UNROLL
    for (int j = 0; j < kTile / 8; ++j) {
      SPIPE_UNROLL
      for (int e = 0; e < 4; ++e) {
        const std::int64_t query = q0 + 16 * warp + g + e / 2 * 8, key = key0 + 8 * j + 2 * t + e % 2;
        s[j][e] = sees(query + offset, key, args.window) ? s[j][e] * scale : kNone;
        top[e / 2] = fmaxf(top[e / 2], s[j][e]);
      }
    }
    SPIPE_UNROLL
    for (int half = 0; half < 2; ++half) {
      top[half] = quad_max(top[half]);
      const float base = top[half] == kNone ? 0.0F : top[half];  // no key so far: exp2(-inf - 0) is 0
      const float rescale = exp2f(largest[half] - base);
      largest[half] = top[half];
      float row = 0;
      SPIPE_UNROLL
      for (int j = 0; j < kTile / 8; ++j) {
        SPIPE_UNROLL
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          s[j][e] = exp2f(s[j][e] - base);
          row += s[j][e];
        }
      }
      total[half] = total[half] * rescale + row;
      SPIPE_UNROLL
      for (int d = 0; d < kDim / 8; ++d) {
        sum[d][2 * half] *= rescale;
        sum[d][2 * half + 1] *= rescale;
      }
    }
    accumulate_rows<kTile, kDim>(sum, s, v_tile);
    __syncthreads();
  }
  SPIPE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const std::int64_t query = q0 + 16 * warp + g + 8 * half;
    const float all = quad_sum(total[half]), inverse = __fdiv_rn(1.0F, all);
    if (query >= args.q_len) continue;
    const std::int64_t at = (batch * args.q_len + query) * args.out_stride + head * dim;
    SPIPE_UNROLL
    for (int d = 0; d < kDim / 8; ++d) {
      store_pair<T>(args.out.data, at, 8 * d + 2 * t, dim, pairs, sum[d][2 * half] * inverse, sum[d][2 * half + 1] * inverse);
    }
    if (t == 0) args.lse[batch_head * args.q_len + query] = largest[half] * kLn2 + logf(all);
  }
}

}  // namespace

void flash_forward(StreamHandle* stream, const AttentionForwardArgs& args) {
  const std::int64_t tiles = blocks_of(args.q_len, kFlashRows);
  const bool pairs = reinterpret_cast<std::uintptr_t>(args.out.data) % 4 == 0 && args.out_stride % 2 == 0;
  with_flash_form(args.q.dtype, args.head_dim, [&](auto t, auto dim) {
    using T = decltype(t);
    launch(stream, {.blocks_x = tiles * args.batch * args.heads, .threads = kFlashThreads, .shared_bytes = kSharedBytes<dim()>},
           flash_forward_kernel<T, dim()>, args, tiles, pairs);
  });
}

}  // namespace spipe::cuda
