// CudaOps: argument checks and launches. Only the updates so far: the class is abstract.
#pragma once

#include "kernels/ops.h"

namespace spipe::cuda {

class CudaOps : public Ops {
 public:
  // ops_update.cu
  void finish_gradient(StreamHandle* stream, const FinishGradientArgs& args) override;
  void adamw(StreamHandle* stream, const AdamWArgs& args) override;
  void update(StreamHandle* stream, const UpdateArgs& args) override;
};

}  // namespace spipe::cuda
