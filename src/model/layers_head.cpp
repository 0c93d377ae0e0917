// The head: final norm, LM head and cross-entropy, `head_chunk` rows of logits at a time, forward and backward at once.
#include <algorithm>

#include "spipe/base/error.h"
#include "spipe/model/layers.h"
#include "unit_view.h"

namespace spipe::model {
namespace {

class Head {
 public:
  Head(const ModelShape& shape, const UnitCall& call)
      : shape_(shape), a_(shape.architecture), call_(call), tensors_(shape, shape.unit_count() - 1, call) {}

  void loss_and_gradients() const;
  void loss_only() const;
  void logits(std::int64_t rows, float* out) const;

 private:
  [[nodiscard]] const Tensor& matrix() const { return tensors_[a_.tied_embeddings ? Role::token_table : Role::head_weight]; }
  [[nodiscard]] ConstPtr input() const { return {call_.input, shape_.compute}; }
  [[nodiscard]] Norm norm(const HeadScratch& at, std::int64_t rows) const;
  void project(ConstPtr normed, float* logits, std::int64_t rows, std::int64_t ld) const;
  void cross_entropy(float* logits, std::int64_t first, std::int64_t rows, float scale) const;
  // Gradients of one chunk: dW (+)= dlogits^T normed, then normed = dlogits W in place (each row is read for the last time).
  void chunk_backward(const HeadScratch& at, float* logits, Ptr normed, std::int64_t rows, bool accumulate) const;

