// The reference implementation of Ops: the formulas of kernels/ops.h as the plainest loops, one thread, arithmetic in double,
// operands widened, results rounded once when stored. Used by tests only; every backend is compared with it.
// finish_gradient and adamw, whose bits the contract fixes, follow the contract's operation order and are exact.
#pragma once

#include "kernels/ops.h"

namespace spipe::test {

class ReferenceOps final : public Ops {
 public:
  void matmul(StreamHandle* stream, const MatmulArgs& args) override;
  void column_sum(StreamHandle* stream, const ColumnSumArgs& args) override;
  void layernorm_forward(StreamHandle* stream, const LayerNormForwardArgs& args) override;
  void layernorm_backward(StreamHandle* stream, const LayerNormBackwardArgs& args) override;
  void rmsnorm_forward(StreamHandle* stream, const RmsNormForwardArgs& args) override;
  void rmsnorm_backward(StreamHandle* stream, const RmsNormBackwardArgs& args) override;
  void rope(StreamHandle* stream, const RopeArgs& args) override;
  void attention_forward(StreamHandle* stream, const AttentionForwardArgs& args) override;
  void attention_backward(StreamHandle* stream, const AttentionBackwardArgs& args) override;
  void activation_forward(StreamHandle* stream, const ActivationForwardArgs& args) override;
  void activation_backward(StreamHandle* stream, const ActivationBackwardArgs& args) override;
  void gated_forward(StreamHandle* stream, const GatedForwardArgs& args) override;
  void gated_backward(StreamHandle* stream, const GatedBackwardArgs& args) override;
  void embedding_forward(StreamHandle* stream, const EmbeddingForwardArgs& args) override;
  void embedding_backward(StreamHandle* stream, const EmbeddingBackwardArgs& args) override;
  void softmax_cross_entropy(StreamHandle* stream, const SoftmaxCrossEntropyArgs& args) override;
  void dropout(StreamHandle* stream, const DropoutArgs& args) override;
  void add(StreamHandle* stream, const AddArgs& args) override;
  void convert(StreamHandle* stream, const ConvertArgs& args) override;
  void zero(StreamHandle* stream, const ZeroArgs& args) override;
  void finish_gradient(StreamHandle* stream, const FinishGradientArgs& args) override;
  void adamw(StreamHandle* stream, const AdamWArgs& args) override;
  void update(StreamHandle* stream, const UpdateArgs& args) override;
};

// Element access shared with the tests: widening load, and a store that rounds a double once (nearest even).
[[nodiscard]] double load(ConstPtr p, std::int64_t i);
void store(Ptr p, std::int64_t i, double value);

}  // namespace spipe::test
