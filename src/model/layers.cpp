// Dispatch by unit kind, and the embedding.
#include "spipe/model/layers.h"

#include "spipe/base/error.h"
#include "unit_view.h"

namespace spipe::model {
namespace {

void embedding_forward(const ModelShape& shape, int unit, const UnitCall& call) {
  const Architecture& a = shape.architecture;
  const UnitView tensors(shape, unit, call);
  const Ptr output{call.output, shape.compute};
  call.ops->embedding_forward(call.stream, {.tokens = call.tokens,
                                            .table = tensors[Role::token_table].value,
                                            .positions = tensors[Role::position_table].value,
                                            .out = output,
                                            .count = shape.tokens_per_micro(),
                                            .seq_len = shape.batch.seq_len,
                                            .cols = a.hidden_size,
                                            .vocab = a.vocab_size,
                                            .first_position = a.position_offset + call.cache.past});
  if (a.dropout_embedding > 0) apply_dropout(shape, unit, call, Site::embedding, a.dropout_embedding, output, output);
}

void embedding_backward(const ModelShape& shape, int unit, const UnitCall& call) {
  const Architecture& a = shape.architecture;
  const UnitView tensors(shape, unit, call);
  const EmbeddingScratch at = embedding_backward_scratch(a, shape.tokens_per_micro(), shape.compute);
  ConstPtr gradient(call.output_gradient, shape.compute);
  if (a.dropout_embedding > 0) {
    const Ptr dropped = piece_at(call.workspace, at.dropped, shape.compute);
    apply_dropout(shape, unit, call, Site::embedding, a.dropout_embedding, gradient, dropped);
    gradient = dropped;
  }
  const Tensor& table = tensors[Role::token_table];
  const Tensor& positions = tensors[Role::position_table];
  EmbeddingBackwardArgs args{.tokens = call.tokens,
                             .dout = gradient,
                             .dtable = table.gradient,
                             .dpositions = positions.gradient,
                             .workspace = static_cast<char*>(call.workspace) + at.sorting.offset,
                             .count = shape.tokens_per_micro(),
                             .seq_len = shape.batch.seq_len,
                             .cols = a.hidden_size,
                             .vocab = a.vocab_size,
                             .first_position = a.position_offset,
                             .position_rows = a.max_positions + a.position_offset,
                             .accumulate = table.accumulate};
  if (positions && positions.accumulate != table.accumulate) {  // a tied table and its positions live in two store units
    args.dpositions = {};
    call.ops->embedding_backward(call.stream, args);
    args.dpositions = positions.gradient;
    args.dtable = {};
    args.accumulate = positions.accumulate;
  }
  call.ops->embedding_backward(call.stream, args);
}

const ComputeUnit& checked_unit(const ModelShape& shape, int unit, const UnitCall& call) {
  SPIPE_CHECK(unit >= 0 && unit < shape.unit_count(), "no such compute unit");
  SPIPE_CHECK(call.ops != nullptr, "a call without Ops");
  return shape.units[static_cast<std::size_t>(unit)];
}

void check_gradients(const UnitCall& call) {
  for (const UnitMemory& memory : call.memory) {
    SPIPE_CHECK(memory.gradient != nullptr || memory.parameters == nullptr, "backward without a gradient accumulator");
  }
}

}  // namespace

void unit_forward(const ModelShape& shape, int unit, const UnitCall& call) {
  const ComputeUnit& compute = checked_unit(shape, unit, call);
  SPIPE_CHECK(call.output != nullptr, "forward without an output boundary");
  if (compute.kind == UnitKind::embedding) {
    SPIPE_CHECK(call.tokens != nullptr, "the embedding needs tokens");
    embedding_forward(shape, unit, call);
    return;
  }
  SPIPE_CHECK(compute.kind == UnitKind::layer, "the head has no forward of its own: head_loss or head_logits");
  SPIPE_CHECK(call.input != nullptr && call.input != call.output && call.workspace != nullptr,
              "a layer's forward needs an input boundary beside its output, and a workspace");
  SPIPE_CHECK(call.cache.rows == nullptr || (call.saved == nullptr && shape.batch.micro == 1),
              "a forward with a cache is of one sequence and saves nothing");
  layer_forward(shape, unit, call);
}

void unit_backward(const ModelShape& shape, int unit, const UnitCall& call) {
  const ComputeUnit& compute = checked_unit(shape, unit, call);
  SPIPE_CHECK(call.output_gradient != nullptr && call.workspace != nullptr, "backward needs output_gradient and a workspace");
  check_gradients(call);
  if (compute.kind == UnitKind::embedding) {
    SPIPE_CHECK(call.tokens != nullptr, "the embedding needs tokens");
    embedding_backward(shape, unit, call);
    return;
  }
  SPIPE_CHECK(compute.kind == UnitKind::layer, "the head's backward is part of head_loss");
  SPIPE_CHECK(call.input != nullptr && call.saved != nullptr && call.input_gradient != nullptr,
              "a layer's backward needs its input, what forward saved, and input_gradient");
  layer_backward(shape, unit, call);
}

}  // namespace spipe::model