  const ModelShape& shape_;
  const Architecture& a_;
  const UnitCall& call_;
  UnitView tensors_;
};

Norm Head::norm(const HeadScratch& at, std::int64_t rows) const {
  return {.kind = a_.norm,
          .weight = &tensors_[Role::final_norm_weight],
          .bias = &tensors_[Role::final_norm_bias],
          .rows = rows,
          .cols = a_.hidden_size,
          .eps = static_cast<float>(a_.norm_eps),
          .mean = floats_at(call_.workspace, at.mean),
          .rstd = floats_at(call_.workspace, at.rstd)};
}

void Head::project(ConstPtr normed, float* logits, std::int64_t rows, std::int64_t ld) const {
  call_.ops->matmul(call_.stream, {.a = normed,
                                   .b = matrix().value,
                                   .c = {logits, DType::f32},
                                   .m = rows,
                                   .n = a_.vocab_size,
                                   .k = a_.hidden_size,
                                   .trans_b = true,
                                   .ldc = ld});
}

void Head::cross_entropy(float* logits, std::int64_t first, std::int64_t rows, float scale) const {
  call_.ops->softmax_cross_entropy(call_.stream, {.logits = logits,
                                                  .targets = call_.targets + first,
                                                  .nll = call_.nll + first,
                                                  .rows = rows,
                                                  .cols = a_.vocab_size,
                                                  .ld = logits_ld(a_),
                                                  .scale = scale});
}

void Head::chunk_backward(const HeadScratch& at, float* logits, Ptr normed, std::int64_t rows, bool accumulate) const {
  ConstPtr gradient(logits, DType::f32);
  if (shape_.compute != DType::f32) {
    const Ptr rounded = piece_at(call_.workspace, at.rounded, shape_.compute);
    call_.ops->convert(call_.stream, {.src = gradient, .dst = rounded, .elements = rows * logits_ld(a_)});
    gradient = rounded;
  }
  call_.ops->matmul(call_.stream, {.a = gradient,
                                   .b = normed,
                                   .c = matrix().gradient,
                                   .m = a_.vocab_size,
                                   .n = a_.hidden_size,
                                   .k = rows,
                                   .trans_a = true,
                                   .accumulate = accumulate,
                                   .lda = logits_ld(a_)});
  call_.ops->matmul(call_.stream, {.a = gradient,
                                   .b = matrix().value,
                                   .c = normed,
                                   .m = rows,
                                   .n = a_.hidden_size,
                                   .k = a_.vocab_size,
                                   .lda = logits_ld(a_)});
}

void Head::loss_and_gradients() const {
  const std::int64_t rows = shape_.tokens_per_micro(), chunk = shape_.batch.head_chunk;
  const HeadScratch at = head_scratch(a_, rows, chunk, shape_.compute, true);
  const Ptr hidden = piece_at(call_.workspace, at.hidden, shape_.compute);
  float* const logits = floats_at(call_.workspace, at.logits);
  // Columns between the vocabulary and the row length are never written again; they must be finite for the conversion.
  if (shape_.compute != DType::f32)
    call_.ops->zero(call_.stream, {.dst = {logits, DType::f32}, .elements = chunk * logits_ld(a_)});

  norm(at, rows).forward(call_, input(), hidden);
  for (std::int64_t first = 0; first < rows; first += chunk) {
    const std::int64_t count = std::min(chunk, rows - first);
    const Ptr normed = offset(hidden, first * a_.hidden_size);
    project(normed, logits, count, logits_ld(a_));
    cross_entropy(logits, first, count, call_.loss_scale);
    chunk_backward(at, logits, normed, count, matrix().accumulate || first > 0);
  }
  norm(at, rows).backward(call_, hidden, input(), {call_.input_gradient, shape_.compute}, {});
}

void Head::loss_only() const {
  const std::int64_t rows = shape_.tokens_per_micro(), chunk = shape_.batch.head_chunk;
  const HeadScratch at = head_scratch(a_, chunk, chunk, shape_.compute, false);
  const Ptr hidden = piece_at(call_.workspace, at.hidden, shape_.compute);
  float* const logits = floats_at(call_.workspace, at.logits);
  for (std::int64_t first = 0; first < rows; first += chunk) {
    const std::int64_t count = std::min(chunk, rows - first);
    norm(at, count).forward(call_, offset(input(), first * a_.hidden_size), hidden);
    project(hidden, logits, count, logits_ld(a_));
    cross_entropy(logits, first, count, 0);
  }
}

void Head::logits(std::int64_t rows, float* out) const {
  const auto count = static_cast<std::uint64_t>(rows), statistics = count * sizeof(float);
  HeadScratch at;  // the header promises a size without room for alignment
  at.hidden.bytes = count * static_cast<std::uint64_t>(a_.hidden_size) * sizeof(float);
  at.mean = {at.hidden.bytes, statistics};
  at.rstd = {at.hidden.bytes + statistics, statistics};
  const Ptr hidden = piece_at(call_.workspace, at.hidden, shape_.compute);
  norm(at, rows).forward(call_, input(), hidden);
  project(hidden, out, rows, a_.vocab_size);
}

void check_call(const ModelShape& shape, const UnitCall& call) {
  SPIPE_CHECK(shape.unit_count() > 0 && call.ops != nullptr, "a head call without Ops");
  SPIPE_CHECK(call.input != nullptr && call.workspace != nullptr, "the head needs an input boundary and a workspace");
}

}  // namespace

void head_loss(const ModelShape& shape, const UnitCall& call) {
  check_call(shape, call);
  SPIPE_CHECK(call.targets != nullptr && call.nll != nullptr, "the loss needs targets and a place for token losses");
  if (call.input_gradient == nullptr) {
    Head(shape, call).loss_only();
    return;
  }
  for (const UnitMemory& memory : call.memory) SPIPE_CHECK(memory.gradient != nullptr, "the loss needs gradient accumulators");
  SPIPE_CHECK(call.loss_scale != 0, "a loss with gradients needs loss_scale != 0");
  Head(shape, call).loss_and_gradients();
}

void head_logits(const ModelShape& shape, const UnitCall& call, std::int64_t rows, float* out) {
  check_call(shape, call);
  SPIPE_CHECK(rows > 0 && out != nullptr, "logits need rows and a destination");
  Head(shape, call).logits(rows, out);
}

}  // namespace spipe::model
