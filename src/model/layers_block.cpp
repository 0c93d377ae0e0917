// A transformer layer, pre-norm, for all families:
//   h = input + dropout(attention(norm1(input)) Wo),  output = h + dropout(mlp(norm2(h)))
// Backward repeats norms and activation (buffers.h says why) and walks the same chain in reverse.
#include <cmath>

#include "spipe/base/error.h"
#include "unit_view.h"

namespace spipe::model {
namespace {

Activation activation_of(MlpKind kind) {
  switch (kind) {
    case MlpKind::gelu_tanh:
      return Activation::gelu_tanh;
    case MlpKind::gelu_erf:
      return Activation::gelu_erf;
    case MlpKind::relu:
      return Activation::relu;
    case MlpKind::swiglu:
      return Activation::silu;
  }
  SPIPE_CHECK(false, "unknown MLP");
}

float attention_scale(const Architecture& a) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(a.head_dim))); }

// What both passes of one call share: tensors, buffers, sizes.
class Layer {
 public:
  Layer(const ModelShape& shape, int unit, const UnitCall& call, LayerMode mode);
  void forward(LayerMode mode);
  void backward();

 private:
  [[nodiscard]] Ptr scratch(const Piece& piece) const { return piece_at(call_.workspace, piece, shape_.compute); }
  [[nodiscard]] Ptr saved(std::string_view field) const;
  [[nodiscard]] Norm norm(Role weight, Role bias) const;
  [[nodiscard]] Linear qkv_linear() const;
  [[nodiscard]] Linear mlp_linear() const;
  void rotate(Ptr x, std::int64_t stride, bool backward) const;
  void norm_heads(ConstPtr from, std::int64_t from_stride, Ptr to, std::int64_t to_stride) const;
  void norm_heads_backward(ConstPtr raw, Ptr gradient) const;
  void activate(ConstPtr pre_activation, Ptr activated) const;
  // The place of rotated q and k, and the distance between its rows.
  struct Rotated {
    Ptr q, k;
    std::int64_t stride;
  };
  [[nodiscard]] AttentionForwardArgs attention_args(const Rotated& rotated, ConstPtr v) const;
  void keep_keys_and_values(ConstPtr qkv, AttentionForwardArgs& args) const;
  [[nodiscard]] Rotated prepare_qk(Ptr qkv, bool keep_raw) const;
  void mlp_backward();
  void attention_backward();

  const ModelShape& shape_;
  const Architecture& a_;
  const UnitCall& call_;
  int unit_;
  UnitView tensors_;
  LayerScratch at_;
  std::int64_t rows_;
  Norm norm1_, norm2_;
  Linear qkv_linear_, out_linear_, mlp_linear_, down_linear_;
};

Layer::Layer(const ModelShape& shape, int unit, const UnitCall& call, LayerMode mode)
    : shape_(shape),
      a_(shape.architecture),
      call_(call),
      unit_(unit),
      tensors_(shape, unit, call),
      at_(layer_scratch(a_, shape.tokens_per_micro(), shape.compute, mode)),
      rows_(shape.tokens_per_micro()),
      norm1_(norm(Role::norm1_weight, Role::norm1_bias)),
      norm2_(norm(Role::norm2_weight, Role::norm2_bias)),
      qkv_linear_(qkv_linear()),
      out_linear_(shape, a_.q_size(), {{tensors_[Role::out_weight], tensors_[Role::out_bias], a_.hidden_size}}),
      mlp_linear_(mlp_linear()),
      down_linear_(shape, a_.ffn_size, {{tensors_[Role::down_weight], tensors_[Role::down_bias], a_.hidden_size}}) {}

Ptr Layer::saved(std::string_view field) const {
  const Field& found = shape_.units[static_cast<std::size_t>(unit_)].saved.at(field);
  return {static_cast<char*>(call_.saved) + found.offset, found.dtype};
}

Norm Layer::norm(Role weight, Role bias) const {
  return {.kind = a_.norm,
          .weight = &tensors_[weight],
          .bias = &tensors_[bias],
          .rows = rows_,
          .cols = a_.hidden_size,
          .eps = static_cast<float>(a_.norm_eps),
          .mean = floats_at(call_.workspace, at_.mean),
          .rstd = floats_at(call_.workspace, at_.rstd)};
}

