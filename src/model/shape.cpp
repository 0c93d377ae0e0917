#include "spipe/model/shape.h"

#include <algorithm>

#include "buffers.h"
#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/model/families.h"

namespace spipe::model {
namespace {

constexpr std::uint64_t kFieldAlignment = 64;
constexpr std::int64_t kHeadChunkBytes = std::int64_t{8} << 20;
// Every chunk reads the head's matrix and updates its gradient. With fewer rows that traffic shows: GPT-2's head on two cores
// took 1.5 times as long with 64 rows as with 128, and 0.9 times with 256.
constexpr std::int64_t kHeadChunkRows = 128;

std::uint64_t size(std::int64_t value) { return narrow<std::uint64_t>(value); }

std::uint64_t aligned(std::uint64_t bytes) {
  return checked_add(bytes, kFieldAlignment - 1) / kFieldAlignment * kFieldAlignment;
}

// Query-key pairs of one causal sequence: query i sees min(i + 1, window) keys.
double attention_pairs(const Architecture& a, std::int64_t seq_len) {
  const double n = static_cast<double>(seq_len);
  if (a.sliding_window <= 0 || a.sliding_window >= seq_len) return n * (n + 1) / 2;
  const double w = static_cast<double>(a.sliding_window);
  return w * (w + 1) / 2 + (n - w) * w;
}

// Multiply-adds count 2. Attention: two matmuls forward (scores, values); backward four, and the scores once more.
struct Flops {
  double layer_forward = 0, layer_backward = 0, head_forward = 0, head_backward = 0, attention_forward = 0;
};

Flops flops_of(const Architecture& a, const BatchShape& batch) {
  const double micro = static_cast<double>(batch.micro), tokens = micro * static_cast<double>(batch.seq_len);
  const double hidden = static_cast<double>(a.hidden_size), ffn = static_cast<double>(a.ffn_size);
  const double matrices = a.mlp == MlpKind::swiglu ? 3 : 2;
  const double weights = hidden * static_cast<double>(a.qkv_size() + a.q_size()) + matrices * hidden * ffn;
  Flops f;
  f.attention_forward = 4 * attention_pairs(a, batch.seq_len) * micro * static_cast<double>(a.q_size());
  f.layer_forward = 2 * tokens * weights + f.attention_forward;
  f.layer_backward = 4 * tokens * weights + 2.5 * f.attention_forward;
  f.head_forward = 2 * tokens * hidden * static_cast<double>(a.vocab_size);
  f.head_backward = 2 * f.head_forward;
  return f;
}

ComputeUnit embedding_unit(const ModelShape& shape) {
  ComputeUnit unit;
  unit.kind = UnitKind::embedding;
  unit.backward_workspace = embedding_backward_scratch(shape.architecture, shape.tokens_per_micro(), shape.compute).bytes;
  return unit;
}

ComputeUnit layer_unit(const ModelShape& shape, const Flops& flops) {
  const std::int64_t tokens = shape.tokens_per_micro();
  ComputeUnit unit;
  unit.kind = UnitKind::layer;
  unit.saved = layer_saved_layout(shape.architecture, tokens, shape.compute);
  unit.forward_workspace = layer_scratch(shape.architecture, tokens, shape.compute, LayerMode::forward).bytes;
  unit.save_workspace = layer_scratch(shape.architecture, tokens, shape.compute, LayerMode::save).bytes;
  unit.backward_workspace = layer_scratch(shape.architecture, tokens, shape.compute, LayerMode::backward).bytes;
  unit.forward_flops = flops.layer_forward;
  unit.backward_flops = flops.layer_backward;
  return unit;
}

ComputeUnit head_unit(const ModelShape& shape, const Flops& flops) {
  const std::int64_t tokens = shape.tokens_per_micro(), chunk = shape.batch.head_chunk;
  ComputeUnit unit;
  unit.kind = UnitKind::head;
  unit.forward_workspace = head_scratch(shape.architecture, chunk, chunk, shape.compute, false).bytes;
  unit.save_workspace = unit.forward_workspace;
  unit.backward_workspace = head_scratch(shape.architecture, tokens, chunk, shape.compute, true).bytes;
  unit.forward_flops = flops.head_forward;
  unit.backward_flops = flops.head_backward;
  return unit;
}

}  // namespace

void Layout::add(std::string_view name, DType dtype, std::uint64_t elements) {
  fields.push_back({std::string(name), dtype, elements, bytes});
  bytes = aligned(checked_add(bytes, checked_mul(elements, dtype_size(dtype))));
}

const Field& Layout::at(std::string_view name) const {
  for (const Field& field : fields) {
    if (field.name == name) return field;
  }
  SPIPE_CHECK(false, "no field '" + std::string(name) + "' in this layout");
}

std::uint64_t ModelShape::parameters() const {
  std::uint64_t total = 0;
  for (const StoreUnit& unit : store_units) {
    for (const Parameter& parameter : unit.parameters) total = checked_add(total, parameter.elements());
  }
  return total;
}

std::vector<int> ModelShape::gradient_sources(int store_unit) const {
  SPIPE_CHECK(store_unit >= 0 && store_unit < store_unit_count(), "no such store unit");
  if (store_units[static_cast<std::size_t>(store_unit)].parameters.empty()) return {};
  if (store_unit == tied_unit) return {unit_count() - 1, 0};
  return {store_unit};
}

std::int64_t default_head_chunk(const Architecture& architecture, std::int64_t tokens_per_micro) {
  SPIPE_CHECK(architecture.vocab_size > 0 && tokens_per_micro > 0, "a head chunk needs a vocabulary and tokens");
  const std::int64_t fitting = kHeadChunkBytes / static_cast<std::int64_t>(sizeof(float)) / architecture.vocab_size;
  const std::int64_t most = std::clamp(fitting, std::min(kHeadChunkRows, tokens_per_micro), tokens_per_micro);
  const std::int64_t most_chunks = std::max<std::int64_t>(1, tokens_per_micro / kHeadChunkRows);
  const std::int64_t chunks = std::min((tokens_per_micro + most - 1) / most, most_chunks);
  return (tokens_per_micro + chunks - 1) / chunks;
}

ModelShape make_shape(const Architecture& architecture, const BatchShape& batch, DType compute) {
  check_architecture(architecture, "model");
  SPIPE_CHECK(batch.micro > 0 && batch.seq_len > 0 && batch.head_chunk > 0, "a shape needs micro, seq_len and head_chunk > 0");
  SPIPE_CHECK(compute == DType::f32 || compute == DType::bf16 || compute == DType::f16, "not a compute dtype");
  const std::uint64_t tokens = checked_mul(size(batch.micro), size(batch.seq_len));
  ModelShape shape;
  shape.architecture = architecture;
  shape.batch = batch;
  shape.batch.head_chunk = std::min(batch.head_chunk, narrow<std::int64_t>(tokens));
  shape.compute = compute;
  shape.store_units = store_units_of(architecture);
  for (const StoreUnit& unit : shape.store_units) static_cast<void>(checked_mul(unit.elements, 16));  // all planes have a size
  shape.tied_unit = architecture.tied_embeddings ? shape.store_unit_count() - 1 : -1;
  shape.boundary_bytes = checked_mul(checked_mul(tokens, size(architecture.hidden_size)), dtype_size(compute));
  shape.input_bytes = checked_mul(tokens, 2 * sizeof(std::int32_t));
  if (architecture.position == PositionKind::rope) {
    const std::uint64_t angles = checked_mul(size(batch.seq_len), size(architecture.head_dim / 2));
    shape.constant_bytes = 2 * aligned(checked_mul(angles, sizeof(float)));
  }

  const Flops flops = flops_of(architecture, batch);
  shape.units.push_back(embedding_unit(shape));
  shape.units.resize(shape.units.size() + size(architecture.layers), layer_unit(shape, flops));
  shape.units.push_back(head_unit(shape, flops));
  for (int u = 0; u < shape.unit_count(); ++u) {
    ComputeUnit& unit = shape.units[static_cast<std::size_t>(u)];
    unit.name = shape.store_units[static_cast<std::size_t>(u)].name;
    unit.store_units = {u};
    if (shape.tied_unit >= 0 && unit.kind != UnitKind::layer) unit.store_units.push_back(shape.tied_unit);
  }
  return shape;
}

double model_flops_per_token(const ModelShape& shape) {
  const Flops flops = flops_of(shape.architecture, shape.batch);
  const double layers = static_cast<double>(shape.architecture.layers);
  return 3 * (layers * flops.layer_forward + flops.head_forward) / static_cast<double>(shape.tokens_per_micro());
}

}  // namespace spipe::model
