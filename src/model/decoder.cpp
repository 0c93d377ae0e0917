// A long prompt goes through in chunks, so that scratch memory does not grow with it; then a token at a time.
#include "spipe/model/decoder.h"

#include <algorithm>
#include <new>
#include <utility>

#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/model/layers.h"

namespace spipe::model {
namespace {

constexpr std::int64_t kChunk = 128;  // tokens of a prompt that go through the layers together

class Buffer {
 public:
  explicit Buffer(std::uint64_t bytes) : data_(::operator new(std::max<std::uint64_t>(bytes, 1), kAlignment)) {}
  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(data_.get()); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Delete {
    void operator()(void* p) const { ::operator delete(p, kAlignment); }
  };
  std::unique_ptr<void, Delete> data_;
};

Architecture without_dropout(Architecture a) {
  a.dropout_embedding = a.dropout_attention_out = a.dropout_mlp_out = 0;
  return a;
}

ModelShape shape_of(const Architecture& a, DType compute, std::int64_t tokens) {
  return make_shape(without_dropout(a), {.micro = 1, .seq_len = tokens, .head_chunk = 1}, compute);
}

std::uint64_t cache_row_bytes(const Architecture& a, DType compute) {
  return checked_mul(narrow<std::uint64_t>(2 * a.kv_size()), dtype_size(compute));
}

std::uint64_t head_workspace(const Architecture& a) { return narrow<std::uint64_t>(a.hidden_size) * 4 + 8 + 64; }

std::uint64_t workspace_of(const ModelShape& shape) {
  return std::max(shape.units[1].forward_workspace, head_workspace(shape.architecture));
}

}  // namespace

struct Decoder::Impl {
  Impl(const Architecture& a, DType compute, std::vector<const void*> slabs, Ops& given, std::int64_t tokens)
      : ops(given),
        parameters(std::move(slabs)),
        capacity(tokens),
        whole(shape_of(a, compute, tokens)),
        chunk(shape_of(a, compute, std::min(tokens, kChunk))),
        one(shape_of(a, compute, 1)),
        constants_memory(whole.constant_bytes),
        boundaries{Buffer(chunk.boundary_bytes), Buffer(chunk.boundary_bytes)},
        workspace(workspace_of(chunk)),
        cache(checked_mul(layer_cache_bytes(), narrow<std::uint64_t>(a.layers))),
        logits(narrow<std::size_t>(a.vocab_size)) {
    constants = fill_constants(whole, constants_memory.data());
  }

  [[nodiscard]] std::uint64_t layer_cache_bytes() const {
    return checked_mul(narrow<std::uint64_t>(capacity), cache_row_bytes(whole.architecture, whole.compute));
  }
  [[nodiscard]] UnitCall call_of(int unit);
  void check_parameters() const;
  void pass(const ModelShape& shape, std::span<const std::int32_t> tokens);