Linear Layer::qkv_linear() const {
  if (a_.fused_qkv) return {shape_, a_.hidden_size, {{tensors_[Role::qkv_weight], tensors_[Role::qkv_bias], a_.qkv_size()}}};
  return {shape_,
          a_.hidden_size,
          {{tensors_[Role::q_weight], tensors_[Role::q_bias], a_.q_size()},
           {tensors_[Role::k_weight], tensors_[Role::k_bias], a_.kv_size()},
           {tensors_[Role::v_weight], tensors_[Role::v_bias], a_.kv_size()}}};
}

Linear Layer::mlp_linear() const {
  const LinearPart up{tensors_[Role::up_weight], tensors_[Role::up_bias], a_.ffn_size};
  if (a_.mlp != MlpKind::swiglu) return {shape_, a_.hidden_size, {up}};
  return {shape_, a_.hidden_size, {{tensors_[Role::gate_weight], tensors_[Role::gate_bias], a_.ffn_size}, up}};
}

// RoPE on q and k, which stand side by side at `x`.
void Layer::rotate(Ptr x, std::int64_t stride, bool backward) const {
  if (a_.position != PositionKind::rope) return;
  call_.ops->rope(call_.stream, {.x = x,
                                 .cos = call_.constants.rope_cos,
                                 .sin = call_.constants.rope_sin,
                                 .tokens = rows_,
                                 .seq_len = shape_.batch.seq_len,
                                 .heads = a_.heads + a_.kv_heads,
                                 .head_dim = a_.head_dim,
                                 .x_stride = stride,
                                 .first_position = call_.cache.past,
                                 .backward = backward});
}

void Layer::norm_heads(ConstPtr from, std::int64_t from_stride, Ptr to, std::int64_t to_stride) const {
  RmsNormForwardArgs args{.x = from,
                          .weight = tensors_[Role::q_norm].value,
                          .y = to,
                          .rstd = floats_at(call_.workspace, at_.q_rstd),
                          .outer = rows_,
                          .inner = a_.heads,
                          .cols = a_.head_dim,
                          .x_stride = from_stride,
                          .y_stride = to_stride,
                          .eps = static_cast<float>(a_.norm_eps)};
  call_.ops->rmsnorm_forward(call_.stream, args);
  args.x = offset(from, a_.q_size());
  args.weight = tensors_[Role::k_norm].value;
  args.y = offset(to, a_.q_size());
  args.rstd = floats_at(call_.workspace, at_.k_rstd);
  args.inner = a_.kv_heads;
  call_.ops->rmsnorm_forward(call_.stream, args);
}

// Turns the gradient at normed q and k into the one at the raw ones, in place; statistics are those of norm_heads.
void Layer::norm_heads_backward(ConstPtr raw, Ptr gradient) const {
  const std::int64_t stride = a_.qkv_size();
  RmsNormBackwardArgs args{.dy = gradient,
                           .x = raw,
                           .weight = tensors_[Role::q_norm].value,
                           .rstd = floats_at(call_.workspace, at_.q_rstd),
                           .dx = gradient,
                           .dweight = tensors_[Role::q_norm].gradient,
                           .outer = rows_,
                           .inner = a_.heads,
                           .cols = a_.head_dim,
                           .dy_stride = stride,
                           .x_stride = stride,
                           .dx_stride = stride,
                           .accumulate = tensors_[Role::q_norm].accumulate};
  call_.ops->rmsnorm_backward(call_.stream, args);
  args.dy = args.dx = offset(gradient, a_.q_size());
  args.x = offset(raw, a_.q_size());
  args.weight = tensors_[Role::k_norm].value;
  args.rstd = floats_at(call_.workspace, at_.k_rstd);
  args.dweight = tensors_[Role::k_norm].gradient;
  args.inner = a_.kv_heads;
  call_.ops->rmsnorm_backward(call_.stream, args);
}

// Norm (QK-norm only) and RoPE of q and k. `keep_raw`: with QK-norm the rows of qkv stay as they are, for backward.
Layer::Rotated Layer::prepare_qk(Ptr qkv, bool keep_raw) const {
  Ptr q = qkv;
  std::int64_t stride = a_.qkv_size();
  if (a_.qk_norm) {
    if (keep_raw) {
      q = scratch(at_.qk);
      stride = a_.q_size() + a_.kv_size();
    }
    norm_heads(qkv, a_.qkv_size(), q, stride);
  }
  rotate(q, stride, false);
  return {q, offset(q, a_.q_size()), stride};
}

