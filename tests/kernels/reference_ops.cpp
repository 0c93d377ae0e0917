// Reference matmul, attention, norms and losses. Elementwise ops and the optimizer: reference_elementwise.cpp.
#include "tests/kernels/reference_ops.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "spipe/base/error.h"

namespace spipe::test {
namespace {

std::int64_t or_default(std::int64_t stride, std::int64_t packed) { return stride != 0 ? stride : packed; }

// dst[i] (+)= value; the sum is formed in double.
void store_or_add(Ptr dst, std::int64_t i, double value, bool accumulate) {
  store(dst, i, accumulate ? load(dst, i) + value : value);
}

// One row of a norm's input: x (+ residual); the sum is rounded to sum_out, and what was stored is what is normalised.
std::vector<double> norm_input(ConstPtr x, ConstPtr residual, Ptr sum_out, std::int64_t start, std::int64_t cols) {
  std::vector<double> h(static_cast<std::size_t>(cols));
  for (std::int64_t c = 0; c < cols; ++c) {
    double value = load(x, start + c);
    if (residual) {
      store(sum_out, start + c, value + load(residual, start + c));
      value = load(sum_out, start + c);
    }
    h[static_cast<std::size_t>(c)] = value;
  }
  return h;
}

// Softmax of the visible keys of one query, its log-sum-exp, and the first visible key.
struct AttentionRow {
  std::int64_t first = 0;
  std::vector<double> p;
  double lse = 0;
};

AttentionRow attention_row(ConstPtr q, std::int64_t q_start, ConstPtr k, std::int64_t k_start, std::int64_t k_stride,
                           std::int64_t position, std::int64_t window, std::int64_t head_dim, double scale) {
  AttentionRow row;
  row.first = window > 0 ? std::max<std::int64_t>(0, position - window + 1) : 0;
  double largest = -std::numeric_limits<double>::infinity();
  for (std::int64_t j = row.first; j <= position; ++j) {
    double dot = 0;
    for (std::int64_t d = 0; d < head_dim; ++d) dot += load(q, q_start + d) * load(k, k_start + j * k_stride + d);
    row.p.push_back(scale * dot);
    largest = std::max(largest, row.p.back());
  }
  double sum = 0;
  for (double& value : row.p) sum += std::exp(value - largest);
  row.lse = largest + std::log(sum);
  for (double& value : row.p) value = std::exp(value - row.lse);
  return row;
}

}  // namespace

void ReferenceOps::matmul(StreamHandle*, const MatmulArgs& args) {
  const std::int64_t lda = or_default(args.lda, args.trans_a ? args.m : args.k);
  const std::int64_t ldb = or_default(args.ldb, args.trans_b ? args.k : args.n);
  const std::int64_t ldc = or_default(args.ldc, args.n);
  for (std::int64_t i = 0; i < args.m; ++i) {
    for (std::int64_t j = 0; j < args.n; ++j) {
      double sum = 0;
      for (std::int64_t l = 0; l < args.k; ++l) {
        sum += load(args.a, args.trans_a ? l * lda + i : i * lda + l) * load(args.b, args.trans_b ? j * ldb + l : l * ldb + j);
      }
      if (args.bias) sum += load(args.bias, j);
      store_or_add(args.c, i * ldc + j, sum, args.accumulate);
    }
  }
}

void ReferenceOps::column_sum(StreamHandle*, const ColumnSumArgs& args) {
  const std::int64_t ldx = or_default(args.ldx, args.cols);
  for (std::int64_t c = 0; c < args.cols; ++c) {
    double sum = 0;
    for (std::int64_t r = 0; r < args.rows; ++r) sum += load(args.x, r * ldx + c);
    store_or_add(args.out, c, sum, args.accumulate);
  }
}

void ReferenceOps::layernorm_forward(StreamHandle*, const LayerNormForwardArgs& args) {
  for (std::int64_t r = 0; r < args.rows; ++r) {
    const std::vector<double> h = norm_input(args.x, args.residual, args.sum_out, r * args.cols, args.cols);
    double mean = 0;
    for (const double value : h) mean += value;
    mean /= static_cast<double>(args.cols);
    double variance = 0;
    for (const double value : h) variance += (value - mean) * (value - mean);
    variance /= static_cast<double>(args.cols);
    const double rstd = 1 / std::sqrt(variance + static_cast<double>(args.eps));
    for (std::int64_t c = 0; c < args.cols; ++c) {
      store(args.y, r * args.cols + c,
            (h[static_cast<std::size_t>(c)] - mean) * rstd * load(args.weight, c) + load(args.bias, c));
    }
    args.mean[r] = static_cast<float>(mean);
    args.rstd[r] = static_cast<float>(rstd);
  }
}

void ReferenceOps::layernorm_backward(StreamHandle*, const LayerNormBackwardArgs& args) {
  const auto cols = static_cast<std::size_t>(args.cols);
  std::vector<double> dweight(cols), dbias(cols);
  for (std::int64_t r = 0; r < args.rows; ++r) {
    const double mean = static_cast<double>(args.mean[r]), rstd = static_cast<double>(args.rstd[r]);
    double sum_g = 0, sum_gx = 0;
    std::vector<double> g(cols), normed(cols);
    for (std::size_t c = 0; c < cols; ++c) {
      const std::int64_t at = r * args.cols + static_cast<std::int64_t>(c);
      const double dy = load(args.dy, at);
      normed[c] = (load(args.x, at) - mean) * rstd;
      g[c] = dy * load(args.weight, static_cast<std::int64_t>(c));
      sum_g += g[c];
      sum_gx += g[c] * normed[c];
      dweight[c] += dy * normed[c];
      dbias[c] += dy;
    }
    for (std::size_t c = 0; c < cols; ++c) {
      const std::int64_t at = r * args.cols + static_cast<std::int64_t>(c);
      const double n = static_cast<double>(args.cols);
      double dx = rstd * (g[c] - sum_g / n - normed[c] * sum_gx / n);
      if (args.residual_grad) dx += load(args.residual_grad, at);
      store(args.dx, at, dx);
    }
  }
  for (std::size_t c = 0; c < cols; ++c) {
    store_or_add(args.dweight, static_cast<std::int64_t>(c), dweight[c], args.accumulate);
    store_or_add(args.dbias, static_cast<std::int64_t>(c), dbias[c], args.accumulate);
  }
}

void ReferenceOps::rmsnorm_forward(StreamHandle*, const RmsNormForwardArgs& args) {
  const std::int64_t x_stride = or_default(args.x_stride, args.inner * args.cols);
  const std::int64_t y_stride = or_default(args.y_stride, args.inner * args.cols);
  for (std::int64_t o = 0; o < args.outer; ++o) {
    for (std::int64_t i = 0; i < args.inner; ++i) {
      const std::vector<double> h = norm_input(args.x, args.residual, args.sum_out, o * x_stride + i * args.cols, args.cols);
      double square = 0;
      for (const double value : h) square += value * value;
      const double rstd = 1 / std::sqrt(square / static_cast<double>(args.cols) + static_cast<double>(args.eps));
      for (std::int64_t c = 0; c < args.cols; ++c) {
        store(args.y, o * y_stride + i * args.cols + c, h[static_cast<std::size_t>(c)] * rstd * load(args.weight, c));
      }
      args.rstd[o * args.inner + i] = static_cast<float>(rstd);
    }
  }
}

void ReferenceOps::rmsnorm_backward(StreamHandle*, const RmsNormBackwardArgs& args) {
  const auto cols = static_cast<std::size_t>(args.cols);
  const std::int64_t packed = args.inner * args.cols;
  std::vector<double> dweight(cols);
  for (std::int64_t vector = 0; vector < args.outer * args.inner; ++vector) {
    const std::int64_t o = vector / args.inner, i = vector % args.inner;
    const std::int64_t dy_at = o * or_default(args.dy_stride, packed) + i * args.cols;
    const std::int64_t x_at = o * or_default(args.x_stride, packed) + i * args.cols;
    const std::int64_t dx_at = o * or_default(args.dx_stride, packed) + i * args.cols;
    const double rstd = static_cast<double>(args.rstd[vector]);
    double sum_gx = 0;
    std::vector<double> g(cols), normed(cols);
    for (std::size_t c = 0; c < cols; ++c) {
      const auto at = static_cast<std::int64_t>(c);
      const double dy = load(args.dy, dy_at + at);
      normed[c] = load(args.x, x_at + at) * rstd;
      g[c] = dy * load(args.weight, at);
      sum_gx += g[c] * normed[c];
      dweight[c] += dy * normed[c];
    }
    for (std::size_t c = 0; c < cols; ++c) {
      const auto at = static_cast<std::int64_t>(c);
      double dx = rstd * (g[c] - normed[c] * sum_gx / static_cast<double>(args.cols));
      if (args.residual_grad) dx += load(args.residual_grad, dx_at + at);
      store(args.dx, dx_at + at, dx);
    }
  }
  for (std::size_t c = 0; c < cols; ++c) store_or_add(args.dweight, static_cast<std::int64_t>(c), dweight[c], args.accumulate);
}

void ReferenceOps::attention_forward(StreamHandle*, const AttentionForwardArgs& args) {
  const std::int64_t k_batch = or_default(args.kv_batch_stride, args.kv_len * args.k_stride);
  const std::int64_t v_batch = or_default(args.kv_batch_stride, args.kv_len * args.v_stride);
  for (std::int64_t b = 0; b < args.batch; ++b) {
    for (std::int64_t h = 0; h < args.heads; ++h) {
      const std::int64_t kv_at = h / (args.heads / args.kv_heads) * args.head_dim;
      for (std::int64_t i = 0; i < args.q_len; ++i) {
        const std::int64_t token = b * args.q_len + i;
        const AttentionRow row =
            attention_row(args.q, token * args.q_stride + h * args.head_dim, args.k, b * k_batch + kv_at, args.k_stride,
                          args.kv_len - args.q_len + i, args.window, args.head_dim, static_cast<double>(args.scale));
        for (std::int64_t d = 0; d < args.head_dim; ++d) {
          double sum = 0;
          for (std::size_t j = 0; j < row.p.size(); ++j) {
            const std::int64_t key = row.first + static_cast<std::int64_t>(j);
            sum += row.p[j] * load(args.v, b * v_batch + key * args.v_stride + kv_at + d);
          }
          store(args.out, token * args.out_stride + h * args.head_dim + d, sum);
        }
        args.lse[(b * args.heads + h) * args.q_len + i] = static_cast<float>(row.lse);
      }
    }
  }
}

// With P the probabilities, dP = dout V^T, dS = scale * P (dP - rowsum(P dP)): dV = P^T dout, dQ = dS K, dK = dS^T Q.
// P and rowsum(P dP) come from q, k, v themselves, not from lse and out, so that errors in those show.
void ReferenceOps::attention_backward(StreamHandle*, const AttentionBackwardArgs& args) {
  const std::int64_t tokens = args.batch * args.seq_len, kv_cols = args.kv_heads * args.head_dim;
  std::vector<double> dk(static_cast<std::size_t>(tokens * kv_cols)), dv(dk.size());
  for (std::int64_t b = 0; b < args.batch; ++b) {
    for (std::int64_t h = 0; h < args.heads; ++h) {
      const std::int64_t kv_at = h / (args.heads / args.kv_heads) * args.head_dim, first_token = b * args.seq_len;
      for (std::int64_t i = 0; i < args.seq_len; ++i) {
        const std::int64_t token = first_token + i, head_at = h * args.head_dim;
        const AttentionRow row =
            attention_row(args.q, token * args.q_stride + head_at, args.k, first_token * args.k_stride + kv_at, args.k_stride,
                          i, args.window, args.head_dim, static_cast<double>(args.scale));
        std::vector<double> dp(row.p.size()), dq(static_cast<std::size_t>(args.head_dim));
        double mean_dp = 0;
        for (std::size_t j = 0; j < row.p.size(); ++j) {
          const std::int64_t key = first_token + row.first + static_cast<std::int64_t>(j);
          for (std::int64_t d = 0; d < args.head_dim; ++d) {
            dp[j] += load(args.dout, token * args.dout_stride + head_at + d) * load(args.v, key * args.v_stride + kv_at + d);
          }
          mean_dp += row.p[j] * dp[j];
        }
        for (std::size_t j = 0; j < row.p.size(); ++j) {
          const std::int64_t key = first_token + row.first + static_cast<std::int64_t>(j);
          const double ds = static_cast<double>(args.scale) * row.p[j] * (dp[j] - mean_dp);
          for (std::int64_t d = 0; d < args.head_dim; ++d) {
            const auto at = static_cast<std::size_t>(key * kv_cols + kv_at + d);
            dq[static_cast<std::size_t>(d)] += ds * load(args.k, key * args.k_stride + kv_at + d);
            dk[at] += ds * load(args.q, token * args.q_stride + head_at + d);
            dv[at] += row.p[j] * load(args.dout, token * args.dout_stride + head_at + d);
          }
        }
        for (std::int64_t d = 0; d < args.head_dim; ++d) {
          store(args.dq, token * args.dq_stride + head_at + d, dq[static_cast<std::size_t>(d)]);
        }
      }
    }
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t c = 0; c < kv_cols; ++c) {
      store(args.dk, t * args.dk_stride + c, dk[static_cast<std::size_t>(t * kv_cols + c)]);
      store(args.dv, t * args.dv_stride + c, dv[static_cast<std::size_t>(t * kv_cols + c)]);
    }
  }
}

void ReferenceOps::softmax_cross_entropy(StreamHandle*, const SoftmaxCrossEntropyArgs& args) {
  for (std::int64_t r = 0; r < args.rows; ++r) {
    float* row = args.logits + r * args.ld;
    const std::int64_t target = args.targets[r];
    SPIPE_CHECK(target < args.cols, "target outside the vocabulary");
    double largest = -std::numeric_limits<double>::infinity();
    for (std::int64_t c = 0; c < args.cols; ++c) largest = std::max(largest, static_cast<double>(row[c]));
    double sum = 0;
    for (std::int64_t c = 0; c < args.cols; ++c) sum += std::exp(static_cast<double>(row[c]) - largest);
    const double lse = largest + std::log(sum);
    args.nll[r] = target < 0 ? 0.0F : static_cast<float>(lse - static_cast<double>(row[target]));
    if (args.scale == 0) continue;
    for (std::int64_t c = 0; c < args.cols; ++c) {
      const double p = std::exp(static_cast<double>(row[c]) - lse);
      row[c] = target < 0 ? 0.0F : static_cast<float>(static_cast<double>(args.scale) * (p - (c == target ? 1.0 : 0.0)));
    }
  }
}

}  // namespace spipe::test
