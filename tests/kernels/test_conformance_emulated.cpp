// The CUDA kernels on the emulated device, under the conformance suite: right results, and no fault of the emulator's list.
#include <catch2/catch.hpp>

#include "kernels/cuda/cuda_ops.cuh"
#include "tests/emulator/emulated_memory.h"
#include "tests/kernels/conformance.h"

namespace spipe::test {
namespace {

// What the backend has not yet.
class UpdatesOnly final : public cuda::CudaOps {
 public:
  void matmul(StreamHandle*, const MatmulArgs&) override { FAIL(); }
  void column_sum(StreamHandle*, const ColumnSumArgs&) override { FAIL(); }
  void layernorm_forward(StreamHandle*, const LayerNormForwardArgs&) override { FAIL(); }
  void layernorm_backward(StreamHandle*, const LayerNormBackwardArgs&) override { FAIL(); }
  void rmsnorm_forward(StreamHandle*, const RmsNormForwardArgs&) override { FAIL(); }
  void rmsnorm_backward(StreamHandle*, const RmsNormBackwardArgs&) override { FAIL(); }
  void rope(StreamHandle*, const RopeArgs&) override { FAIL(); }
  void attention_forward(StreamHandle*, const AttentionForwardArgs&) override { FAIL(); }
  void attention_backward(StreamHandle*, const AttentionBackwardArgs&) override { FAIL(); }
  void activation_forward(StreamHandle*, const ActivationForwardArgs&) override { FAIL(); }
  void activation_backward(StreamHandle*, const ActivationBackwardArgs&) override { FAIL(); }
  void gated_forward(StreamHandle*, const GatedForwardArgs&) override { FAIL(); }
  void gated_backward(StreamHandle*, const GatedBackwardArgs&) override { FAIL(); }
  void embedding_forward(StreamHandle*, const EmbeddingForwardArgs&) override { FAIL(); }
  void embedding_backward(StreamHandle*, const EmbeddingBackwardArgs&) override { FAIL(); }
  void softmax_cross_entropy(StreamHandle*, const SoftmaxCrossEntropyArgs&) override { FAIL(); }
  void dropout(StreamHandle*, const DropoutArgs&) override { FAIL(); }
  void add(StreamHandle*, const AddArgs&) override { FAIL(); }
  void convert(StreamHandle*, const ConvertArgs&) override { FAIL(); }
  void zero(StreamHandle*, const ZeroArgs&) override { FAIL(); }
};

const Backends& emulated() {
  static UpdatesOnly ops;
  static EmulatedMemory memory;
  static const Backends backends = {{.name = "emulated CUDA", .ops = &ops, .memory = &memory}};
  return backends;
}

}  // namespace

TEST_CASE("emulated: finish gradient, bit for bit") { conform_finish_gradient(emulated()); }
TEST_CASE("emulated: AdamW, bit for bit") { conform_adamw(emulated()); }
SPIPE_UPDATE_TESTS("emulated", emulated())

}  // namespace spipe::test