void Layer::activate(ConstPtr pre_activation, Ptr activated) const {
  if (a_.mlp == MlpKind::swiglu) {
    call_.ops->gated_forward(
        call_.stream, {.kind = Activation::silu, .x = pre_activation, .y = activated, .rows = rows_, .cols = a_.ffn_size});
  } else {
    call_.ops->activation_forward(
        call_.stream, {.kind = activation_of(a_.mlp), .x = pre_activation, .y = activated, .elements = rows_ * a_.ffn_size});
  }
}

AttentionForwardArgs Layer::attention_args(const Rotated& rotated, ConstPtr v) const {
  return {.q = rotated.q,
          .k = rotated.k,
          .v = v,
          .batch = shape_.batch.micro,
          .q_len = shape_.batch.seq_len,
          .kv_len = shape_.batch.seq_len,
          .heads = a_.heads,
          .kv_heads = a_.kv_heads,
          .head_dim = a_.head_dim,
          .window = a_.sliding_window,
          .q_stride = rotated.stride,
          .k_stride = rotated.stride,
          .v_stride = a_.qkv_size(),
          .out_stride = a_.q_size(),
          .scale = attention_scale(a_)};
}

// Moves this call's k | v, which stand side by side in a row of qkv, behind the rows of the cache, and lets attention read
// those of all tokens there.
void Layer::keep_keys_and_values(ConstPtr qkv, AttentionForwardArgs& args) const {
  const std::int64_t row = 2 * a_.kv_size();
  const Ptr cache{call_.cache.rows, shape_.compute};
  for (std::int64_t i = 0; i < rows_; ++i) {
    call_.ops->convert(call_.stream, {.src = offset(qkv, i * a_.qkv_size() + a_.q_size()),
                                      .dst = offset(cache, (call_.cache.past + i) * row),
                                      .elements = row});
  }
  args.k = cache;
  args.v = offset(ConstPtr(cache), a_.kv_size());
  args.k_stride = args.v_stride = row;
  args.kv_len = call_.cache.past + rows_;
}

// Whether something is saved changes only where buffers lie. `output` serves as scratch before its last write.
void Layer::forward(LayerMode mode) {
  const bool save = mode == LayerMode::save;
  const ConstPtr input(call_.input, shape_.compute);
  const Ptr output{call_.output, shape_.compute}, hidden = scratch(at_.hidden);
  const Ptr qkv = save ? saved("qkv") : scratch(at_.qkv), attention = save ? saved("attention") : scratch(at_.attention);
  float* const lse = save ? static_cast<float*>(saved("lse").data) : floats_at(call_.workspace, at_.lse);
  const Ptr residual = save ? saved("residual") : output, mlp = save ? saved("mlp") : scratch(at_.mlp);

  norm1_.forward(call_, input, hidden);
  qkv_linear_.forward(call_, hidden, qkv, rows_);
  AttentionForwardArgs args = attention_args(prepare_qk(qkv, save), offset(qkv, a_.q_size() + a_.kv_size()));
  args.out = attention;
  args.lse = lse;
  if (call_.cache.rows != nullptr) keep_keys_and_values(qkv, args);
  call_.ops->attention_forward(call_.stream, args);
  out_linear_.forward(call_, attention, output, rows_);
  if (a_.dropout_attention_out > 0) {
    apply_dropout(shape_, unit_, call_, Site::attention_out, a_.dropout_attention_out, output, output);
  }
  norm2_.forward(call_, output, hidden, input, residual);

  mlp_linear_.forward(call_, hidden, mlp, rows_);
  activate(mlp, scratch(at_.activated));
  down_linear_.forward(call_, scratch(at_.activated), hidden, rows_);
  if (a_.dropout_mlp_out > 0) apply_dropout(shape_, unit_, call_, Site::mlp_out, a_.dropout_mlp_out, hidden, hidden);
  call_.ops->add(call_.stream, {.a = residual, .b = hidden, .out = output, .elements = rows_ * a_.hidden_size});
}

