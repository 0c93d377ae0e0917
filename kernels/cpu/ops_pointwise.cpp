// See ops_pointwise.h; compiled once for each instruction set.
#include "kernels/cpu/ops_pointwise.h"

#include "kernels/cpu/simd_math.h"

namespace spipe::cpu::SPIPE_ISA {
namespace {

// ---- activations: value(x) and slope(x) -----------------------------------------------------------------------------------

// Logistic s(t) and its derivative s (1 - s), both with full relative accuracy on either side: with e = exp(-|t|) and
// r = 1 / (1 + e), s is r or e r and s (1 - s) = e r r.
struct Logistic {
  Vec s, derivative;
};
SPIPE_INLINE Logistic logistic(Vec t) {
  const Vec e = exp(negate(abs(t))), r = set(1.0f) / (set(1.0f) + e), er = e * r;
  return {select(less(t, zero()), er, r), er * r};
}
// |x| limited so that a derivative's polynomial factor stays finite; beyond it the other factor is 0. NaN stays.
SPIPE_INLINE Vec limit(Vec x, float bound) { return min(set(bound), max(set(-bound), x)); }

struct Silu {
  static SPIPE_INLINE Vec value(Vec x) { return x * logistic(x).s; }
  static SPIPE_INLINE Vec slope(Vec x) {
    const Logistic l = logistic(x);
    return fma(limit(x, 200.0f), l.derivative, l.s);
  }
};

// 0.5 x (1 + tanh u) = x s(2u), 2u = c x (1 + a x^2), c = 2 sqrt(2/pi), a = 0.044715.
struct GeluTanh {
  static constexpr float kC = 1.5957691216057308f, kA = 0.044715f;
  static SPIPE_INLINE Vec argument(Vec x) { return set(kC) * x * fma(set(kA), x * x, set(1.0f)); }
  static SPIPE_INLINE Vec value(Vec x) { return x * logistic(argument(x)).s; }
  static SPIPE_INLINE Vec slope(Vec x) {
    const Vec b = limit(x, 30.0f);
    const Logistic l = logistic(argument(b));
    return fma(b * set(kC) * fma(set(3 * kA), b * b, set(1.0f)), l.derivative, l.s);
  }
};

// x Phi(x). With a = |x| the tail Phi(-a) = exp(-a^2/2) P(q) / (a + 3), q = (a - 3) / (a + 3); P is a minimax polynomial
// for a <= 15 (relative error 4e-8). a^2 is carried in two floats.
struct GeluErf {
  struct Normal {
    Vec tail, kernel;  // Phi(-|x|) and exp(-x^2/2)
  };
  static SPIPE_INLINE Normal normal(Vec x) {
    const Vec a = min(set(15.0f), abs(x)), square = a * a, rest = fma(a, a, negate(square));
    const Vec e = exp(set(-0.5f) * square);
    const Vec kernel = fnma(set(0.5f) * rest, e, e);
    const Vec inverse = set(1.0f) / (a + set(3.0f)), q = (a - set(3.0f)) * inverse;
    Vec p = set(3.973129816e-5f);
    p = fma(p, q, set(-2.191398923e-4f));
    p = fma(p, q, set(-9.35871743e-4f));
    p = fma(p, q, set(1.033011106e-3f));
    p = fma(p, q, set(6.934259882e-3f));
    p = fma(p, q, set(-1.046769312e-2f));
    p = fma(p, q, set(-4.725779114e-2f));
    p = fma(p, q, set(2.300182681e-1f));
    p = fma(p, q, set(-5.09332185e-1f));
    p = fma(p, q, set(7.290836823e-1f));
    return {kernel * p * inverse, kernel};
  }
  static SPIPE_INLINE Vec value(Vec x) {
    const Vec tail = normal(x).tail;
    return select(less(x, zero()), x * tail, fnma(x, tail, x));
  }
  static SPIPE_INLINE Vec slope(Vec x) {
    const Normal n = normal(x);
    const Vec phi = select(less(x, zero()), n.tail, set(1.0f) - n.tail);
    return fma(limit(x, 15.0f) * set(0.3989422804f), n.kernel, phi);
  }
};

struct Relu {
  static SPIPE_INLINE Vec value(Vec x) { return max(zero(), x); }  // NaN stays
  static SPIPE_INLINE Vec slope(Vec x) { return select(less(zero(), x), set(1.0f), zero()); }
};

template <typename F>
SPIPE_INLINE void with_activation(Activation kind, F f) {
  switch (kind) {
    case Activation::gelu_tanh:
      return f(GeluTanh{});
    case Activation::gelu_erf:
      return f(GeluErf{});
    case Activation::relu:
      return f(Relu{});
    case Activation::silu:
      return f(Silu{});
  }
}

// The kernels work on floats in chunks: half types are widened into a buffer and narrowed from one, fp32 is used in place.
constexpr std::int64_t kChunk = 512;

template <typename S, typename D>
void convert_array(const S* src, D* dst, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kLanes) store_n(dst + i, load_n(src + i, count - i), count - i);
}
const float* read(const void* p, DType type, std::int64_t first, std::int64_t count, float* buffer) {
  if (type == DType::f32) return static_cast<const float*>(p) + first;
  with_storage(type, [&](auto t) { convert_array(static_cast<const decltype(t)*>(p) + first, buffer, count); });
  return buffer;
}
// Where to compute a chunk of p; write() then moves it there.
float* target(void* p, DType type, std::int64_t first, float* buffer) {
  return type == DType::f32 ? static_cast<float*>(p) + first : buffer;
}
void write(const float* buffer, void* p, DType type, std::int64_t first, std::int64_t count) {
  if (type == DType::f32) return;
  with_storage(type, [&](auto t) { convert_array(buffer, static_cast<decltype(t)*>(p) + first, count); });
}
// Calls f(first, count) for the chunks of [begin, end).
template <typename F>
SPIPE_INLINE void each_chunk(std::int64_t begin, std::int64_t end, F f) {
  for (std::int64_t i = begin; i < end; i += kChunk) f(i, end - i < kChunk ? end - i : kChunk);
}

template <typename Act>
void value_array(const float* x, float* y, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kLanes) store_n(y + i, Act::value(load_n(x + i, count - i)), count - i);
}

