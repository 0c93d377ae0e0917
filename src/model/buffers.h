// The buffers a unit computes in, as data: what a layer saves for backward and where everything lies in its scratch memory.
// Read by make_shape (sizes) and by the layers (offsets), so that memory is said once.
//
// What a layer saves, and why only that:
//  - qkv        what attention's backward reads: after RoPE; before norm and RoPE when q and k are normed (their norm's
//               backward needs the input; norm and RoPE are repeated, they are cheap)
//  - attention  attention's output, for its own backward and for dW of the output projection
//  - lse        log-sum-exp of the scores
//  - residual   the sum after attention: input of the second norm
//  - mlp        the MLP's pre-activations (gate | up when gated)
// Not saved, repeated in backward by the same ops on the same bits: normed inputs with their statistics, and the
// activation's output. They are bandwidth-bound passes, under one percent of a layer's time, but a third of its memory.
#pragma once

#include <cstdint>

#include "spipe/model/shape.h"

namespace spipe::model {

// A run of scratch memory: bytes from the start of the workspace.
struct Piece {
  std::uint64_t offset = 0, bytes = 0;
};

// Scratch of a layer. Every mode lays out its own; a piece a mode does not use has 0 bytes.
struct LayerScratch {
  Piece mean, rstd;           // of the norm at hand: fp32 [tokens]
  Piece hidden;               // [tokens, hidden]: normed input, gradient of it, MLP output
  Piece dropped;              // [tokens, hidden]: gradient behind a dropout site (backward, with dropout only)
  Piece partial;              // [tokens, hidden]: gradient through one of several matrices (backward, 16-bit, odd sizes only)
  Piece qkv, attention, lse;  // forward that saves nothing
  Piece q_rstd, k_rstd;       // statistics of the norms of q and k (QK-norm only)
  Piece qk;                   // normed and rotated q | k, [tokens, q_size + kv_size] (QK-norm, when qkv keeps the raw ones)
  Piece mlp, activated;       // [tokens, gated ? 2 ffn : ffn], [tokens, ffn]
  Piece d_attention, d_qkv;   // backward
  std::uint64_t bytes = 0;
};

enum class LayerMode : std::uint8_t { forward, save, backward };
[[nodiscard]] Layout layer_saved_layout(const Architecture& architecture, std::int64_t tokens, DType compute);
[[nodiscard]] LayerScratch layer_scratch(const Architecture& architecture, std::int64_t tokens, DType compute, LayerMode mode);

struct EmbeddingScratch {
  Piece dropped, sorting;
  std::uint64_t bytes = 0;
};
[[nodiscard]] EmbeddingScratch embedding_backward_scratch(const Architecture& architecture, std::int64_t tokens, DType compute);

// Scratch of the head for `rows` normed rows at a time and `chunk` rows of logits. Rows of logits are `logits_ld` apart:
// the vocabulary rounded up, so that rows start aligned.
struct HeadScratch {
  Piece mean, rstd, hidden, logits, rounded;  // rounded: the logits' gradient in a 16-bit compute type
  std::uint64_t bytes = 0;
};
[[nodiscard]] std::int64_t logits_ld(const Architecture& architecture);
[[nodiscard]] HeadScratch head_scratch(const Architecture& architecture, std::int64_t rows, std::int64_t chunk, DType compute,
                                       bool gradients);

}  // namespace spipe::model
