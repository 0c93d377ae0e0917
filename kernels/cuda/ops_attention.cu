// Plain attention, forward: blockwise online softmax in fp32, no tensor cores. For head sizes and types that the fast kernels
// do not take, and for the emulator.
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/cuda_ops.cuh"
#include "kernels/cuda/flash.cuh"

namespace spipe::cuda {
namespace {

// A block takes 16 queries of one head and goes over the visible keys, 32 at a time, ascending. Thread (query, j) has keys j
// and j + 16 of a tile, then elements j, j + 16, ... of the output, which lies in dynamic shared memory [16][head_dim]. 4
// head_dim FLOPs a visible pair; q and out once, k and v once for every 16 queries.
__global__ void __launch_bounds__(kAttentionThreads)
    attention_forward_kernel(const AttentionForwardArgs args, std::int64_t query_tiles) {
  __shared__ float rows[kRows][kChunk + 1], columns[kColumns][kChunk + 1], p[kRows][kColumns + 1];
  auto* sums = reinterpret_cast<float*>(spipe_dynamic_shared);
  const std::int64_t dim = args.head_dim, tile = blockIdx.x % query_tiles, batch_head = blockIdx.x / query_tiles;
  const std::int64_t batch = batch_head / args.heads, head = batch_head % args.heads;
  const std::int64_t kv_head = head / (args.heads / args.kv_heads);
  const Head q{args.q.data, args.q.dtype, batch * args.q_len * args.q_stride + head * dim, args.q_stride};
  const std::int64_t k_batch = args.kv_batch_stride != 0 ? args.kv_batch_stride : args.kv_len * args.k_stride;
  const std::int64_t v_batch = args.kv_batch_stride != 0 ? args.kv_batch_stride : args.kv_len * args.v_stride;
  const Head k{args.k.data, args.k.dtype, batch * k_batch + kv_head * dim, args.k_stride};
  const Head v{args.v.data, args.v.dtype, batch * v_batch + kv_head * dim, args.v_stride};
  const std::int64_t q0 = tile * kRows, offset = args.kv_len - args.q_len;
  const int row = static_cast<int>(threadIdx.x) / 16, j = static_cast<int>(threadIdx.x) % 16;
  const std::int64_t query = q0 + row, position = query + offset;
  const std::int64_t last_query = q0 + kRows < args.q_len ? q0 + kRows - 1 : args.q_len - 1, last_key = last_query + offset;
  const std::int64_t first_key = args.window > 0 && q0 + offset >= args.window ? q0 + offset - args.window + 1 : 0;
  for (std::int64_t d = j; d < dim; d += 16) sums[row * dim + d] = 0;

  const float kNone = __uint_as_float(0xff800000U);  // -inf
  float largest = kNone, total = 0;                  // the same in the 16 threads of a query
  for (std::int64_t key0 = first_key / kColumns * kColumns; key0 <= last_key; key0 += kColumns) {
    float score[kOwn] = {};
    for (std::int64_t d0 = 0; d0 < dim; d0 += kChunk) {
      load_tile(rows, q, q0, args.q_len, d0, dim);
      load_tile(columns, k, key0, args.kv_len, d0, dim);
      __syncthreads();
      for (int d = 0; d < kChunk; ++d) {
        for (int o = 0; o < kOwn; ++o) score[o] = __fmaf_rn(rows[row][d], columns[j + 16 * o][d], score[o]);
      }
      __syncthreads();
    }
    float top = largest;
    for (int o = 0; o < kOwn; ++o) {
      const bool visible = query < args.q_len && sees(position, key0 + j + 16 * o, args.window);
      score[o] = visible ? score[o] * args.scale : kNone;
      top = fmaxf(top, score[o]);
    }
    top = row_max(top);
    const bool nothing = top == kNone;  // no key so far: exp(-inf - -inf) would be NaN
    const float rescale = nothing ? 1.0F : expf(largest - top);
    float sum = 0;
    for (int o = 0; o < kOwn; ++o) {
      const float e = nothing ? 0.0F : expf(score[o] - top);
      p[row][j + 16 * o] = e;
      sum += e;
    }
    total = total * rescale + row_sum(sum);
    largest = top;
    for (std::int64_t d0 = 0; d0 < dim; d0 += kChunk) {
      load_tile(columns, v, key0, args.kv_len, d0, dim);
      __syncthreads();
      for (std::int64_t d = d0 + j; d < d0 + kChunk && d < dim; d += 16) {
        float x = sums[row * dim + d] * rescale;
        for (int key = 0; key < kColumns; ++key) x = __fmaf_rn(p[row][key], columns[key][d - d0], x);
        sums[row * dim + d] = x;
      }
      __syncthreads();
    }
  }
  if (query >= args.q_len) return;
  const std::int64_t out = (batch * args.q_len + query) * args.out_stride + head * dim;
  for (std::int64_t d = j; d < dim; d += 16) {
    store_one(args.out.data, args.out.dtype, out + d, __fdiv_rn(sums[row * dim + d], total));
  }
  if (j == 0) args.lse[batch_head * args.q_len + query] = largest + logf(total);
}

}  // namespace

void check_attention(std::int64_t heads, std::int64_t kv_heads, std::int64_t head_dim, std::int64_t window, float scale) {
  SPIPE_CHECK(head_dim > 0 && kv_heads > 0 && heads % kv_heads == 0, "attention: heads are a multiple of kv_heads");
  SPIPE_CHECK(head_dim <= kMaxHeadDim, "attention: head_dim is at most 256");
  SPIPE_CHECK(scale > 0 && window >= 0, "attention: scale is positive, window is not negative");
}

void default_stride(std::int64_t& stride, std::int64_t packed) {
  if (stride == 0) stride = packed;
  SPIPE_CHECK(stride >= packed, "attention: a token's heads are longer than the distance to the next token");
}

void CudaOps::attention_forward(StreamHandle* stream, const AttentionForwardArgs& given) {
  AttentionForwardArgs args = given;
  if (args.batch == 0 || args.q_len == 0) return;
  check_attention(args.heads, args.kv_heads, args.head_dim, args.window, args.scale);
  SPIPE_CHECK(args.q_len <= args.kv_len, "attention: every query sees its own key");
  SPIPE_CHECK(args.q.dtype == args.k.dtype && args.q.dtype == args.v.dtype && is_storage(args.q.dtype),
              "attention: q, k and v have one type");
  SPIPE_CHECK(is_storage(args.out.dtype), "attention: out is fp32, bf16 or fp16");
  for (std::int64_t* stride : {&args.q_stride, &args.out_stride}) default_stride(*stride, args.heads * args.head_dim);
  for (std::int64_t* stride : {&args.k_stride, &args.v_stride}) default_stride(*stride, args.kv_heads * args.head_dim);
  const DType type = args.q.dtype;
  if (tensor_cores_ && takes_flash(args.head_dim, type) && args.out.dtype == type && args.kv_batch_stride % 8 == 0 &&
      is_flash_operand(args.q, type, args.q_stride) && is_flash_operand(args.k, type, args.k_stride) &&
      is_flash_operand(args.v, type, args.v_stride)) {
    return flash_forward(stream, args);
  }
  const std::int64_t tiles = blocks_of(args.q_len, kRows);
  launch(stream,
         {.blocks_x = tiles * args.batch * args.heads,
          .threads = kAttentionThreads,
          .shared_bytes = static_cast<std::size_t>(kRows * args.head_dim) * sizeof(float)},
         attention_forward_kernel, args, tiles);
}

}  // namespace spipe::cuda
