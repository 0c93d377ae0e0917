// See ops_norm.h; compiled once for each instruction set.
#include "kernels/cpu/ops_norm.h"

#include "kernels/cpu/simd.h"

namespace spipe::cpu::SPIPE_ISA {
namespace {

constexpr int kSums = 4;  // accumulators of a row sum: vector i of the row goes to accumulator i mod 4

SPIPE_INLINE float join(const Vec (&s)[kSums]) { return sum((s[0] + s[1]) + (s[2] + s[3])); }
SPIPE_INLINE Vec keep_lanes(Vec x, std::int64_t n) {
  return n >= kLanes ? x : select(igreater(iset(static_cast<std::int32_t>(n)), iota()), x, zero());
}
// Calls f(i, n, accumulator) for the vectors of a row: lanes 0..n-1 of the vector at i, n <= 16.
template <typename F>
SPIPE_INLINE void each_vector(std::int64_t cols, F f) {
  std::int64_t i = 0;
  for (; i + kSums * kLanes <= cols; i += kSums * kLanes) {
    for (int s = 0; s < kSums; ++s) f(i + s * kLanes, std::int64_t{kLanes}, s);
  }
  for (int s = 0; i < cols; ++s, i += kLanes) f(i, cols - i < kLanes ? cols - i : std::int64_t{kLanes}, s);
}

// The row that is normalised: x, or x + residual as rounded into sum_out.
template <typename T>
SPIPE_INLINE const T* add_residual(const T* x, const T* residual, T* sum_out, std::int64_t cols) {
  if (residual == nullptr) return x;
  for (std::int64_t i = 0; i < cols; i += kLanes) {
    store_n(sum_out + i, load_n(x + i, cols - i) + load_n(residual + i, cols - i), cols - i);
  }
  return sum_out;
}

template <typename T>
SPIPE_INLINE const T* row_of(const void* base, std::int64_t start) {
  return base == nullptr ? nullptr : static_cast<const T*>(base) + start;
}
template <typename T>
SPIPE_INLINE T* row_of(void* base, std::int64_t start) {
  return base == nullptr ? nullptr : static_cast<T*>(base) + start;
}

// ---- layernorm -------------------------------------------------------------------------------------------------------------

template <typename T>
void layernorm_forward_row(const LayerNormForwardArgs& args, std::int64_t r) {
  const std::int64_t cols = args.cols, start = r * cols;
  const T* h = add_residual(row_of<T>(args.x.data, start), row_of<T>(args.residual.data, start),
                            row_of<T>(args.sum_out.data, start), cols);
  Vec s[kSums] = {zero(), zero(), zero(), zero()};
  each_vector(cols, [&](std::int64_t i, std::int64_t n, int a) { s[a] = s[a] + load_n(h + i, n); });
  const float mean = join(s) / static_cast<float>(cols);
  const Vec shift = set(mean);
  Vec q[kSums] = {zero(), zero(), zero(), zero()};
  each_vector(cols, [&](std::int64_t i, std::int64_t n, int a) {
    const Vec d = keep_lanes(load_n(h + i, n) - shift, n);
    q[a] = fma(d, d, q[a]);
  });
  const float rstd = 1.0f / __builtin_sqrtf(join(q) / static_cast<float>(cols) + args.eps);
  const Vec factor = set(rstd);
  const float* weight = static_cast<const float*>(args.weight.data);
  const float* bias = static_cast<const float*>(args.bias.data);
  T* y = row_of<T>(args.y.data, start);
  for (std::int64_t i = 0; i < cols; i += kLanes) {
    const std::int64_t n = cols - i;
    store_n(y + i, fma((load_n(h + i, n) - shift) * factor, load_n(weight + i, n), load_n(bias + i, n)), n);
  }
  args.mean[r] = mean;
  args.rstd[r] = rstd;
}

// dx = rstd (g - mean(g) - normed mean(g normed)), g = dy weight, normed = (x - mean) rstd.
template <typename T>
void layernorm_backward_row(const LayerNormBackwardArgs& args, std::int64_t r, bool first, float* dweight, float* dbias) {
  const std::int64_t cols = args.cols, start = r * cols;
  const T* dy = row_of<T>(args.dy.data, start);
  const T* x = row_of<T>(args.x.data, start);
  const T* residual = row_of<T>(args.residual_grad.data, start);
  T* dx = row_of<T>(args.dx.data, start);
  const float* weight = static_cast<const float*>(args.weight.data);
  const Vec mean = set(args.mean[r]), rstd = set(args.rstd[r]);
  Vec sg[kSums] = {zero(), zero(), zero(), zero()}, sgx[kSums] = {zero(), zero(), zero(), zero()};
  each_vector(cols, [&](std::int64_t i, std::int64_t n, int a) {
    const Vec d = load_n(dy + i, n), normed = (load_n(x + i, n) - mean) * rstd, g = d * load_n(weight + i, n);
    sg[a] = sg[a] + g;
    sgx[a] = fma(g, normed, sgx[a]);
    store_n(dweight + i, first ? d * normed : fma(d, normed, load_n(dweight + i, n)), n);
    store_n(dbias + i, first ? d : load_n(dbias + i, n) + d, n);
  });
  const Vec mean_g = set(join(sg) / static_cast<float>(cols)), mean_gx = set(join(sgx) / static_cast<float>(cols));
  for (std::int64_t i = 0; i < cols; i += kLanes) {
    const std::int64_t n = cols - i;
    const Vec normed = (load_n(x + i, n) - mean) * rstd;
    const Vec g = load_n(dy + i, n) * load_n(weight + i, n);
    const Vec inner = fnma(normed, mean_gx, g - mean_g);
    store_n(dx + i, residual != nullptr ? fma(rstd, inner, load_n(residual + i, n)) : rstd * inner, n);
  }
}

// ---- rmsnorm ---------------------------------------------------------------------------------------------------------------

template <typename T>
void rmsnorm_forward_vector(const RmsNormForwardArgs& args, std::int64_t v) {
  const std::int64_t cols = args.cols, o = v / args.inner, at = v % args.inner * cols;
  const std::int64_t start = o * args.x_stride + at;
  const T* h = add_residual(row_of<T>(args.x.data, start), row_of<T>(args.residual.data, start),
                            row_of<T>(args.sum_out.data, start), cols);
  Vec q[kSums] = {zero(), zero(), zero(), zero()};
  each_vector(cols, [&](std::int64_t i, std::int64_t n, int a) {
    const Vec x = load_n(h + i, n);
    q[a] = fma(x, x, q[a]);
  });
  const float rstd = 1.0f / __builtin_sqrtf(join(q) / static_cast<float>(cols) + args.eps);
  const Vec factor = set(rstd);
  const float* weight = static_cast<const float*>(args.weight.data);
  T* y = row_of<T>(args.y.data, o * args.y_stride + at);
  for (std::int64_t i = 0; i < cols; i += kLanes) {
    const std::int64_t n = cols - i;
    store_n(y + i, load_n(h + i, n) * factor * load_n(weight + i, n), n);
  }
  args.rstd[v] = rstd;
}

template <typename T>
void rmsnorm_backward_vector(const RmsNormBackwardArgs& args, std::int64_t v, bool first, float* dweight) {
  const std::int64_t cols = args.cols, o = v / args.inner, at = v % args.inner * cols;
  const T* dy = row_of<T>(args.dy.data, o * args.dy_stride + at);
  const T* x = row_of<T>(args.x.data, o * args.x_stride + at);
  const T* residual = row_of<T>(args.residual_grad.data, o * args.dx_stride + at);
  T* dx = row_of<T>(args.dx.data, o * args.dx_stride + at);
  const float* weight = static_cast<const float*>(args.weight.data);
  const Vec rstd = set(args.rstd[v]);
  Vec sgx[kSums] = {zero(), zero(), zero(), zero()};
  each_vector(cols, [&](std::int64_t i, std::int64_t n, int a) {
    const Vec d = load_n(dy + i, n), normed = load_n(x + i, n) * rstd;
    sgx[a] = fma(d * load_n(weight + i, n), normed, sgx[a]);
    store_n(dweight + i, first ? d * normed : fma(d, normed, load_n(dweight + i, n)), n);
  });
  const Vec mean_gx = set(join(sgx) / static_cast<float>(cols));
  for (std::int64_t i = 0; i < cols; i += kLanes) {
    const std::int64_t n = cols - i;
    const Vec normed = load_n(x + i, n) * rstd;
    const Vec inner = fnma(normed, mean_gx, load_n(dy + i, n) * load_n(weight + i, n));
    store_n(dx + i, residual != nullptr ? fma(rstd, inner, load_n(residual + i, n)) : rstd * inner, n);
  }
}

// ---- table -----------------------------------------------------------------------------------------------------------------

void layernorm_forward(const LayerNormForwardArgs& args, std::int64_t first, std::int64_t count) {
  with_storage(args.x.dtype, [&](auto t) {
    for (std::int64_t r = first; r < first + count; ++r) layernorm_forward_row<decltype(t)>(args, r);
  });
}

void layernorm_backward(const LayerNormBackwardArgs& args, std::int64_t first, std::int64_t count, float* dweight,
                        float* dbias) {
  with_storage(args.x.dtype, [&](auto t) {
    for (std::int64_t r = first; r < first + count; ++r) {
      layernorm_backward_row<decltype(t)>(args, r, r == first, dweight, dbias);
    }
  });
}

void rmsnorm_forward(const RmsNormForwardArgs& args, std::int64_t first, std::int64_t count) {
  with_storage(args.x.dtype, [&](auto t) {
    for (std::int64_t v = first; v < first + count; ++v) rmsnorm_forward_vector<decltype(t)>(args, v);
  });
}

void rmsnorm_backward(const RmsNormBackwardArgs& args, std::int64_t first, std::int64_t count, float* dweight) {
  with_storage(args.x.dtype, [&](auto t) {
    for (std::int64_t v = first; v < first + count; ++v) {
      rmsnorm_backward_vector<decltype(t)>(args, v, v == first, dweight);
    }
  });
}

void sum_partials(const float* partials, std::int64_t parts, std::int64_t stride, std::int64_t elements, bool accumulate,
                  float* out) {
  for (std::int64_t i = 0; i < elements; i += kLanes) {
    const std::int64_t n = elements - i;
    Vec total = load_n(partials + i, n);
    for (std::int64_t p = 1; p < parts; ++p) total = total + load_n(partials + p * stride + i, n);
    store_n(out + i, accumulate ? load_n(out + i, n) + total : total, n);
  }
}

}  // namespace

extern const NormTable norm_table;
const NormTable norm_table = {.layernorm_forward = layernorm_forward,
                              .layernorm_backward = layernorm_backward,
                              .rmsnorm_forward = rmsnorm_forward,
                              .rmsnorm_backward = rmsnorm_backward,
                              .sum_partials = sum_partials};

}  // namespace spipe::cpu::SPIPE_ISA