template <typename Act>
void slope_array(const float* x, const float* dy, float* dx, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const std::int64_t n = count - i;
    store_n(dx + i, load_n(dy + i, n) * Act::slope(load_n(x + i, n)), n);
  }
}

template <typename Act>
void gated_value_array(const float* gate, const float* up, float* y, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const std::int64_t n = count - i;
    store_n(y + i, Act::value(load_n(gate + i, n)) * load_n(up + i, n), n);
  }
}

// dgate, dup may be gate, up.
template <typename Act>
void gated_slope_array(const float* gate, const float* up, const float* dy, float* dgate, float* dup, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const std::int64_t n = count - i;
    const Vec g = load_n(gate + i, n), d = load_n(dy + i, n);
    const Vec dg = d * load_n(up + i, n) * Act::slope(g);
    store_n(dup + i, d * Act::value(g), n);
    store_n(dgate + i, dg, n);
  }
}

void activation_forward(const ActivationForwardArgs& args, std::int64_t begin, std::int64_t elements) {
  const DType type = args.x.dtype;
  float buffer[kChunk];
  each_chunk(begin, begin + elements, [&](std::int64_t first, std::int64_t count) {
    const float* x = read(args.x.data, type, first, count, buffer);
    float* y = target(args.y.data, type, first, buffer);
    with_activation(args.kind, [&](auto act) { value_array<decltype(act)>(x, y, count); });
    write(y, args.y.data, type, first, count);
  });
}

void activation_backward(const ActivationBackwardArgs& args, std::int64_t begin, std::int64_t elements) {
  const DType type = args.x.dtype;
  float x_buffer[kChunk], dy_buffer[kChunk];
  each_chunk(begin, begin + elements, [&](std::int64_t first, std::int64_t count) {
    const float* x = read(args.x.data, type, first, count, x_buffer);
    const float* dy = read(args.dy.data, type, first, count, dy_buffer);
    float* dx = target(args.dx.data, type, first, dy_buffer);
    with_activation(args.kind, [&](auto act) { slope_array<decltype(act)>(x, dy, dx, count); });
    write(dx, args.dx.data, type, first, count);
  });
}

void gated_forward(const GatedForwardArgs& args, std::int64_t first_row, std::int64_t rows) {
  const DType type = args.x.dtype;
  float gate_buffer[kChunk], up_buffer[kChunk];
  for (std::int64_t r = first_row; r < first_row + rows; ++r) {
    each_chunk(0, args.cols, [&](std::int64_t first, std::int64_t count) {
      const std::int64_t at = 2 * r * args.cols + first, y_at = r * args.cols + first;
      const float* gate = read(args.x.data, type, at, count, gate_buffer);
      const float* up = read(args.x.data, type, at + args.cols, count, up_buffer);
      float* y = target(args.y.data, type, y_at, gate_buffer);
      with_activation(args.kind, [&](auto act) { gated_value_array<decltype(act)>(gate, up, y, count); });
      write(y, args.y.data, type, y_at, count);
    });
  }
}

