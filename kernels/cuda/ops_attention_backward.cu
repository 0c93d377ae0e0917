// Plain attention, backward: scores are computed again from q, k and the saved log-sum-exp, in one kernel for dq and one for dk
// and dv, so that every sum has one owner and a fixed order. With P the probabilities, dP = dout V^T and
// D = rowsum(dout * out) = rowsum(P dP): dS = scale P (dP - D), dQ = dS K, dK = dS^T Q, dV = P^T dout.
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/cuda_ops.cuh"
#include "kernels/cuda/flash.cuh"

namespace spipe::cuda {
namespace {

struct Heads {
  Head q, k, v, out, dout;
  __device__ __forceinline__ Heads(const AttentionBackwardArgs& a, std::int64_t batch, std::int64_t head)
      : q{a.q.data, a.q.dtype, at(a, batch, head, a.q_stride), a.q_stride},
        k{a.k.data, a.k.dtype, at(a, batch, head / (a.heads / a.kv_heads), a.k_stride), a.k_stride},
        v{a.v.data, a.v.dtype, at(a, batch, head / (a.heads / a.kv_heads), a.v_stride), a.v_stride},
        out{a.out.data, a.out.dtype, at(a, batch, head, a.out_stride), a.out_stride},
        dout{a.dout.data, a.dout.dtype, at(a, batch, head, a.dout_stride), a.dout_stride} {}
  static __device__ __forceinline__ std::int64_t at(const AttentionBackwardArgs& a, std::int64_t batch, std::int64_t head,
                                                    std::int64_t stride) {
    return batch * a.seq_len * stride + head * a.head_dim;
  }
};

// dout * out of one token, elements `first`, first + step, ...
__device__ __forceinline__ float partial_delta(const Heads& heads, std::int64_t token, std::int64_t dim, int first, int step) {
  float sum = 0;
  for (std::int64_t d = first; d < dim; d += step) {
    sum = __fmaf_rn(load_one(heads.dout.data, heads.dout.type, heads.dout.first + token * heads.dout.stride + d),
                    load_one(heads.out.data, heads.out.type, heads.out.first + token * heads.out.stride + d), sum);
  }
  return sum;
}

// A block takes 16 queries of a head; keys ascending, 32 at a time. Thread (query, j) as in the forward kernel; dq lies in
// dynamic shared memory [16][head_dim]. 6 head_dim FLOPs a visible pair; k twice and v once for every 16 queries.
__global__ void __launch_bounds__(kAttentionThreads)
    attention_dq_kernel(const AttentionBackwardArgs args, std::int64_t query_tiles) {
  __shared__ float q_tile[kRows][kChunk + 1], k_tile[kColumns][kChunk + 1];
  __shared__ float dout_tile[kRows][kChunk + 1], v_tile[kColumns][kChunk + 1], ds[kRows][kColumns + 1];
  auto* dq = reinterpret_cast<float*>(spipe_dynamic_shared);
  const std::int64_t dim = args.head_dim, length = args.seq_len, batch_head = blockIdx.x / query_tiles;
  const Heads heads(args, batch_head / args.heads, batch_head % args.heads);
  const std::int64_t q0 = blockIdx.x % query_tiles * kRows;
  const int row = static_cast<int>(threadIdx.x) / 16, j = static_cast<int>(threadIdx.x) % 16;
  const std::int64_t query = q0 + row, last_key = q0 + kRows < length ? q0 + kRows - 1 : length - 1;
  const bool there = query < length;
  const float delta = row_sum(there ? partial_delta(heads, query, dim, j, 16) : 0.0F);
  const float lse = there ? args.lse[batch_head * length + query] : 0.0F;
  for (std::int64_t d = j; d < dim; d += 16) dq[row * dim + d] = 0;
  const std::int64_t first_key = args.window > 0 && q0 >= args.window ? q0 - args.window + 1 : 0;
  for (std::int64_t key0 = first_key / kColumns * kColumns; key0 <= last_key; key0 += kColumns) {
    float score[kOwn] = {}, dp[kOwn] = {};
    for (std::int64_t d0 = 0; d0 < dim; d0 += kChunk) {
      load_tile(q_tile, heads.q, q0, length, d0, dim);
      load_tile(dout_tile, heads.dout, q0, length, d0, dim);
      load_tile(k_tile, heads.k, key0, length, d0, dim);
      load_tile(v_tile, heads.v, key0, length, d0, dim);
      __syncthreads();
      for (int d = 0; d < kChunk; ++d) {
        for (int o = 0; o < kOwn; ++o) {
          score[o] = __fmaf_rn(q_tile[row][d], k_tile[j + 16 * o][d], score[o]);
          dp[o] = __fmaf_rn(dout_tile[row][d], v_tile[j + 16 * o][d], dp[o]);
        }
      }
      __syncthreads();
    }
    for (int o = 0; o < kOwn; ++o) {
      const bool visible = there && sees(query, key0 + j + 16 * o, args.window);
      const float p = visible ? expf(score[o] * args.scale - lse) : 0.0F;
      ds[row][j + 16 * o] = p * (dp[o] - delta) * args.scale;
    }
    for (std::int64_t d0 = 0; d0 < dim; d0 += kChunk) {
      load_tile(k_tile, heads.k, key0, length, d0, dim);
      __syncthreads();
      for (std::int64_t d = d0 + j; d < d0 + kChunk && d < dim; d += 16) {
        float x = dq[row * dim + d];
        for (int key = 0; key < kColumns; ++key) x = __fmaf_rn(ds[row][key], k_tile[key][d - d0], x);
        dq[row * dim + d] = x;
      }
      __syncthreads();
    }
  }
  if (!there) return;
  const std::int64_t at = Heads::at(args, batch_head / args.heads, batch_head % args.heads, args.dq_stride);
  for (std::int64_t d = j; d < dim; d += 16) {
    store_one(args.dq.data, args.dq.dtype, at + query * args.dq_stride + d, dq[row * dim + d]);
  }
}

// A block takes 16 keys of a KV head and goes over the heads that use it, ascending, and their queries that see one of the
// keys, ascending, 32 at a time. Thread (key, j) has queries j and j + 16; dk and dv lie in dynamic shared memory
// [2][16][head_dim]. 8 head_dim FLOPs a visible pair, and 2 head_dim a query for D; q and dout twice, out once for every 16
// keys.
__global__ void __launch_bounds__(kAttentionThreads)
    attention_dkv_kernel(const AttentionBackwardArgs args, std::int64_t key_tiles) {
  __shared__ float k_tile[kRows][kChunk + 1], q_tile[kColumns][kChunk + 1];
  __shared__ float v_tile[kRows][kChunk + 1], dout_tile[kColumns][kChunk + 1];
  __shared__ float p[kRows][kColumns + 1], ds[kRows][kColumns + 1], deltas[kColumns], lses[kColumns];
  const std::int64_t dim = args.head_dim, length = args.seq_len, group = args.heads / args.kv_heads;
  auto* dk = reinterpret_cast<float*>(spipe_dynamic_shared);
  float* dv = dk + kRows * dim;
  const std::int64_t batch_head = blockIdx.x / key_tiles, batch = batch_head / args.kv_heads,
                     kv_head = batch_head % args.kv_heads;
  const std::int64_t key0 = blockIdx.x % key_tiles * kRows;
  const int row = static_cast<int>(threadIdx.x) / 16, j = static_cast<int>(threadIdx.x) % 16;
  const std::int64_t key = key0 + row;
  for (std::int64_t d = j; d < dim; d += 16) dk[row * dim + d] = dv[row * dim + d] = 0;
  std::int64_t last_query = length - 1;
  if (args.window > 0 && key0 + kRows - 1 + args.window - 1 < last_query) last_query = key0 + kRows - 1 + args.window - 1;
  for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const Heads heads(args, batch, head);
    for (std::int64_t q0 = key0 / kColumns * kColumns; q0 <= last_query; q0 += kColumns) {
      const int query_row = static_cast<int>(threadIdx.x) / 8, part = static_cast<int>(threadIdx.x) % 8;
      const std::int64_t own = q0 + query_row;
      float delta = own < length ? partial_delta(heads, own, dim, part, 8) : 0.0F;
      for (int lanes = 4; lanes > 0; lanes /= 2) delta = __fadd_rn(delta, __shfl_xor_sync(kAllLanes, delta, lanes));
      if (part == 0) {
        deltas[query_row] = delta;
        lses[query_row] = own < length ? args.lse[(batch * args.heads + head) * length + own] : 0.0F;
      }
      float score[kOwn] = {}, dp[kOwn] = {};
      for (std::int64_t d0 = 0; d0 < dim; d0 += kChunk) {
        load_tile(k_tile, heads.k, key0, length, d0, dim);
        load_tile(v_tile, heads.v, key0, length, d0, dim);
        load_tile(q_tile, heads.q, q0, length, d0, dim);
        load_tile(dout_tile, heads.dout, q0, length, d0, dim);
        __syncthreads();
        for (int d = 0; d < kChunk; ++d) {
          for (int o = 0; o < kOwn; ++o) {
            score[o] = __fmaf_rn(k_tile[row][d], q_tile[j + 16 * o][d], score[o]);
            dp[o] = __fmaf_rn(v_tile[row][d], dout_tile[j + 16 * o][d], dp[o]);
          }
        }
        __syncthreads();
      }
      for (int o = 0; o < kOwn; ++o) {
        const int column = j + 16 * o;
        const bool visible = key < length && q0 + column < length && sees(q0 + column, key, args.window);
        const float probability = visible ? expf(score[o] * args.scale - lses[column]) : 0.0F;
        p[row][column] = probability;
        ds[row][column] = probability * (dp[o] - deltas[column]) * args.scale;
      }
      for (std::int64_t d0 = 0; d0 < dim; d0 += kChunk) {
        load_tile(q_tile, heads.q, q0, length, d0, dim);
        load_tile(dout_tile, heads.dout, q0, length, d0, dim);
        __syncthreads();
        for (std::int64_t d = d0 + j; d < d0 + kChunk && d < dim; d += 16) {
          float x = dk[row * dim + d], y = dv[row * dim + d];
          for (int query = 0; query < kColumns; ++query) {
            x = __fmaf_rn(ds[row][query], q_tile[query][d - d0], x);
            y = __fmaf_rn(p[row][query], dout_tile[query][d - d0], y);
          }
          dk[row * dim + d] = x;
          dv[row * dim + d] = y;
        }
        __syncthreads();
      }
    }
  }
  if (key >= length) return;
  const std::int64_t dk_at = Heads::at(args, batch, kv_head, args.dk_stride) + key * args.dk_stride;
  const std::int64_t dv_at = Heads::at(args, batch, kv_head, args.dv_stride) + key * args.dv_stride;
  for (std::int64_t d = j; d < dim; d += 16) {
    store_one(args.dk.data, args.dk.dtype, dk_at + d, dk[row * dim + d]);
    store_one(args.dv.data, args.dv.dtype, dv_at + d, dv[row * dim + d]);
  }
}

}  // namespace

