// Reference elementwise ops, embedding, rope, dropout and the optimizer.
#include <cmath>
#include <numbers>
#include <vector>

#include "spipe/base/error.h"
#include "spipe/base/random.h"
#include "tests/kernels/reference_ops.h"

namespace spipe::test {
namespace {

double activation(Activation kind, double x) {
  switch (kind) {
    case Activation::gelu_tanh:
      // 0.5 (1 + tanh u) = 1 / (1 + exp(-2u)), which keeps its relative accuracy where tanh is near -1.
      return x / (1 + std::exp(-2 * std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
    case Activation::gelu_erf:
      return 0.5 * x * std::erfc(-x / std::numbers::sqrt2);
    case Activation::relu:
      return x > 0 || std::isnan(x) ? x : 0;
    case Activation::silu:
      return x / (1 + std::exp(-x));
  }
  return 0;
}

double activation_derivative(Activation kind, double x) {
  switch (kind) {
    case Activation::gelu_tanh: {
      const double slope = 2 * std::sqrt(2 / std::numbers::pi);
      const double s = 1 / (1 + std::exp(-slope * (x + 0.044715 * x * x * x)));
      return s + x * s * (1 - s) * slope * (1 + 3 * 0.044715 * x * x);
    }
    case Activation::gelu_erf:
      return 0.5 * std::erfc(-x / std::numbers::sqrt2) + x * std::exp(-0.5 * x * x) / std::sqrt(2 * std::numbers::pi);
    case Activation::relu:
      return x > 0 ? 1 : 0;
    case Activation::silu: {
      const double s = 1 / (1 + std::exp(-x));
      return s * (1 + x * (1 - s));
    }
  }
  return 0;
}

}  // namespace

void ReferenceOps::rope(StreamHandle*, const RopeArgs& args) {
  const std::int64_t half = args.head_dim / 2;
  for (std::int64_t t = 0; t < args.tokens; ++t) {
    const std::int64_t position = args.first_position + t % args.seq_len;
    for (std::int64_t h = 0; h < args.heads; ++h) {
      for (std::int64_t i = 0; i < half; ++i) {
        const double c = static_cast<double>(args.cos[position * half + i]);
        const double s = static_cast<double>(args.sin[position * half + i]) * (args.backward ? -1 : 1);
        const std::int64_t at = t * args.x_stride + h * args.head_dim + i;
        const double a = load(args.x, at), b = load(args.x, at + half);
        store(args.x, at, a * c - b * s);
        store(args.x, at + half, b * c + a * s);
      }
    }
  }
}

void ReferenceOps::activation_forward(StreamHandle*, const ActivationForwardArgs& args) {
  for (std::int64_t i = 0; i < args.elements; ++i) store(args.y, i, activation(args.kind, load(args.x, i)));
}

void ReferenceOps::activation_backward(StreamHandle*, const ActivationBackwardArgs& args) {
  for (std::int64_t i = 0; i < args.elements; ++i) {
    store(args.dx, i, load(args.dy, i) * activation_derivative(args.kind, load(args.x, i)));
  }
}

void ReferenceOps::gated_forward(StreamHandle*, const GatedForwardArgs& args) {
  for (std::int64_t r = 0; r < args.rows; ++r) {
    for (std::int64_t c = 0; c < args.cols; ++c) {
      const std::int64_t at = r * 2 * args.cols + c;
      store(args.y, r * args.cols + c, activation(args.kind, load(args.x, at)) * load(args.x, at + args.cols));
    }
  }
}

void ReferenceOps::gated_backward(StreamHandle*, const GatedBackwardArgs& args) {
  for (std::int64_t r = 0; r < args.rows; ++r) {
    for (std::int64_t c = 0; c < args.cols; ++c) {
      const std::int64_t at = r * 2 * args.cols + c;
      const double dy = load(args.dy, r * args.cols + c), g = load(args.x, at), u = load(args.x, at + args.cols);
      store(args.dx, at, dy * u * activation_derivative(args.kind, g));
      store(args.dx, at + args.cols, dy * activation(args.kind, g));
    }
  }
}

void ReferenceOps::embedding_forward(StreamHandle*, const EmbeddingForwardArgs& args) {
  for (std::int64_t t = 0; t < args.count; ++t) {
    SPIPE_CHECK(args.tokens[t] >= 0 && args.tokens[t] < args.vocab, "token outside the vocabulary");
    for (std::int64_t c = 0; c < args.cols; ++c) {
      double value = load(args.table, args.tokens[t] * args.cols + c);
      if (args.positions) value += load(args.positions, (args.first_position + t % args.seq_len) * args.cols + c);
      store(args.out, t * args.cols + c, value);
    }
  }
}

void ReferenceOps::embedding_backward(StreamHandle*, const EmbeddingBackwardArgs& args) {
  std::vector<double> table(static_cast<std::size_t>(args.vocab * args.cols));
  std::vector<double> positions(static_cast<std::size_t>(args.position_rows * args.cols));
  for (std::int64_t t = 0; t < args.count; ++t) {
    for (std::int64_t c = 0; c < args.cols; ++c) {
      const double value = load(args.dout, t * args.cols + c);
      table[static_cast<std::size_t>(args.tokens[t] * args.cols + c)] += value;
      if (args.dpositions) {
        positions[static_cast<std::size_t>((args.first_position + t % args.seq_len) * args.cols + c)] += value;
      }
    }
  }
  const auto write = [&](Ptr dst, const std::vector<double>& sums) {
    for (std::size_t i = 0; dst && i < sums.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i);
      store(dst, at, args.accumulate ? load(dst, at) + sums[i] : sums[i]);
    }
  };
  write(args.dtable, table);
  write(args.dpositions, positions);
}

void ReferenceOps::dropout(StreamHandle*, const DropoutArgs& args) {
  const PhiloxKey key = make_key(args.seed, static_cast<std::uint64_t>(RandomPurpose::dropout));
  for (std::int64_t b = 0; b < args.sequences; ++b) {
    for (std::int64_t e = 0; e < args.elements_per_sequence; ++e) {
      const auto sequence = static_cast<std::uint32_t>(args.first_sequence + static_cast<std::uint64_t>(b));
      const auto words =
          philox4x32({static_cast<std::uint32_t>(e / 4), sequence, static_cast<std::uint32_t>(args.step), args.site}, key);
      const double u = static_cast<double>(words[static_cast<std::size_t>(e % 4)] >> 8) / 16777216.0;
      const std::int64_t at = b * args.elements_per_sequence + e;
      store(args.y, at, u >= static_cast<double>(args.p) ? load(args.x, at) / (1 - static_cast<double>(args.p)) : 0);
    }
  }
}

void ReferenceOps::add(StreamHandle*, const AddArgs& args) {
  for (std::int64_t i = 0; i < args.elements; ++i) store(args.out, i, load(args.a, i) + load(args.b, i));
}

void ReferenceOps::convert(StreamHandle*, const ConvertArgs& args) {
  for (std::int64_t i = 0; i < args.elements; ++i) {
    if (args.half_up) {
      static_cast<std::uint16_t*>(args.dst.data)[i] = bf16_from_f32_half_up(static_cast<const float*>(args.src.data)[i]);
    } else {
      store(args.dst, i, load(args.src, i));
    }
  }
}

void ReferenceOps::zero(StreamHandle*, const ZeroArgs& args) {
  for (std::int64_t i = 0; i < args.elements; ++i) store(args.dst, i, 0);
}

void ReferenceOps::finish_gradient(StreamHandle*, const FinishGradientArgs& args) {
  for (std::int64_t start = 0; start < args.elements; start += kNormBlock) {
    double lanes[16] = {};
    for (std::int64_t i = start; i < args.elements && i < start + kNormBlock; ++i) {
      store(args.dst, i, static_cast<double>(args.b != nullptr ? args.a[i] + args.b[i] : args.a[i]));
      const double rounded = load(args.dst, i);
      if (!std::isfinite(rounded) && args.block_sums != nullptr) *args.nonfinite = 1;
      lanes[(i - start) % 16] += rounded * rounded;
    }
    for (int width = 8; width >= 1; width /= 2) {
      for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    }
    if (args.block_sums != nullptr) args.block_sums[start / kNormBlock] = lanes[0];
  }
}

void ReferenceOps::adamw(StreamHandle*, const AdamWArgs& args) {
  for (std::int64_t i = 0; i < args.elements; ++i) {
    const float g = static_cast<float>(load(args.grad, i)) * args.grad_scale;
    const bool in_place = args.from_master == nullptr;
    const float m = std::fma(args.beta1, (in_place ? args.m : args.from_m)[i], args.one_minus_beta1 * g);
    const float v = std::fma(args.beta2, (in_place ? args.v : args.from_v)[i], (args.one_minus_beta2 * g) * g);
    const float p1 = (in_place ? args.master : args.from_master)[i] * args.decay;
    const float denom = std::sqrt(v) * args.inv_sqrt_bias2 + args.eps;
    const float p = std::fma(-args.step_size, m / denom, p1);
    args.m[i] = m;
    args.v[i] = v;
    args.master[i] = p;
    if (!args.compute_copy) continue;
    auto* copy = static_cast<std::uint16_t*>(args.compute_copy.data) + i;
    const bool bf16 = args.compute_copy.dtype == DType::bf16;
    *copy = bf16 ? bf16_from_f32_half_up(p) : f16_from_f32(p);
    const float rounded = bf16 ? f32_from_bf16(*copy) : f32_from_f16(*copy);
    if (std::isfinite(p) && std::isinf(rounded)) *args.nonfinite_master = 1;
  }
}

}  // namespace spipe::test
