#include "unit_view.h"

#include "spipe/base/error.h"

namespace spipe::model {
namespace {

std::vector<TensorSpec> specs_of(const ModelShape& shape, const ComputeUnit& unit, int store_unit) {
  if (store_unit == shape.tied_unit) return tied_tensors(shape.architecture);
  switch (unit.kind) {
    case UnitKind::embedding:
      return embedding_tensors(shape.architecture);
    case UnitKind::layer:
      return layer_tensors(shape.architecture);
    case UnitKind::head:
      return head_tensors(shape.architecture);
  }
  SPIPE_CHECK(false, "unknown unit kind");
}

bool adjacent(ConstPtr first, std::int64_t elements, ConstPtr second) { return offset(first, elements).data == second.data; }

}  // namespace

UnitView::UnitView(const ModelShape& shape, int unit, const UnitCall& call) {
  const ComputeUnit& compute = shape.units[static_cast<std::size_t>(unit)];
  SPIPE_CHECK(call.memory.size() == compute.store_units.size(), "a call needs the memory of each of its store units");
  for (std::size_t i = 0; i < call.memory.size(); ++i) {
    const UnitMemory& memory = call.memory[i];
    const std::vector<Parameter>& parameters = shape.store_units[static_cast<std::size_t>(compute.store_units[i])].parameters;
    const std::vector<TensorSpec> specs = specs_of(shape, compute, compute.store_units[i]);
    SPIPE_CHECK(specs.size() == parameters.size(), "store units and tensor lists disagree");
    for (std::size_t t = 0; t < specs.size(); ++t) {
      // The embedding's backward scatters gradients and reads no parameters.
      const bool scatters = compute.kind == UnitKind::embedding && call.output_gradient != nullptr;
      SPIPE_CHECK(memory.parameters != nullptr || scatters, "a call without the parameters of " + parameters[t].name);
      const std::int64_t at = static_cast<std::int64_t>(parameters[t].offset);
      Tensor& tensor = tensors_[static_cast<std::size_t>(specs[t].role)];
      if (memory.parameters != nullptr) tensor.value = offset(ConstPtr(memory.parameters, shape.compute), at);
      if (memory.gradient != nullptr) tensor.gradient = {memory.gradient + at, DType::f32};
      tensor.accumulate = memory.accumulate;
    }
  }
}

Linear::Linear(const ModelShape& shape, std::int64_t in, std::initializer_list<LinearPart> parts)
    : in_(in), conv1d_(shape.architecture.conv1d) {
  const auto append = [](Parts& to, const LinearPart& part, bool join) {
    if (join) {
      to.list[to.count - 1].out += part.out;
    } else {
      to.list[to.count++] = part;
    }
  };
  const LinearPart* last = nullptr;
  for (const LinearPart& part : parts) {
    const bool join = last != nullptr && !conv1d_ && adjacent(last->weight.value, last->out * in, part.weight.value);
    const bool biases = last != nullptr && (!part.bias || adjacent(last->bias.value, last->out, part.bias.value));
    append(matrices_, part, join);
    append(biased_, part, join && biases);
    out_ += part.out;
    last = &part;
  }
}

void Linear::forward(const UnitCall& call, ConstPtr x, Ptr y, std::int64_t rows) const {
  std::int64_t column = 0;
  for (const LinearPart& part : biased_.all()) {
    call.ops->matmul(call.stream, {.a = x,
                                   .b = part.weight.value,
                                   .c = offset(y, column),
                                   .m = rows,
                                   .n = part.out,
                                   .k = in_,
                                   .trans_b = !conv1d_,
                                   .ldc = out_,
                                   .bias = part.bias.value});
    column += part.out;
  }
}

void Linear::backward_parameters(const UnitCall& call, ConstPtr x, ConstPtr dy, std::int64_t rows) const {
  std::int64_t column = 0;
  for (const LinearPart& part : matrices_.all()) {
    const ConstPtr gradient = offset(dy, column);
    // Conv1D weights are [in, out], the others [out, in].
    call.ops->matmul(call.stream, {.a = conv1d_ ? x : gradient,
                                   .b = conv1d_ ? gradient : x,
                                   .c = part.weight.gradient,
                                   .m = conv1d_ ? in_ : part.out,
                                   .n = conv1d_ ? part.out : in_,
                                   .k = rows,
                                   .trans_a = true,
                                   .accumulate = part.weight.accumulate,
                                   .lda = conv1d_ ? in_ : out_,
                                   .ldb = conv1d_ ? out_ : in_});
    column += part.out;
  }
  column = 0;
  for (const LinearPart& part : biased_.all()) {
    if (part.bias) {
      call.ops->column_sum(call.stream, {.x = offset(dy, column),
                                         .out = part.bias.gradient,
                                         .rows = rows,
                                         .cols = part.out,
                                         .ldx = out_,
                                         .accumulate = part.bias.accumulate});
    }
    column += part.out;
  }
}

void Linear::backward_input(const UnitCall& call, ConstPtr dy, Ptr dx, Ptr partial, std::int64_t rows) const {
  const bool sums_in_place = dx.dtype == DType::f32;  // matmuls add to fp32 only
  std::int64_t column = 0;
  for (const LinearPart& part : matrices_.all()) {
    const bool first = column == 0;
    call.ops->matmul(call.stream, {.a = offset(dy, column),
                                   .b = part.weight.value,
                                   .c = first || sums_in_place ? dx : partial,
                                   .m = rows,
                                   .n = in_,
                                   .k = part.out,
                                   .trans_b = conv1d_,
                                   .accumulate = !first && sums_in_place,
                                   .lda = out_});
    if (!first && !sums_in_place) call.ops->add(call.stream, {.a = dx, .b = partial, .out = dx, .elements = rows * in_});
    column += part.out;
  }
}

void Norm::forward(const UnitCall& call, ConstPtr x, Ptr y, ConstPtr residual, Ptr sum_out) const {
  if (kind == NormKind::layernorm) {
    call.ops->layernorm_forward(call.stream, {.x = x,
                                              .residual = residual,
                                              .weight = weight->value,
                                              .bias = bias->value,
                                              .sum_out = sum_out,
                                              .y = y,
                                              .mean = mean,
                                              .rstd = rstd,
                                              .rows = rows,
                                              .cols = cols,
                                              .eps = eps});
  } else {
    call.ops->rmsnorm_forward(call.stream, {.x = x,
                                            .residual = residual,
                                            .weight = weight->value,
                                            .sum_out = sum_out,
                                            .y = y,
                                            .rstd = rstd,
                                            .outer = rows,
                                            .cols = cols,
                                            .eps = eps});
  }
}

void Norm::backward(const UnitCall& call, ConstPtr dy, ConstPtr x, Ptr dx, ConstPtr residual_grad) const {
  if (kind == NormKind::layernorm) {
    SPIPE_CHECK(weight->accumulate == bias->accumulate, "a norm's weight and bias share their accumulator");
    call.ops->layernorm_backward(call.stream, {.dy = dy,
                                               .x = x,
                                               .weight = weight->value,
                                               .residual_grad = residual_grad,
                                               .mean = mean,
                                               .rstd = rstd,
                                               .dx = dx,
                                               .dweight = weight->gradient,
                                               .dbias = bias->gradient,
                                               .rows = rows,
                                               .cols = cols,
                                               .accumulate = weight->accumulate});
  } else {
    call.ops->rmsnorm_backward(call.stream, {.dy = dy,
                                             .x = x,
                                             .weight = weight->value,
                                             .residual_grad = residual_grad,
                                             .rstd = rstd,
                                             .dx = dx,
                                             .dweight = weight->gradient,
                                             .outer = rows,
                                             .cols = cols,
                                             .accumulate = weight->accumulate});
  }
}

void apply_dropout(const ModelShape& shape, int unit, const UnitCall& call, Site site, double p, ConstPtr x, Ptr y) {
  constexpr std::uint32_t kSitesPerUnit = 4;
  call.ops->dropout(call.stream, {.x = x,
                                  .y = y,
                                  .sequences = shape.batch.micro,
                                  .elements_per_sequence = shape.batch.seq_len * shape.architecture.hidden_size,
                                  .seed = call.seed,
                                  .step = call.step,
                                  .first_sequence = call.first_sequence,
                                  .site = static_cast<std::uint32_t>(unit) * kSitesPerUnit + static_cast<std::uint32_t>(site),
                                  .p = static_cast<float>(p)});
}

}  // namespace spipe::model
