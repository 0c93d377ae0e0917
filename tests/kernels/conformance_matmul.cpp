// Conformance of matmul, column sum and attention.
#include <fmt/core.h>

#include <cmath>

#include "tests/kernels/conformance.h"

namespace spipe::test {
namespace {

struct MatmulShape {
  std::int64_t m, n, k;
};
constexpr MatmulShape kMatmulShapes[] = {{1, 1, 1},    {2, 3, 5},     {0, 8, 8},     {8, 0, 8},     {7, 9, 0},
                                         {1, 64, 33},  {33, 1, 17},   {17, 31, 127}, {64, 48, 96},  {65, 129, 63},
                                         {5, 257, 16}, {130, 70, 65}, {96, 200, 1},  {257, 40, 48}, {31, 300, 300}};

struct AttentionShape {
  std::int64_t batch, q_len, kv_len, heads, kv_heads, head_dim;
  std::int64_t window = 0;
  bool fused = false;           // q, k, v side by side in one row (q_len = kv_len)
  std::int64_t cache_rows = 0;  // rows of a k/v sequence in memory when longer than kv_len
  double spread = 1;            // of q and k
};
constexpr AttentionShape kAttentionShapes[] = {
    {1, 1, 1, 1, 1, 1},
    {2, 3, 3, 2, 2, 6},
    {1, 17, 17, 4, 2, 16, 0, true},
    {2, 33, 33, 6, 1, 24, 0, true},
    {1, 64, 64, 2, 2, 64},
    {1, 65, 65, 3, 3, 80, 0, true},
    {2, 70, 70, 4, 2, 128},
    {1, 130, 130, 2, 1, 64, 0, true},
    {1, 200, 200, 1, 1, 16, 7},
    {2, 97, 97, 2, 2, 24, 64, true},
    {1, 40, 40, 2, 2, 64, 1},
    {1, 50, 50, 2, 1, 80, 500},
    {3, 20, 20, 2, 2, 64, 0, false, 0, 2.0},
    {0, 5, 5, 2, 2, 16},
};
// One or a few new queries at the end of a cached sequence (generation).
constexpr AttentionShape kCachedShapes[] = {
    {1, 1, 9, 2, 1, 64},         {2, 1, 100, 4, 2, 16, 0, false, 128}, {2, 5, 77, 4, 4, 24, 0, false, 80},
    {1, 33, 130, 2, 2, 128, 40}, {2, 64, 65, 3, 1, 80, 0, false, 70},  {1, 1, 300, 2, 2, 1, 16},
};

std::string text_of(const AttentionShape& s, DType dtype) {
  return fmt::format("{} batch {} q {} kv {} heads {}/{} dim {} window {} fused {} cache {} spread {}", dtype_name(dtype),
                     s.batch, s.q_len, s.kv_len, s.heads, s.kv_heads, s.head_dim, s.window, s.fused, s.cache_rows, s.spread);
}

AttentionForwardArgs attention_inputs(Operands& op, const AttentionShape& s, DType dtype) {
  AttentionForwardArgs args{.batch = s.batch,
                            .q_len = s.q_len,
                            .kv_len = s.kv_len,
                            .heads = s.heads,
                            .kv_heads = s.kv_heads,
                            .head_dim = s.head_dim,
                            .window = s.window,
                            .scale = static_cast<float>(1 / std::sqrt(static_cast<double>(s.head_dim)))};
  const std::int64_t q_cols = s.heads * s.head_dim, kv_cols = s.kv_heads * s.head_dim;
  args.out_stride = q_cols + 3;  // a gap that must stay as it was
  if (s.fused) {
    const std::int64_t row = q_cols + 2 * kv_cols;
    args.q = op.input(dtype, s.batch * s.q_len * row, s.spread);
    args.k = spipe::offset(args.q, q_cols);
    args.v = spipe::offset(args.q, q_cols + kv_cols);
    args.q_stride = args.k_stride = args.v_stride = row;
  } else {
    const std::int64_t rows = s.cache_rows != 0 ? s.cache_rows : s.kv_len;
    args.q = op.input(dtype, s.batch * s.q_len * q_cols, s.spread);
    args.k = op.input(dtype, s.batch * rows * kv_cols, s.spread);
    args.v = op.input(dtype, s.batch * rows * kv_cols);
    args.q_stride = q_cols;
    args.k_stride = args.v_stride = kv_cols;
    args.kv_batch_stride = s.cache_rows * kv_cols;
  }
  args.out = op.output(dtype, s.batch * s.q_len * args.out_stride);
  args.lse = op.output_floats(s.batch * s.heads * s.q_len);
  return args;
}

}  // namespace

void conform_matmul(const Backends& backends) {
  for (const DType dtype : kFloatTypes) {
    for (const auto& [m, n, k] : kMatmulShapes) {
      for (int form = 0; form < 12; ++form) {
        const bool trans_a = form % 4 == 2, trans_b = form % 4 == 1, padded = form % 4 == 3;
        const bool accumulate = form / 4 == 1, bias = form / 4 == 2;
        // Weight gradients: half operands into an fp32 sum.
        const DType out = accumulate ? DType::f32 : dtype;
        const std::string text =
            fmt::format("{} {}x{}x{} {}{}{}{}{}", dtype_name(dtype), m, n, k, trans_a ? "T" : "N", trans_b ? "T" : "N",
                        padded ? " padded rows" : "", accumulate ? " accumulate" : "", bias ? " bias" : "");
        check(backends, {.op = "matmul", .matmul = true}, text, [&](Ops& ops, StreamHandle* stream, Operands& op) {
          MatmulArgs args{.m = m, .n = n, .k = k, .trans_a = trans_a, .trans_b = trans_b, .accumulate = accumulate};
          const std::int64_t a_cols = (trans_a ? m : k) + (padded ? 5 : 0), b_cols = (trans_b ? k : n) + (padded ? 3 : 0);
          const std::int64_t c_cols = n + (padded ? 7 : 0);
          if (padded) args.lda = a_cols, args.ldb = b_cols, args.ldc = c_cols;
          args.a = op.input(dtype, (trans_a ? k : m) * a_cols);
          args.b = op.input(dtype, (trans_b ? n : k) * b_cols);
          if (bias) args.bias = op.input(dtype, n);
          args.c = op.accumulated(out, m * c_cols, accumulate);
          ops.matmul(stream, args);
        });
      }
    }
  }
}

void conform_column_sum(const Backends& backends) {
  struct {
    std::int64_t rows, cols, ldx;
  } const shapes[] = {{1, 1, 0},   {0, 5, 0},      {7, 1, 0},    {3, 15, 0},    {16, 16, 0},  {17, 17, 20},  {33, 100, 0},
                      {64, 31, 0}, {65, 257, 300}, {129, 48, 0}, {500, 33, 40}, {1000, 7, 0}, {300, 1000, 0}};
  for (const DType dtype : kFloatTypes) {
    for (const auto& s : shapes) {
      for (const bool accumulate : {false, true}) {
        check(
            backends, {.op = "column_sum"},
            fmt::format("{} {}x{} ld {} {}", dtype_name(dtype), s.rows, s.cols, s.ldx, accumulate),
            [&](Ops& ops, StreamHandle* stream, Operands& op) {
              const ConstPtr x = op.input(dtype, s.rows * (s.ldx != 0 ? s.ldx : s.cols), 1, 0.5);
              ops.column_sum(stream, {.x = x,
                                      .out = op.accumulated(DType::f32, s.cols, accumulate),
                                      .rows = s.rows,
                                      .cols = s.cols,
                                      .ldx = s.ldx,
                                      .accumulate = accumulate});
            },
            s.cols % 2);
      }
    }
  }
}

void conform_attention_forward(const Backends& backends) {
  const auto run = [&](const AttentionShape& shape, DType dtype) {
    check(backends, {.op = "attention_forward"}, text_of(shape, dtype), [&](Ops& ops, StreamHandle* stream, Operands& op) {
      ops.attention_forward(stream, attention_inputs(op, shape, dtype));
    });
  };
  for (const DType dtype : kFloatTypes) {
    for (const AttentionShape& shape : kAttentionShapes) run(shape, dtype);
    for (const AttentionShape& shape : kCachedShapes) run(shape, dtype);
  }
}

void conform_attention_backward(const Backends& backends) {
  for (const DType dtype : kFloatTypes) {
    for (const AttentionShape& s : kAttentionShapes) {
      check(backends, {.op = "attention_backward"}, text_of(s, dtype), [&](Ops& ops, StreamHandle* stream, Operands& op) {
        const AttentionForwardArgs forward = attention_inputs(op, s, dtype);
        ops.attention_forward(stream, forward);
        const std::int64_t tokens = s.batch * s.q_len, q_cols = s.heads * s.head_dim, kv_cols = s.kv_heads * s.head_dim;
        AttentionBackwardArgs args{.q = forward.q,
                                   .k = forward.k,
                                   .v = forward.v,
                                   .out = forward.out,
                                   .dout = op.input(dtype, tokens * q_cols),
                                   .lse = forward.lse,
                                   .batch = s.batch,
                                   .seq_len = s.q_len,
                                   .heads = s.heads,
                                   .kv_heads = s.kv_heads,
                                   .head_dim = s.head_dim,
                                   .window = s.window,
                                   .q_stride = forward.q_stride,
                                   .k_stride = forward.k_stride,
                                   .v_stride = forward.v_stride,
                                   .out_stride = forward.out_stride,
                                   .dout_stride = q_cols,
                                   .scale = forward.scale};
        if (s.fused) {
          const std::int64_t row = q_cols + 2 * kv_cols;
          args.dq = op.output(dtype, tokens * row);
          args.dk = spipe::offset(args.dq, q_cols);
          args.dv = spipe::offset(args.dq, q_cols + kv_cols);
          args.dq_stride = args.dk_stride = args.dv_stride = row;
        } else {
          args.dq = op.output(dtype, tokens * q_cols);
          args.dk = op.output(dtype, tokens * (kv_cols + 1));
          args.dv = op.output(dtype, tokens * kv_cols);
          args.dq_stride = q_cols;
          args.dk_stride = kv_cols + 1;
          args.dv_stride = kv_cols;
        }
        ops.attention_backward(stream, args);
      });
    }
  }
}

}  // namespace spipe::test