void gated_backward(const GatedBackwardArgs& args, std::int64_t first_row, std::int64_t rows) {
  const DType type = args.x.dtype;
  float gate_buffer[kChunk], up_buffer[kChunk], dy_buffer[kChunk];
  for (std::int64_t r = first_row; r < first_row + rows; ++r) {
    each_chunk(0, args.cols, [&](std::int64_t first, std::int64_t count) {
      const std::int64_t at = 2 * r * args.cols + first;
      const float* gate = read(args.x.data, type, at, count, gate_buffer);
      const float* up = read(args.x.data, type, at + args.cols, count, up_buffer);
      const float* dy = read(args.dy.data, type, r * args.cols + first, count, dy_buffer);
      float* dgate = target(args.dx.data, type, at, gate_buffer);
      float* dup = target(args.dx.data, type, at + args.cols, up_buffer);
      with_activation(args.kind, [&](auto act) { gated_slope_array<decltype(act)>(gate, up, dy, dgate, dup, count); });
      write(dgate, args.dx.data, type, at, count);
      write(dup, args.dx.data, type, at + args.cols, count);
    });
  }
}

// ---- rope ------------------------------------------------------------------------------------------------------------------

template <typename T>
void rope_head(T* x, const float* cosines, const float* sines, std::int64_t half, bool backward) {
  for (std::int64_t i = 0; i < half; i += kLanes) {
    const std::int64_t n = half - i;
    const Vec c = load_n(cosines + i, n), s = backward ? negate(load_n(sines + i, n)) : load_n(sines + i, n);
    const Vec a = load_n(x + i, n), b = load_n(x + half + i, n);
    store_n(x + i, fnma(b, s, a * c), n);
    store_n(x + half + i, fma(a, s, b * c), n);
  }
}

void rope(const RopeArgs& args, std::int64_t first_token, std::int64_t tokens) {
  const std::int64_t half = args.head_dim / 2;
  with_storage(args.x.dtype, [&](auto t) {
    for (std::int64_t token = first_token; token < first_token + tokens; ++token) {
      const std::int64_t position = args.first_position + token % args.seq_len;
      for (std::int64_t h = 0; h < args.heads; ++h) {
        rope_head(static_cast<decltype(t)*>(args.x.data) + token * args.x_stride + h * args.head_dim,
                  args.cos + position * half, args.sin + position * half, half, args.backward);
      }
    }
  });
}

// ---- dropout ---------------------------------------------------------------------------------------------------------------

// Philox4x32-10 on sixteen counters at once; plain loops of integers, which the compiler vectorises, and exact anyway.
constexpr int kQuads = 16;
struct Words {
  std::uint32_t w[4][kQuads];
};
SPIPE_INLINE Words philox(std::uint32_t first_quad, const DropoutRange& range) {
  Words c;
  for (int i = 0; i < kQuads; ++i) {
    c.w[0][i] = first_quad + static_cast<std::uint32_t>(i);
    c.w[1][i] = range.sequence;
    c.w[2][i] = range.step;
    c.w[3][i] = range.site;
  }
  std::uint32_t k0 = range.key_lo, k1 = range.key_hi;
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kQuads; ++i) {
      const std::uint64_t p0 = std::uint64_t{0xd2511f53u} * c.w[0][i], p1 = std::uint64_t{0xcd9e8d57u} * c.w[2][i];
      const std::uint32_t w1 = c.w[1][i], w3 = c.w[3][i];
      c.w[0][i] = static_cast<std::uint32_t>(p1 >> 32) ^ w1 ^ k0;
      c.w[1][i] = static_cast<std::uint32_t>(p1);
      c.w[2][i] = static_cast<std::uint32_t>(p0 >> 32) ^ w3 ^ k1;
      c.w[3][i] = static_cast<std::uint32_t>(p0);
    }
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return c;
}

void dropout(const DropoutRange& range) {
  static_assert(kChunk % (4 * kQuads) == 0);
  float buffer[kChunk], factors[kChunk];  // factor 0 where dropped
  each_chunk(0, range.elements, [&](std::int64_t first, std::int64_t count) {
    for (std::int64_t i = 0; i < count; i += 4 * kQuads) {
      const Words words = philox(range.first_quad + static_cast<std::uint32_t>((first + i) / 4), range);
      for (int q = 0; q < kQuads; ++q) {
        for (int j = 0; j < 4; ++j) factors[i + 4 * q + j] = (words.w[j][q] >> 8) >= range.threshold ? range.factor : 0.0f;
      }
    }
    const float* x = read(range.x, range.dtype, first, count, buffer);
    float* y = target(range.y, range.dtype, first, buffer);
    for (std::int64_t i = 0; i < count; i += kLanes) {
      const Vec factor = load(factors + i);
      store_n(y + i, select(less(zero(), factor), load_n(x + i, count - i) * factor, zero()), count - i);
    }
    write(y, range.y, range.dtype, first, count);
  });
}

}  // namespace

extern const PointwiseTable pointwise_table;
const PointwiseTable pointwise_table = {.rope = rope,
                                        .activation_forward = activation_forward,
                                        .activation_backward = activation_backward,
                                        .gated_forward = gated_forward,
                                        .gated_backward = gated_backward,
                                        .dropout = dropout};

}  // namespace spipe::cpu::SPIPE_ISA