  Ops& ops;
  std::vector<const void*> parameters;
  std::int64_t capacity, length = 0;
  ModelShape whole, chunk, one;  // of the sequence (tables), of a piece of a prompt, of a token
  Buffer constants_memory;
  Constants constants;
  Buffer boundaries[2];
  Buffer workspace, cache;
  std::vector<float> logits;
  std::vector<UnitMemory> memory;
};

void Decoder::Impl::check_parameters() const {
  SPIPE_CHECK(parameters.size() == whole.store_units.size(), "a decoder needs the slab of every store unit");
  for (std::size_t s = 0; s < parameters.size(); ++s) {
    const bool empty = whole.store_units[s].parameters.empty();
    SPIPE_CHECK(empty || parameters[s] != nullptr, "no parameters of " + whole.store_units[s].name);
  }
}

UnitCall Decoder::Impl::call_of(int unit) {
  memory.clear();
  for (const int s : whole.units[static_cast<std::size_t>(unit)].store_units) {
    memory.push_back({.parameters = parameters[static_cast<std::size_t>(s)]});
  }
  UnitCall call;
  call.ops = &ops;
  call.constants = constants;
  call.memory = memory;
  call.input = boundaries[(unit + 1) % 2].data();
  call.output = boundaries[unit % 2].data();
  call.workspace = workspace.data();
  call.cache.past = length;
  return call;
}

void Decoder::Impl::pass(const ModelShape& shape, std::span<const std::int32_t> tokens) {
  const int head = shape.unit_count() - 1;
  for (int unit = 0; unit < head; ++unit) {
    UnitCall call = call_of(unit);
    call.tokens = tokens.data();
    if (unit > 0) call.cache.rows = cache.data() + static_cast<std::uint64_t>(unit - 1) * layer_cache_bytes();
    unit_forward(shape, unit, call);
  }
  length += narrow<std::int64_t>(tokens.size());
}

Decoder::Decoder(const Architecture& architecture, DType compute, std::vector<const void*> parameters, Ops& ops,
                 std::int64_t capacity) {
  SPIPE_CHECK(capacity > 0, "a decoder without room for a token");
  SPIPE_CHECK(architecture.position == PositionKind::rope || capacity <= architecture.max_positions,
              "a sequence is at most as long as the position table");
  impl_ = std::make_unique<Impl>(architecture, compute, std::move(parameters), ops, capacity);
  impl_->check_parameters();
}

Decoder::~Decoder() = default;

std::span<const float> Decoder::append(std::span<const std::int32_t> tokens) {
  Impl& impl = *impl_;
  const auto count = narrow<std::int64_t>(tokens.size());
  const std::int64_t vocab = impl.whole.architecture.vocab_size;
  SPIPE_CHECK(count > 0 && impl.length + count <= impl.capacity, "a sequence outgrows its decoder");
  SPIPE_CHECK(std::all_of(tokens.begin(), tokens.end(), [&](std::int32_t id) { return id >= 0 && id < vocab; }),
              "a token is not in the vocabulary");
  std::int64_t last_rows = 1;
  while (!tokens.empty()) {
    last_rows = std::min(narrow<std::int64_t>(tokens.size()), kChunk);
    const auto part = tokens.first(static_cast<std::size_t>(last_rows));
    if (last_rows == 1) {
      impl.pass(impl.one, part);
    } else if (last_rows == impl.chunk.batch.seq_len) {
      impl.pass(impl.chunk, part);
    } else {
      impl.pass(shape_of(impl.whole.architecture, impl.whole.compute, last_rows), part);
    }
    tokens = tokens.subspan(part.size());
  }
  const int head = impl.whole.unit_count() - 1;
  UnitCall call = impl.call_of(head);
  const ConstPtr boundary(call.input, impl.whole.compute);
  call.input = offset(boundary, (last_rows - 1) * impl.whole.architecture.hidden_size).data;
  head_logits(impl.one, call, 1, impl.logits.data());
  return impl.logits;
}

void Decoder::clear() { impl_->length = 0; }
void Decoder::clear(std::vector<const void*> parameters) {
  impl_->parameters = std::move(parameters);
  impl_->check_parameters();
  impl_->length = 0;
}
std::int64_t Decoder::length() const { return impl_->length; }
std::int64_t Decoder::capacity() const { return impl_->capacity; }

std::uint64_t Decoder::bytes(const Architecture& architecture, DType compute, std::int64_t capacity) {
  const ModelShape whole = shape_of(architecture, compute, capacity);
  const ModelShape chunk = shape_of(architecture, compute, std::min(capacity, kChunk));
  const std::uint64_t rows = checked_mul(narrow<std::uint64_t>(capacity), narrow<std::uint64_t>(architecture.layers));
  std::uint64_t bytes = checked_mul(rows, cache_row_bytes(architecture, compute));
  bytes = checked_add(bytes, whole.constant_bytes);
  bytes = checked_add(bytes, 2 * chunk.boundary_bytes + workspace_of(chunk));
  return checked_add(bytes, narrow<std::uint64_t>(architecture.vocab_size) * sizeof(float));
}

}  // namespace spipe::model
