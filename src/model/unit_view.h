// A compute unit's tensors on the device by role, and the building blocks layers are made of. Internal to model/.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "buffers.h"
#include "kernels/ops.h"
#include "spipe/model/layers.h"
#include "spipe/model/shape.h"
#include "tensors.h"

namespace spipe::model {

// One parameter tensor where a call can reach it; empty when the family has no such tensor.
struct Tensor {
  ConstPtr value;
  Ptr gradient;             // fp32; absent in forward
  bool accumulate = false;  // add to the gradient
  explicit operator bool() const { return static_cast<bool>(value); }
};

// Resolves the memory of a call to tensors by role. Offsets come from the shape's store units, whose parameters stand in the
// order of the same lists (tensors.h).
class UnitView {
 public:
  UnitView(const ModelShape& shape, int unit, const UnitCall& call);
  [[nodiscard]] const Tensor& operator[](Role role) const { return tensors_[static_cast<std::size_t>(role)]; }

 private:
  std::array<Tensor, kRoleCount> tensors_{};
};

inline Ptr piece_at(void* base, const Piece& piece, DType dtype) { return {static_cast<char*>(base) + piece.offset, dtype}; }
inline float* floats_at(void* base, const Piece& piece) {
  return reinterpret_cast<float*>(static_cast<char*>(base) + piece.offset);
}

// Matrices side by side that read the same rows and write parts of one wider row: q|k|v, gate|up, or a single one.
struct LinearPart {
  Tensor weight, bias;
  std::int64_t out = 0;
};
class Linear {
 public:
  // Parts whose tensors lie back to back in memory become one matrix: fewer, larger matmuls. Depends on sizes only.
  Linear(const ModelShape& shape, std::int64_t in, std::initializer_list<LinearPart> parts);

  // y[rows, out] = x[rows, in] W^T + b
  void forward(const UnitCall& call, ConstPtr x, Ptr y, std::int64_t rows) const;
  // dW (+)= dy^T x, db (+)= column sums of dy
  void backward_parameters(const UnitCall& call, ConstPtr x, ConstPtr dy, std::int64_t rows) const;
  // dx = dy W. `partial` is scratch like dx, used when several matrices contribute to a 16-bit dx.
  void backward_input(const UnitCall& call, ConstPtr dy, Ptr dx, Ptr partial, std::int64_t rows) const;

 private:
  struct Parts {
    std::array<LinearPart, 3> list{};
    std::size_t count = 0;
    [[nodiscard]] std::span<const LinearPart> all() const { return {list.data(), count}; }
  };
  Parts biased_;    // joined where weights and biases allow it (forward, bias gradients)
  Parts matrices_;  // joined where weights allow it (matmuls of backward)
  std::int64_t in_ = 0, out_ = 0;
  bool conv1d_ = false;
};

// LayerNorm or RMSNorm over rows of the hidden size.
struct Norm {
  NormKind kind = NormKind::rmsnorm;
  const Tensor* weight = nullptr;
  const Tensor* bias = nullptr;
  std::int64_t rows = 0, cols = 0;
  float eps = 0;
  float* mean = nullptr;
  float* rstd = nullptr;

  // y = norm(x), or norm(x + residual) with the sum kept in `sum_out`. Fills mean and rstd.
  void forward(const UnitCall& call, ConstPtr x, Ptr y, ConstPtr residual = {}, Ptr sum_out = {}) const;
  // dx = gradient at x of dy behind the norm (+ residual_grad), with x the norm's input.
  void backward(const UnitCall& call, ConstPtr dy, ConstPtr x, Ptr dx, ConstPtr residual_grad) const;
};

// Dropout places of a unit.
enum class Site : std::uint32_t { embedding = 0, attention_out = 1, mlp_out = 2 };
// y = dropout(x), forward and backward alike; y may be x. Needs p > 0.
void apply_dropout(const ModelShape& shape, int unit, const UnitCall& call, Site site, double p, ConstPtr x, Ptr y);

void layer_forward(const ModelShape& shape, int unit, const UnitCall& call);
void layer_backward(const ModelShape& shape, int unit, const UnitCall& call);

}  // namespace spipe::model