void CudaOps::attention_backward(StreamHandle* stream, const AttentionBackwardArgs& given) {
  AttentionBackwardArgs args = given;
  if (args.batch == 0 || args.seq_len == 0) return;
  check_attention(args.heads, args.kv_heads, args.head_dim, args.window, args.scale);
  SPIPE_CHECK(args.lse != nullptr, "attention backward: lse");
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
  if (tensor_cores_ && takes_flash(args.head_dim, type) && grad == type && is_flash_operand(args.q, type, args.q_stride) &&
      is_flash_operand(args.k, type, args.k_stride) && is_flash_operand(args.v, type, args.v_stride) &&
      is_flash_operand(args.dout, type, args.dout_stride) &&
      flash_backward(stream, args, scratch_, static_cast<std::int64_t>(kCudaScratchBytes / sizeof(float)))) {
    return;
  }
  const std::int64_t tiles = blocks_of(args.seq_len, kRows);
  const std::size_t sums = static_cast<std::size_t>(kRows * args.head_dim) * sizeof(float);
  launch(stream, {.blocks_x = tiles * args.batch * args.heads, .threads = kAttentionThreads, .shared_bytes = sums},
         attention_dq_kernel, args, tiles);
  launch(stream, {.blocks_x = tiles * args.batch * args.kv_heads, .threads = kAttentionThreads, .shared_bytes = 2 * sums},
         attention_dkv_kernel, args, tiles);
}

}  // namespace spipe::cuda
