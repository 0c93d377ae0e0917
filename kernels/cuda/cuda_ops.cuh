// CudaOps: argument checks and launches.
#pragma once

#include "kernels/cuda/cuda_ops.h"

namespace spipe::cuda {

class CudaOps final : public Ops {
 public:
  CudaOps(float* scratch, bool tensor_cores) : scratch_(scratch), tensor_cores_(tensor_cores) {}
  // ops_matmul.cu
  void matmul(StreamHandle* stream, const MatmulArgs& args) override;
  // ops_columns.cu
  void column_sum(StreamHandle* stream, const ColumnSumArgs& args) override;
  // ops_norm.cu
  void layernorm_forward(StreamHandle* stream, const LayerNormForwardArgs& args) override;
  void layernorm_backward(StreamHandle* stream, const LayerNormBackwardArgs& args) override;
  void rmsnorm_forward(StreamHandle* stream, const RmsNormForwardArgs& args) override;
  void rmsnorm_backward(StreamHandle* stream, const RmsNormBackwardArgs& args) override;
  // ops_attention.cu, ops_attention_backward.cu; on tensor cores: ops_flash.cu, ops_flash_backward.cu
  void attention_forward(StreamHandle* stream, const AttentionForwardArgs& args) override;
  void attention_backward(StreamHandle* stream, const AttentionBackwardArgs& args) override;
  // ops_pointwise.cu
  void rope(StreamHandle* stream, const RopeArgs& args) override;
  void activation_forward(StreamHandle* stream, const ActivationForwardArgs& args) override;
  void activation_backward(StreamHandle* stream, const ActivationBackwardArgs& args) override;
  void gated_forward(StreamHandle* stream, const GatedForwardArgs& args) override;
  void gated_backward(StreamHandle* stream, const GatedBackwardArgs& args) override;
  // ops_embedding.cu
  void embedding_forward(StreamHandle* stream, const EmbeddingForwardArgs& args) override;
  void embedding_backward(StreamHandle* stream, const EmbeddingBackwardArgs& args) override;
  // ops_loss.cu
  void softmax_cross_entropy(StreamHandle* stream, const SoftmaxCrossEntropyArgs& args) override;
  // ops_basic.cu
  void dropout(StreamHandle* stream, const DropoutArgs& args) override;
  void add(StreamHandle* stream, const AddArgs& args) override;
  void convert(StreamHandle* stream, const ConvertArgs& args) override;
  void zero(StreamHandle* stream, const ZeroArgs& args) override;
  // ops_update.cu
  void finish_gradient(StreamHandle* stream, const FinishGradientArgs& args) override;
  void adamw(StreamHandle* stream, const AdamWArgs& args) override;
  void update(StreamHandle* stream, const UpdateArgs& args) override;

 private:
  float* scratch_;     // kCudaScratchBytes
  bool tensor_cores_;  // for attention
};

}  // namespace spipe::cuda
