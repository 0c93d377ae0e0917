// The arithmetic of a compute unit over Ops: hand-written forward and backward, no knowledge of streams, schedules or devices.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/ops.h"
#include "spipe/model/shape.h"

namespace spipe::model {

// Device-resident constants shared by all layers (rope tables). `data` holds ModelShape::constant_bytes.
struct Constants {
  const float* rope_cos = nullptr;  // [seq_len, head_dim / 2]
  const float* rope_sin = nullptr;
};
// Fills `destination` (constant_bytes, host memory; computed in double, rounded once) and returns pointers into it.
Constants fill_constants(const ModelShape& shape, void* destination);
// The inverse frequencies of a rope setting in double, [head_dim / 2]; formulas in the golden README.
[[nodiscard]] std::vector<double> rope_inverse_frequencies(const Rope& rope, std::int64_t head_dim);

// One store unit on the device: the compute-dtype slab, and the fp32 gradient accumulator of the same element layout (null in
// forward). `accumulate`: false = this is the first contribution to the accumulator (overwrite every tensor's elements),
// true = add. Padding between tensors is never read or written by layers.
struct UnitMemory {
  const void* parameters = nullptr;
  float* gradient = nullptr;
  bool accumulate = false;
};

// Keys and values that one layer keeps of one sequence's tokens, for generation: rows of [k | v], 2 * kv_size elements of the
// compute type, row i of position i, k as attention sees it (normed, rotated).
struct KeyValueCache {
  void* rows = nullptr;   // null: no cache
  std::int64_t past = 0;  // rows filled by calls before; a call adds seq_len rows behind them
};

// Everything one task needs. Pointers are device memory; which fields are set depends on the call.
struct UnitCall {
  Ops* ops = nullptr;
  StreamHandle* stream = nullptr;
  Constants constants;
  std::span<const UnitMemory> memory;     // one per ComputeUnit::store_units, same order
  const std::int32_t* tokens = nullptr;   // [micro * seq_len] (embedding)
  const std::int32_t* targets = nullptr;  // [micro * seq_len], < 0 = masked (head)
  const void* input = nullptr;            // boundary into the unit (layers, head)
  void* output = nullptr;                 // boundary out of the unit (embedding, layers)
  const void* output_gradient = nullptr;  // gradient of the boundary out of the unit (backward of embedding, layers)
  void* input_gradient = nullptr;         // gradient of the boundary into the unit (backward of layers, loss of head)
  void* saved = nullptr;                  // ComputeUnit::saved, written by forward when non-null, read by backward
  void* workspace = nullptr;              // scratch of the size the shape says for this call
  float* nll = nullptr;                   // [micro * seq_len] (head)
  float loss_scale = 0;                   // head: gradient of the summed loss is multiplied by this (1 / targets of the step)
  std::uint64_t seed = 0, step = 0, first_sequence = 0;  // dropout keys: first_sequence = micro-batch * micro
  // Generation: forward of the embedding and of layers continues one sequence (micro = 1) behind cache.past tokens; saves
  // nothing. The constants are those of a shape as long as the whole sequence.
  KeyValueCache cache;
};

// Embedding and layers: `saved` null = keep nothing (workspace of forward_workspace bytes), else save (save_workspace bytes).
// The bits of `output` are the same in both cases.
void unit_forward(const ModelShape& shape, int unit, const UnitCall& call);
// Gradients of parameters and of the input boundary from output_gradient, input and saved. input_gradient may alias
// output_gradient. The embedding has no input_gradient.
void unit_backward(const ModelShape& shape, int unit, const UnitCall& call);
// The head: final norm, chunked LM head and cross-entropy, forward and backward at once; fills nll, the head's parameter
// gradients and input_gradient. With input_gradient null only nll is filled (evaluation; forward_workspace bytes).
void head_loss(const ModelShape& shape, const UnitCall& call);

// Logits of `rows` rows of a boundary (generation, tests): out fp32 [rows, vocab]; workspace: rows * hidden * 4 + rows * 8
// bytes + 64.
void head_logits(const ModelShape& shape, const UnitCall& call, std::int64_t rows, float* out);

// Initial values of one parameter as the family's paper says (normal(0, init_std), residual projections of GPT-2 scaled by
// 1/sqrt(2 layers), norms one, biases zero), a pure function of (seed, parameter name, element): fp32, of out.size() elements
// from `first` on.
void initialize_parameter(const Architecture& architecture, const Parameter& parameter, std::uint64_t seed, std::uint64_t first,
                          std::span<float> out);

}  // namespace spipe::model
