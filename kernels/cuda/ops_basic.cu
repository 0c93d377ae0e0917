// Dropout, add, convert, zero: one read and one write of every element.
#include "kernels/cuda/cuda_ops.cuh"
#include "kernels/cuda/device.cuh"
#include "spipe/base/random.h"

namespace spipe::cuda {
namespace {

constexpr int kRun = 8;  // elements of a thread
constexpr unsigned kThreads = 256;

__device__ __forceinline__ std::int64_t run_start(int run) {
  return (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * run;
}

// Bytes an element: both operands read, the result written (6 for bf16); 1 FLOP.
__global__ void __launch_bounds__(kThreads) add_kernel(const AddArgs args, bool vector) {
  const std::int64_t i = run_start(kRun), count = args.elements;
  Floats<kRun> x = load_as<kRun>(args.a.data, args.a.dtype, i, count, vector);
  const Floats<kRun> y = load_as<kRun>(args.b.data, args.b.dtype, i, count, vector);
  for (int j = 0; j < kRun; ++j) x.v[j] = __fadd_rn(x.v[j], y.v[j]);
  store_as<kRun>(args.out.data, args.out.dtype, i, count, vector, x);
}

// Bytes an element: both sizes.
__global__ void __launch_bounds__(kThreads) convert_kernel(const ConvertArgs args, bool vector) {
  const std::int64_t i = run_start(kRun), count = args.elements;
  Floats<kRun> x = load_as<kRun>(args.src.data, args.src.dtype, i, count, vector);
  if (args.half_up) {  // rounded here, so that the store has nothing left to round
    for (int j = 0; j < kRun; ++j) {
      Bf16 copy;
      round_copy(copy, x.v[j]);
      x.v[j] = widen(copy);
    }
  }
  store_as<kRun>(args.dst.data, args.dst.dtype, i, count, vector, x);
}

struct Words {
  unsigned w[4];
};
// As spipe::philox4x32 (base/random.h), which the host has.
__device__ __forceinline__ Words philox(Words counter, unsigned key_lo, unsigned key_hi) {
  for (int round = 0; round < 10; ++round) {
    const unsigned c0 = counter.w[0], c2 = counter.w[2];
    counter = {{__umulhi(0xCD9E8D57U, c2) ^ counter.w[1] ^ key_lo, 0xCD9E8D57U * c2,
                __umulhi(0xD2511F53U, c0) ^ counter.w[3] ^ key_hi, 0xD2511F53U * c0}};
    key_lo += 0x9E3779B9U;
    key_hi += 0xBB67AE85U;
  }
  return counter;
}

// A thread takes the four elements of one counter. Bytes an element: read and write; about 30 integer operations.
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(const DropoutArgs args, PhiloxKey key, float factor, std::int64_t counters, bool vector) {
  const std::int64_t index = run_start(1);
  if (index >= args.sequences * counters) return;
  const std::int64_t sequence = index / counters, counter = index % counters, length = args.elements_per_sequence;
  const auto global_sequence = static_cast<unsigned>(args.first_sequence + static_cast<std::uint64_t>(sequence));
  const Words words =
      philox({{static_cast<unsigned>(counter), global_sequence, static_cast<unsigned>(args.step), args.site}}, key.lo, key.hi);
  const std::int64_t first = sequence * length;  // of the sequence
  Floats<4> x = load_as<4>(args.x.data, args.x.dtype, first + 4 * counter, first + length, vector);
  for (int j = 0; j < 4; ++j) {
    const bool keep = static_cast<float>(words.w[j] >> 8) * 0x1p-24F >= args.p;
    x.v[j] = keep ? __fmul_rn(x.v[j], factor) : 0.0F;
  }
  store_as<4>(args.y.data, args.y.dtype, first + 4 * counter, first + length, vector, x);
}

}  // namespace

void CudaOps::add(StreamHandle* stream, const AddArgs& args) {
  SPIPE_CHECK(is_storage(args.a.dtype) && is_storage(args.b.dtype) && is_storage(args.out.dtype), "add: fp32, bf16 or fp16");
  SPIPE_CHECK(args.elements >= 0, "add: size");
  if (args.elements == 0) return;
  launch(stream, {.blocks_x = blocks_of(args.elements, kThreads * kRun), .threads = kThreads}, add_kernel, args,
         all_aligned(args.a, args.b, args.out));
}

void CudaOps::convert(StreamHandle* stream, const ConvertArgs& args) {
  SPIPE_CHECK(is_storage(args.src.dtype) && is_storage(args.dst.dtype), "convert: fp32, bf16 or fp16");
  SPIPE_CHECK(!args.half_up || (args.src.dtype == DType::f32 && args.dst.dtype == DType::bf16), "half-up is fp32 to bf16");
  SPIPE_CHECK(args.elements >= 0, "convert: size");
  if (args.elements == 0) return;
  launch(stream, {.blocks_x = blocks_of(args.elements, kThreads * kRun), .threads = kThreads}, convert_kernel, args,
         all_aligned(args.src, args.dst));
}

void CudaOps::zero(StreamHandle* stream, const ZeroArgs& args) {
  SPIPE_CHECK(args.elements >= 0, "zero: size");
  if (args.elements == 0) return;
  check_launch(cudaMemsetAsync(args.dst.data, 0, static_cast<std::size_t>(args.elements) * dtype_size(args.dst.dtype),
                               reinterpret_cast<cudaStream_t>(stream)));
}

void CudaOps::dropout(StreamHandle* stream, const DropoutArgs& args) {
  SPIPE_CHECK(is_storage(args.x.dtype) && args.y.dtype == args.x.dtype, "dropout: one of fp32, bf16, fp16");
  SPIPE_CHECK(args.p >= 0 && args.p < 1, "dropout: 0 <= p < 1");
  SPIPE_CHECK(args.sequences >= 0 && args.elements_per_sequence >= 0, "dropout: size");
  const std::int64_t counters = blocks_of(args.elements_per_sequence, 4);
  SPIPE_CHECK(counters <= 0xffffffffLL, "dropout: a sequence has more elements than counters");
  if (args.sequences * counters == 0) return;
  const PhiloxKey key = make_key(args.seed, static_cast<std::uint64_t>(RandomPurpose::dropout));
  const auto factor = static_cast<float>(1 / (1 - static_cast<double>(args.p)));
  launch(stream, {.blocks_x = blocks_of(args.sequences * counters, kThreads), .threads = kThreads}, dropout_kernel, args, key,
         factor, counters, all_aligned(args.x, args.y) && args.elements_per_sequence % 4 == 0);
}

}  // namespace spipe::cuda
