// Attention on tensor cores, for operands that CudaOps has checked and found fit.
#pragma once

#include <cstdint>

#include "kernels/ops.h"

namespace spipe::cuda {

void flash_forward(StreamHandle* stream, const AttentionForwardArgs& args);
// `deltas`: scratch of `delta_count` floats; the heads go in slices that fit, which changes no bits. False, and nothing done,
// when it does not hold seq_len of them for the heads that share a KV head.
[[nodiscard]] bool flash_backward(StreamHandle* stream, const AttentionBackwardArgs& args, float* deltas,
                                  std::int64_t delta_count);

}  // namespace spipe::cuda
