// See planted.h. Every kernel is launched with `bug` as an argument so that the twin differs in nothing else.
#include <cuda_runtime.h>

#include "tests/emulator/planted.h"

namespace spipe::cuda {  // the namespace in which the emulator defines it, as kernels/cuda/ names it
extern __shared__ __align__(16) unsigned char spipe_dynamic_shared[];
}

namespace spipe::planted {
namespace {

__device__ float* dynamic_floats() { return reinterpret_cast<float*>(cuda::spipe_dynamic_shared); }

template <typename... P, typename... A>
std::string run(unsigned blocks, unsigned threads, std::size_t shared, void (*kernel)(P...), A... values) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, values...);
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

__device__ int index() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }

__global__ void copy_kernel(float* dst, const float* src, int elements, bool bug) {
  const int i = index();
  if (i < elements) dst[i] = src[i + (bug ? 1 : 0)];
}
__global__ void fill_kernel(float* dst, int from, int to) {
  const int i = index() + from;
  if (i < to) dst[i] = 1;
}
__global__ void copy_vectors_kernel(float* dst, const float* src, int vectors, bool bug) {
  const int i = index();
  if (i < vectors) reinterpret_cast<float4*>(dst)[i] = reinterpret_cast<const float4*>(src + (bug ? 1 : 0))[i];
}
__global__ void barrier_branch_kernel(float* dst, bool bug) {
  if (bug && threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  dst[index()] = 1;
}
__global__ void barrier_exit_kernel(float* dst, int elements, bool bug) {
  const int i = index();
  if (bug && i >= elements) return;
  __syncthreads();
  if (i < elements) dst[i] = 1;
}
__global__ void neighbours_kernel(float* dst, bool bug) {
  __shared__ float values[64];
  values[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (!bug) __syncthreads();
  dst[threadIdx.x] = threadIdx.x == 0 ? 0.0F : values[threadIdx.x - 1];
}
__global__ void warp_neighbours_kernel(float* dst, bool bug) {
  __shared__ float values[64];
  values[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (!bug) __syncwarp();
  dst[threadIdx.x] = threadIdx.x % 32 == 0 ? 0.0F : values[threadIdx.x - 1];
}
__global__ void warp_update_kernel(float* dst, bool bug) {
  __shared__ float values[32];
  values[threadIdx.x] = static_cast<float>(threadIdx.x);
  __syncwarp();
  const float next = values[(threadIdx.x + 1) % 32];
  if (!bug) __syncwarp();
  values[threadIdx.x] += next;
  dst[threadIdx.x] = values[threadIdx.x];
}
__global__ void overwrite_kernel(float* dst, bool bug) {
  __shared__ float values[64];
  values[threadIdx.x] = static_cast<float>(threadIdx.x);
  __syncthreads();
  const float next = values[(threadIdx.x + 1) % 64];
  if (!bug) __syncthreads();
  values[threadIdx.x] = next;
  dst[threadIdx.x] = values[threadIdx.x];
}
__global__ void blocks_kernel(float* dst, bool bug) { dst[bug ? threadIdx.x : static_cast<unsigned>(index())] = 1; }
__global__ void halo_kernel(float* data, int elements, bool bug) {
  const int i = index();
  const float next = bug && threadIdx.x == 31 && i + 1 < elements ? data[i + 1] : 0.0F;
  data[i] = data[i] + next;
}
__global__ void counter_kernel(unsigned* counter, bool bug) {
  if (bug) {
    *counter += 1;
  } else {
    atomicAdd(counter, 1U);
  }
}
__global__ void unwritten_kernel(float* dst, bool bug) {
  __shared__ float values[64];
  if (!bug || threadIdx.x != 5) values[threadIdx.x] = 1;
  __syncthreads();
  dst[threadIdx.x] = values[threadIdx.x];
}
__global__ void shared_index_kernel(float* dst, int last, bool bug) {
  __shared__ float values[16];
  for (int i = 0; i < last + (bug ? 1 : 0); ++i) values[i] = 1;
  dst[0] = values[0];
}
__global__ void dynamic_kernel(float* dst, bool bug) {
  float* values = dynamic_floats();
  values[threadIdx.x + (bug ? 1 : 0)] = 1;
  dst[threadIdx.x] = values[threadIdx.x + (bug ? 1 : 0)];
}
__global__ void shuffle_branch_kernel(float* dst, bool bug) {
  float x = static_cast<float>(threadIdx.x);
  if (bug && threadIdx.x % 2 == 0) {
    dst[threadIdx.x] = x;
    return;
  }
  x = __shfl_xor_sync(0xffffffffU, x, 2);
  dst[threadIdx.x] = x;
}
__global__ void shuffle_outside_kernel(float* dst, bool bug) {
  if (threadIdx.x >= 16) return;
  dst[threadIdx.x] = __shfl_sync(0xffffU, 1.0F, bug ? 20 : 3);
}
__global__ void host_kernel(float* dst, const float* host, bool bug) { dst[0] = bug ? host[0] : 1.0F; }
__global__ void overflow_kernel(float* dst, int elements, bool bug) {
  const int i = static_cast<int>(threadIdx.x) + 1;
  const int square = bug ? i * elements * 4096 : i;
  dst[threadIdx.x] = static_cast<float>(square);
}
__global__ void stack_kernel(float** slot, float* dst, bool bug) {
  float own = 1;
  if (threadIdx.x == 0) *slot = &own;
  __syncthreads();
  if (threadIdx.x == 1 && bug) own = **slot;
  __syncthreads();
  dst[threadIdx.x] = own;
}

__global__ void rows_kernel(unsigned* dst, bool transposed, bool bug) {
  __shared__ __align__(16) unsigned short tiles[33 * 8];  // a row and eight elements more than four tiles of 8x8
  for (int i = 0; i < 8; ++i) tiles[threadIdx.x * 8 + i] = static_cast<unsigned short>(threadIdx.x * 8 + i);
  if (threadIdx.x < 8) tiles[256 + threadIdx.x] = 0;
  __syncwarp();
  unsigned x[4];
  emulator::ldmatrix_x4(x, tiles + threadIdx.x * 8 + (bug ? 1 : 0), transposed);
  for (int i = 0; i < 4; ++i) dst[threadIdx.x * 4 + i] = x[i];
}
// A[i][k] = i + k, B[k][j] = 1 if k == j, else 0, C = 100: bf16 patterns of small whole numbers.
__device__ unsigned whole(int x) { return __float_as_uint(static_cast<float>(x)) >> 16; }
__global__ void product_kernel(float* dst) {
  const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
  const auto pair = [](int low, int high) { return whole(low) | whole(high) << 16; };
  const unsigned a[4] = {pair(g + 2 * t, g + 2 * t + 1), pair(g + 8 + 2 * t, g + 8 + 2 * t + 1),
                         pair(g + 2 * t + 8, g + 2 * t + 9), pair(g + 8 + 2 * t + 8, g + 8 + 2 * t + 9)};
  float c[4] = {100, 100, 100, 100};
  emulator::mma_16x8x16(c, a, pair(2 * t == g, 2 * t + 1 == g), 0, true);
  for (int i = 0; i < 4; ++i) dst[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
}
__global__ void block_sum_kernel(float* out, const float* in, int elements) {
  __shared__ float of_warp[32];
  const int i = index();
  float x = i < elements ? in[i] : 0.0F;
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffU, x, lanes);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x < 32) {
    x = threadIdx.x < blockDim.x / 32 ? of_warp[threadIdx.x] : 0.0F;
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_down_sync(0xffffffffU, x, static_cast<unsigned>(lanes));
    if (threadIdx.x == 0) out[blockIdx.x] = x;
  }
}
__global__ void votes_kernel(unsigned* out) {
  const unsigned lane = threadIdx.x % 32;
  const unsigned odd = __ballot_sync(0xffffffffU, lane % 2);
  const int any = __any_sync(0xffffffffU, lane == 31), all = __all_sync(0xffffffffU, lane < 31);
  const unsigned up = __shfl_up_sync(0xffffffffU, lane, 1, 8);
  const unsigned half = lane < 16 ? __shfl_sync(0xffffU, lane, 15) : __shfl_sync(0xffff0000U, lane, 16);
  out[threadIdx.x] = (odd == 0xaaaaaaaaU && any != 0 && all == 0 ? 1000U : 0U) + 100 * up + half;
}
__global__ void atomic_kernel(unsigned* counter) {
  atomicAdd(counter, 1U);
  atomicMax(counter + 1, static_cast<unsigned>(index()));
}
__global__ void reverse_kernel(float* data, int elements) {
  float* values = dynamic_floats();
  const int i = static_cast<int>(threadIdx.x);
  values[i] = data[i];
  __syncthreads();
  data[i] = values[elements - 1 - i];
}
__global__ void plain_kernel(float* out, int elements) {
  if (index() < elements) out[index()] = static_cast<float>(index());
}

}  // namespace

std::string copy_past_the_end(float* dst, const float* src, int elements, Bug bug) {
  return run(2, 64, 0, copy_kernel, dst, src, elements, bug == Bug::planted);
}
std::string write_past_the_end(float* dst, int elements, Bug bug) {
  return run(2, 64, 0, fill_kernel, dst, 0, elements + (bug == Bug::planted ? 1 : 0));
}
std::string write_before_the_start(float* dst, int elements, Bug bug) {
  return run(2, 64, 0, fill_kernel, dst, bug == Bug::planted ? -1 : 0, elements);
}
std::string misses_last_element(float* dst, int elements, Bug bug) {
  return run(2, 64, 0, fill_kernel, dst, 0, elements - (bug == Bug::planted ? 1 : 0));
}
std::string copy_vectors(float* dst, const float* src, int vectors, Bug bug) {
  return run(1, 64, 0, copy_vectors_kernel, dst, src, vectors, bug == Bug::planted);
}
std::string barrier_in_a_branch(float* dst, Bug bug) { return run(1, 64, 0, barrier_branch_kernel, dst, bug == Bug::planted); }
std::string barrier_after_an_exit(float* dst, int elements, Bug bug) {
  return run(2, 64, 0, barrier_exit_kernel, dst, elements, bug == Bug::planted);
}
std::string missing_barrier(float* dst, Bug bug) { return run(1, 64, 0, neighbours_kernel, dst, bug == Bug::planted); }
std::string missing_warp_barrier(float* dst, Bug bug) {
  return run(1, 64, 0, warp_neighbours_kernel, dst, bug == Bug::planted);
}
std::string update_in_a_warp(float* dst, Bug bug) { return run(1, 32, 0, warp_update_kernel, dst, bug == Bug::planted); }
std::string read_before_overwrite(float* dst, Bug bug) { return run(1, 64, 0, overwrite_kernel, dst, bug == Bug::planted); }
std::string blocks_race(float* dst, Bug bug) { return run(2, 32, 0, blocks_kernel, dst, bug == Bug::planted); }
std::string in_place_halo(float* data, int elements, Bug bug) {
  return run(static_cast<unsigned>(elements / 32), 32, 0, halo_kernel, data, elements, bug == Bug::planted);
}
std::string plain_counter(unsigned* counter, Bug bug) { return run(1, 64, 0, counter_kernel, counter, bug == Bug::planted); }
std::string unwritten_shared(float* dst, Bug bug) { return run(1, 64, 0, unwritten_kernel, dst, bug == Bug::planted); }
std::string shared_index(float* dst, int index, Bug bug) {
  return run(1, 1, 0, shared_index_kernel, dst, index, bug == Bug::planted);
}
std::string dynamic_shared(float* dst, Bug bug) { return run(1, 64, 256, dynamic_kernel, dst, bug == Bug::planted); }
std::string shuffle_in_a_branch(float* dst, Bug bug) { return run(1, 32, 0, shuffle_branch_kernel, dst, bug == Bug::planted); }
std::string shuffle_from_outside(float* dst, Bug bug) {
  return run(1, 32, 0, shuffle_outside_kernel, dst, bug == Bug::planted);
}
std::string host_pointer(float* dst, const float* host, Bug bug) {
  return run(1, 1, 0, host_kernel, dst, host, bug == Bug::planted);
}
std::string host_reads_device(float* dst, Bug bug) {
  if (bug == Bug::planted) dst[0] = 1;
  return run(1, 1, 0, fill_kernel, dst, 0, 1);
}
std::string int_overflow(float* dst, int elements, Bug bug) {
  return run(1, 64, 0, overflow_kernel, dst, elements, bug == Bug::planted);
}
std::string neighbours_stack(float** slot, float* dst, Bug bug) {
  return run(1, 64, 0, stack_kernel, slot, dst, bug == Bug::planted);
}

std::string tile_rows(unsigned* dst, bool transposed, Bug bug) {
  return run(1, 32, 0, rows_kernel, dst, transposed, bug == Bug::planted);
}
std::string tile_product(float* dst) { return run(1, 32, 0, product_kernel, dst); }
std::string block_sum(float* out, const float* in, int elements) {
  return run(static_cast<unsigned>((elements + 255) / 256), 256, 0, block_sum_kernel, out, in, elements);
}
std::string votes(unsigned* out, int threads) { return run(1, static_cast<unsigned>(threads), 0, votes_kernel, out); }
std::string count_atomically(unsigned* counter, unsigned blocks) { return run(blocks, 128, 0, atomic_kernel, counter); }
std::string reverse_by_dynamic_shared(float* data, int elements) {
  return run(1, static_cast<unsigned>(elements), static_cast<std::size_t>(elements) * sizeof(float), reverse_kernel, data,
             elements);
}
std::string no_barriers(float* out, int elements) {
  return run(static_cast<unsigned>((elements + 255) / 256), 256, 0, plain_kernel, out, elements);
}

}  // namespace spipe::planted
