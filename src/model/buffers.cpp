#include "buffers.h"

#include <algorithm>

#include "kernels/ops.h"
#include "spipe/base/checked.h"
#include "tensors.h"

namespace spipe::model {
namespace {

constexpr std::uint64_t kPieceAlignment = 64;

std::uint64_t size(std::int64_t value) { return narrow<std::uint64_t>(value); }

// Hands out aligned pieces in order. Pieces whose lives do not meet are laid over each other by branching: copies of an
// allocator start at the same place, and the longest branch counts.
class Pieces {
 public:
  Piece take(std::uint64_t elements, std::uint64_t element_bytes) {
    const Piece piece{bytes_, checked_mul(elements, element_bytes)};
    bytes_ = checked_add(checked_add(bytes_, piece.bytes), kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
    return piece;
  }
  void join(const Pieces& other) { bytes_ = std::max(bytes_, other.bytes_); }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }

 private:
  std::uint64_t bytes_ = 0;
};

std::uint64_t mlp_row(const Architecture& a) { return size(a.ffn_size) * (a.mlp == MlpKind::swiglu ? 2 : 1); }

// Whether q|k|v and gate|up are one matrix each: no padding between their tensors.
bool matrices_join(const Architecture& a) {
  const auto whole = [&](std::int64_t out) { return checked_mul(size(out), size(a.hidden_size)) % kTensorAlignment == 0; };
  const bool qkv = a.fused_qkv || (whole(a.q_size()) && whole(a.kv_size()));
  return qkv && (a.mlp != MlpKind::swiglu || whole(a.ffn_size));
}

}  // namespace

Layout layer_saved_layout(const Architecture& a, std::int64_t tokens, DType compute) {
  const std::uint64_t rows = size(tokens);
  Layout layout;
  layout.add("qkv", compute, checked_mul(rows, size(a.qkv_size())));
  layout.add("attention", compute, checked_mul(rows, size(a.q_size())));
  layout.add("lse", DType::f32, checked_mul(rows, size(a.heads)));
  layout.add("residual", compute, checked_mul(rows, size(a.hidden_size)));
  layout.add("mlp", compute, checked_mul(rows, mlp_row(a)));
  return layout;
}

LayerScratch layer_scratch(const Architecture& a, std::int64_t tokens, DType compute, LayerMode mode) {
  const std::uint64_t rows = size(tokens), element = dtype_size(compute), statistic = dtype_size(DType::f32);
  const auto activations = [&](Pieces& pieces, std::uint64_t row) { return pieces.take(checked_mul(rows, row), element); };
  LayerScratch s;
  Pieces common;
  s.mean = common.take(a.norm == NormKind::layernorm ? rows : 0, statistic);
  s.rstd = common.take(rows, statistic);
  s.hidden = activations(common, size(a.hidden_size));
  if (mode == LayerMode::backward && (a.dropout_attention_out > 0 || a.dropout_mlp_out > 0)) {
    s.dropped = activations(common, size(a.hidden_size));
  }
  if (mode == LayerMode::backward && compute != DType::f32 && !matrices_join(a)) {
    s.partial = activations(common, size(a.hidden_size));
  }

  Pieces attention = common;
  if (a.qk_norm) {
    s.q_rstd = attention.take(checked_mul(rows, size(a.heads)), statistic);
    s.k_rstd = attention.take(checked_mul(rows, size(a.kv_heads)), statistic);
    if (mode != LayerMode::forward) s.qk = activations(attention, size(a.q_size() + a.kv_size()));
  }
  if (mode == LayerMode::forward) {
    s.qkv = activations(attention, size(a.qkv_size()));
    s.attention = activations(attention, size(a.q_size()));
    s.lse = attention.take(checked_mul(rows, size(a.heads)), statistic);
  }
  if (mode == LayerMode::backward) {
    s.d_attention = activations(attention, size(a.q_size()));
    s.d_qkv = activations(attention, size(a.qkv_size()));
  }

  Pieces mlp = common;
  s.activated = activations(mlp, size(a.ffn_size));
  const bool own_mlp = mode == LayerMode::forward || (mode == LayerMode::backward && a.mlp == MlpKind::swiglu);
  if (own_mlp) s.mlp = activations(mlp, mlp_row(a));

  common.join(attention);
  common.join(mlp);
  s.bytes = common.bytes();
  return s;
}

EmbeddingScratch embedding_backward_scratch(const Architecture& a, std::int64_t tokens, DType compute) {
  EmbeddingScratch s;
  Pieces pieces;
  const std::uint64_t dropped = a.dropout_embedding > 0 ? checked_mul(size(tokens), size(a.hidden_size)) : 0;
  s.dropped = pieces.take(dropped, dtype_size(compute));
  s.sorting = pieces.take(embedding_workspace_bytes(tokens, a.vocab_size), 1);
  s.bytes = pieces.bytes();
  return s;
}

std::int64_t logits_ld(const Architecture& a) { return narrow<std::int64_t>(round_up(size(a.vocab_size), 16)); }

HeadScratch head_scratch(const Architecture& a, std::int64_t rows, std::int64_t chunk, DType compute, bool gradients) {
  HeadScratch s;
  Pieces pieces;
  s.mean = pieces.take(a.norm == NormKind::layernorm ? size(rows) : 0, dtype_size(DType::f32));
  s.rstd = pieces.take(size(rows), dtype_size(DType::f32));
  s.hidden = pieces.take(checked_mul(size(rows), size(a.hidden_size)), dtype_size(compute));
  const std::uint64_t logits = checked_mul(size(chunk), size(logits_ld(a)));
  s.logits = pieces.take(logits, dtype_size(DType::f32));
  if (gradients && compute != DType::f32) s.rounded = pieces.take(logits, dtype_size(compute));
  s.bytes = pieces.bytes();
  return s;
}

}  // namespace spipe::model
