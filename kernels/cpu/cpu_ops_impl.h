// CpuOps: argument checks and the split of work into items (functions of the arguments only), run on the pool.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/kernel_table.h"
#include "spipe/base/error.h"

namespace spipe::cpu {

// A buffer of each worker that grows to what its items need; 64-byte aligned, content undefined.
class WorkerScratch {
 public:
  explicit WorkerScratch(int workers) : buffers_(static_cast<std::size_t>(workers)) {}
  float* get(int worker, std::int64_t floats) {
    Buffer& buffer = buffers_[static_cast<std::size_t>(worker)];
    if (buffer.floats < floats) {
      const std::size_t bytes = (static_cast<std::size_t>(floats) * sizeof(float) + 63) / 64 * 64;
      buffer.data.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
      SPIPE_CHECK(buffer.data != nullptr, "no memory for kernel scratch");
      buffer.floats = floats;
    }
    return buffer.data.get();
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  struct alignas(64) Buffer {
    std::unique_ptr<float, Free> data;
    std::int64_t floats = 0;
  };
  std::vector<Buffer> buffers_;
};

[[nodiscard]] inline bool is_storage(DType t) { return t == DType::f32 || t == DType::bf16 || t == DType::f16; }

class CpuOps final : public Ops {
 public:
  CpuOps(ThreadPool& pool, Isa isa) : pool_(pool), isa_(isa), scratch_(pool.threads()) {}

  // cpu_ops_matmul.cpp
  void matmul(StreamHandle* stream, const MatmulArgs& args) override;
  // cpu_ops_basic.cpp
  void column_sum(StreamHandle* stream, const ColumnSumArgs& args) override;
  void softmax_cross_entropy(StreamHandle* stream, const SoftmaxCrossEntropyArgs& args) override;
  void add(StreamHandle* stream, const AddArgs& args) override;
  void convert(StreamHandle* stream, const ConvertArgs& args) override;
  void zero(StreamHandle* stream, const ZeroArgs& args) override;
  // cpu_ops_attention.cpp
  void attention_forward(StreamHandle* stream, const AttentionForwardArgs& args) override;
  void attention_backward(StreamHandle* stream, const AttentionBackwardArgs& args) override;
  // cpu_ops_norm.cpp
  void layernorm_forward(StreamHandle* stream, const LayerNormForwardArgs& args) override;
  void layernorm_backward(StreamHandle* stream, const LayerNormBackwardArgs& args) override;
  void rmsnorm_forward(StreamHandle* stream, const RmsNormForwardArgs& args) override;
  void rmsnorm_backward(StreamHandle* stream, const RmsNormBackwardArgs& args) override;
  // cpu_ops_pointwise.cpp
  void rope(StreamHandle* stream, const RopeArgs& args) override;
  void activation_forward(StreamHandle* stream, const ActivationForwardArgs& args) override;
  void activation_backward(StreamHandle* stream, const ActivationBackwardArgs& args) override;
  void gated_forward(StreamHandle* stream, const GatedForwardArgs& args) override;
  void gated_backward(StreamHandle* stream, const GatedBackwardArgs& args) override;
  void embedding_forward(StreamHandle* stream, const EmbeddingForwardArgs& args) override;
  void embedding_backward(StreamHandle* stream, const EmbeddingBackwardArgs& args) override;
  void dropout(StreamHandle* stream, const DropoutArgs& args) override;
  // cpu_ops_update.cpp
  void finish_gradient(StreamHandle* stream, const FinishGradientArgs& args) override;
  void adamw(StreamHandle* stream, const AdamWArgs& args) override;
  void update(StreamHandle* stream, const UpdateArgs& args) override;

 private:
  // Runs f(first, count, worker) over blocks of `block` elements of [0, elements).
  template <typename F>
  void for_blocks(std::int64_t elements, std::int64_t block, const F& f) {
    pool_.parallel_for((elements + block - 1) / block, [&](std::int64_t item, int worker) {
      const std::int64_t first = item * block;
      f(first, std::min(block, elements - first), worker);
    });
  }

  ThreadPool& pool_;
  const Isa isa_;
  WorkerScratch scratch_;  // used inside items only: the pool runs one loop at a time
};

}  // namespace spipe::cpu
