// The CUDA backend of Ops: hand-written kernels, deterministic (no floating-point atomics, tile and split sizes by shape only),
// for compute capability 7.5 and newer. The same sources run on the host under the emulator of the tests (docs/cuda.md).
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/ops.h"

namespace spipe {

// What the partial sums of column sums and weight gradients of norms need, however large the tensors.
inline constexpr std::uint64_t kCudaScratchBytes = std::uint64_t{8} << 20;

// Every op enqueues its kernels on `stream` (a cudaStream_t; nullptr is the default stream) of the current device and returns;
// all pointers are the device's. Allocates nothing, waits for nothing. A launch that the driver refuses throws InternalError.
// Differences from the rules of kernels/ops.h: attention takes head_dim up to 256; tokens and targets are not checked against
// the vocabulary (the host does not see them): what is outside gives NaN.
// 16-byte accesses need operands and row lengths that are multiples of 16 bytes; others are taken element by element.
// scratch: kCudaScratchBytes of device memory, aligned to 256, that outlive the Ops and that nobody else uses. Because of it,
// one Ops is used on one stream.
// Attention on bf16 and fp16 runs on tensor cores where the current device has them (compute capability 8.0 and newer) and the
// operands are fit (head_dim a multiple of 8, 16-byte rows), and rounds its probabilities to their type; kPlain forbids it.
enum class CudaAttention : std::uint8_t { kBest, kPlain };
[[nodiscard]] std::unique_ptr<Ops> make_cuda_ops(void* scratch, CudaAttention attention = CudaAttention::kBest);

// Number of CUDA devices; 0 without a driver.
[[nodiscard]] int cuda_device_count();

}  // namespace spipe
