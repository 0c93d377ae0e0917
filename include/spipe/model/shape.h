// A model as the planner, the store and the executor see it: units, tensors, bytes and FLOPs; no arithmetic, no device.
// The layouts here are the ones the layers compute with (model/layers.h reads the same fields), so memory is said once.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spipe/base/dtype.h"
#include "spipe/base/tensor.h"
#include "spipe/model/architecture.h"

namespace spipe::model {

// One parameter tensor of a store unit. Offsets are in elements and the same in every plane (compute, master, m, v, grad);
// every tensor starts at a multiple of 128 elements, so that it is 256-byte aligned in a 16-bit plane; padding elements stay
// zero.
struct Parameter {
  std::string name;  // Hugging Face name, e.g. "model.layers.0.self_attn.q_proj.weight"
  Shape shape;
  std::uint64_t offset = 0;  // elements from the start of the unit's slab
  bool decay = false;        // weight decay applies (ndim >= 2)
  int group = -1;            // of the run's parameter groups (optim/groups.h); -1: none
  [[nodiscard]] std::uint64_t elements() const { return shape.elements(); }
};

// What is fetched, updated and committed together. Order: embedding, layers 0..L-1, head, then the tied matrix if there is one.
// A store unit may have no tensors (the embedding unit of a tied rope model): then nothing is ever fetched for it.
struct StoreUnit {
  std::string name;  // "embedding", "layer 3", "head", "tied"
  std::vector<Parameter> parameters;
  std::uint64_t elements = 0;  // slab length in elements, a multiple of 128
};

// A named piece of a buffer that a layer saves between forward and backward, or of a workspace.
struct Field {
  std::string name;
  DType dtype = DType::f32;
  std::uint64_t elements = 0;
  std::uint64_t offset = 0;  // bytes, multiple of 64
};
struct Layout {
  std::vector<Field> fields;
  std::uint64_t bytes = 0;  // multiple of 64
  void add(std::string_view name, DType dtype, std::uint64_t elements);
  [[nodiscard]] const Field& at(std::string_view name) const;  // SPIPE_CHECKs that it exists
};

enum class UnitKind : std::uint8_t { embedding, layer, head };

// One compute unit: what forward, loss and backward tasks name. Compute unit u is also store unit u; `store_units` lists all
// the store units it needs on the device (the tied matrix is shared by embedding and head), ascending.
struct ComputeUnit {
  UnitKind kind = UnitKind::layer;
  std::string name;
  std::vector<int> store_units;
  Layout saved;                          // activations kept from forward to backward, per micro-batch (head: none)
  std::uint64_t forward_workspace = 0;   // bytes of scratch for a forward that saves nothing (holds what it does not keep)
  std::uint64_t save_workspace = 0;      // bytes of scratch for a forward that saves
  std::uint64_t backward_workspace = 0;  // bytes of scratch for backward; head: for `loss` with gradients
  double forward_flops = 0, backward_flops = 0;  // per micro-batch, matmul + attention, multiply-add = 2
};

// The settings a shape depends on.
struct BatchShape {
  std::int64_t micro = 1;  // sequences per micro-batch
  std::int64_t seq_len = 0;
  std::int64_t head_chunk = 0;  // rows of logits at a time in the LM head (resolved, > 0)
};

struct ModelShape {
  Architecture architecture;
  BatchShape batch;
  DType compute = DType::f32;  // parameters as computed with, activations, boundaries
  std::vector<StoreUnit> store_units;
  std::vector<ComputeUnit> units;    // embedding, layers, head
  int tied_unit = -1;                // index into store_units, or -1
  std::uint64_t boundary_bytes = 0;  // micro * seq_len * hidden * size(compute)
  std::uint64_t constant_bytes = 0;  // rope tables on the device
  std::uint64_t input_bytes = 0;     // tokens and targets of one micro-batch (int32 each)
  [[nodiscard]] int unit_count() const { return static_cast<int>(units.size()); }
  [[nodiscard]] int store_unit_count() const { return static_cast<int>(store_units.size()); }
  [[nodiscard]] std::uint64_t parameters() const;  // without padding
  [[nodiscard]] std::int64_t tokens_per_micro() const { return batch.micro * batch.seq_len; }
  // Compute units that contribute gradients to store unit s, in canonical order (tied: head first, then embedding).
  [[nodiscard]] std::vector<int> gradient_sources(int store_unit) const;
};

// Rows of logits at a time for a model: a function of vocabulary and tokens only (part of the numerics block).
[[nodiscard]] std::int64_t default_head_chunk(const Architecture& architecture, std::int64_t tokens_per_micro);

// Builds the shape. Sizes are checked arithmetic; throws Error when a product overflows.
[[nodiscard]] ModelShape make_shape(const Architecture& architecture, const BatchShape& batch, DType compute);

// Matmul FLOPs of one token's forward + backward without recompute (6 * matmul parameters) plus attention, for utilisation
// figures.
[[nodiscard]] double model_flops_per_token(const ModelShape& shape);

}  // namespace spipe::model