// From output_gradient to the gradient at the sum after attention, which it leaves in input_gradient.
void Layer::mlp_backward() {
  const ConstPtr d_output(call_.output_gradient, shape_.compute);
  const Ptr activated = scratch(at_.activated), hidden = scratch(at_.hidden), mlp = saved("mlp");
  ConstPtr d_down = d_output;
  if (a_.dropout_mlp_out > 0) {
    apply_dropout(shape_, unit_, call_, Site::mlp_out, a_.dropout_mlp_out, d_output, scratch(at_.dropped));
    d_down = scratch(at_.dropped);
  }
  activate(mlp, activated);
  down_linear_.backward_parameters(call_, activated, d_down, rows_);
  down_linear_.backward_input(call_, d_down, activated, scratch(at_.partial), rows_);
  Ptr d_mlp = activated;
  if (a_.mlp == MlpKind::swiglu) {
    d_mlp = scratch(at_.mlp);
    call_.ops->gated_backward(
        call_.stream, {.kind = Activation::silu, .x = mlp, .dy = activated, .dx = d_mlp, .rows = rows_, .cols = a_.ffn_size});
  } else {
    call_.ops->activation_backward(
        call_.stream, {.kind = activation_of(a_.mlp), .x = mlp, .dy = activated, .dx = d_mlp, .elements = rows_ * a_.ffn_size});
  }
  norm2_.forward(call_, saved("residual"), hidden);
  mlp_linear_.backward_parameters(call_, hidden, d_mlp, rows_);
  mlp_linear_.backward_input(call_, d_mlp, hidden, scratch(at_.partial), rows_);
  norm2_.backward(call_, hidden, saved("residual"), {call_.input_gradient, shape_.compute}, d_output);
}

// From the gradient at the sum after attention to the one at the input; both in input_gradient.
void Layer::attention_backward() {
  const Ptr d_sum{call_.input_gradient, shape_.compute}, hidden = scratch(at_.hidden);
  const Ptr qkv = saved("qkv"), attention = saved("attention"), d_attention = scratch(at_.d_attention),
            d_qkv = scratch(at_.d_qkv);
  ConstPtr d_out = d_sum;
  if (a_.dropout_attention_out > 0) {
    apply_dropout(shape_, unit_, call_, Site::attention_out, a_.dropout_attention_out, d_sum, scratch(at_.dropped));
    d_out = scratch(at_.dropped);
  }
  out_linear_.backward_parameters(call_, attention, d_out, rows_);
  out_linear_.backward_input(call_, d_out, d_attention, scratch(at_.partial), rows_);

  // Without QK-norm the saved q and k are rotated already.
  const Rotated rotated = a_.qk_norm ? prepare_qk(qkv, true) : Rotated{qkv, offset(qkv, a_.q_size()), a_.qkv_size()};
  const std::int64_t stride = a_.qkv_size();
  const Ptr d_k = offset(d_qkv, a_.q_size());
  call_.ops->attention_backward(call_.stream, {.q = rotated.q,
                                               .k = rotated.k,
                                               .v = offset(qkv, a_.q_size() + a_.kv_size()),
                                               .out = attention,
                                               .dout = d_attention,
                                               .lse = static_cast<const float*>(saved("lse").data),
                                               .dq = d_qkv,
                                               .dk = d_k,
                                               .dv = offset(d_qkv, a_.q_size() + a_.kv_size()),
                                               .batch = shape_.batch.micro,
                                               .seq_len = shape_.batch.seq_len,
                                               .heads = a_.heads,
                                               .kv_heads = a_.kv_heads,
                                               .head_dim = a_.head_dim,
                                               .window = a_.sliding_window,
                                               .q_stride = rotated.stride,
                                               .k_stride = rotated.stride,
                                               .v_stride = stride,
                                               .out_stride = a_.q_size(),
                                               .dout_stride = a_.q_size(),
                                               .dq_stride = stride,
                                               .dk_stride = stride,
                                               .dv_stride = stride,
                                               .scale = attention_scale(a_)});
  rotate(d_qkv, stride, true);
  if (a_.qk_norm) norm_heads_backward(qkv, d_qkv);

  norm1_.forward(call_, {call_.input, shape_.compute}, hidden);
  qkv_linear_.backward_parameters(call_, hidden, d_qkv, rows_);
  qkv_linear_.backward_input(call_, d_qkv, hidden, scratch(at_.partial), rows_);
  norm1_.backward(call_, hidden, {call_.input, shape_.compute}, d_sum, d_sum);
}

void Layer::backward() {
  mlp_backward();
  attention_backward();
}

}  // namespace

void layer_forward(const ModelShape& shape, int unit, const UnitCall& call) {
  const LayerMode mode = call.saved != nullptr ? LayerMode::save : LayerMode::forward;
  Layer(shape, unit, call, mode).forward(mode);
}

void layer_backward(const ModelShape& shape, int unit, const UnitCall& call) {
  Layer(shape, unit, call, LayerMode::backward).backward();
}

}  // namespace spipe::model
