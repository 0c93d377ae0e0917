// Conformance of the norms, rope and the loss.
#include <fmt/core.h>

#include <cmath>
#include <limits>

#include "tests/kernels/conformance.h"

namespace spipe::test {
namespace {

struct RowShape {
  std::int64_t rows, cols;
};
constexpr RowShape kRowShapes[] = {{1, 1},   {0, 7},    {1, 768},  {3, 5},    {2, 15},   {5, 16},    {7, 17},   {31, 33},
                                   {32, 64}, {33, 100}, {65, 257}, {130, 31}, {300, 48}, {40, 1024}, {1500, 24}};

struct VectorShape {  // norms over short vectors inside longer rows
  std::int64_t outer, inner, cols, gap;
};
constexpr VectorShape kVectorShapes[] = {{1, 1, 1, 0},   {0, 2, 8, 0},     {3, 2, 6, 5},   {5, 4, 16, 32},
                                         {7, 3, 24, 1},  {33, 8, 64, 0},   {40, 5, 80, 7}, {65, 2, 128, 64},
                                         {9, 12, 17, 3}, {130, 1, 48, 16}, {1, 33, 31, 0}, {64, 4, 128, 256}};

// How the residual branch enters: not, into a buffer of its own, or in place over x or over the residual itself.
enum class Residual { none, separate, over_x, over_residual };
constexpr Residual kResiduals[] = {Residual::none, Residual::separate, Residual::over_x, Residual::over_residual};

template <typename Args>
void add_residual(Operands& op, Args& args, Residual form, DType dtype, std::int64_t elements) {
  const bool x_is_output = form == Residual::over_x, residual_is_output = form == Residual::over_residual;
  const Ptr changed = x_is_output || residual_is_output ? op.in_place(dtype, elements, 1.5, 0.3) : Ptr{};
  args.x = x_is_output ? ConstPtr(changed) : op.input(dtype, elements, 2, -0.2);
  if (form == Residual::none) return;
  args.residual = residual_is_output ? ConstPtr(changed) : op.input(dtype, elements);
  args.sum_out = form == Residual::separate ? op.output(dtype, elements) : changed;
}

}  // namespace

void conform_layernorm(const Backends& backends) {
  for (const DType dtype : kFloatTypes) {
    for (const auto& [rows, cols] : kRowShapes) {
      for (const Residual form : kResiduals) {
        check(
            backends, {.op = "layernorm_forward"},
            fmt::format("{} {}x{} residual {}", dtype_name(dtype), rows, cols, static_cast<int>(form)),
            [&](Ops& ops, StreamHandle* stream, Operands& op) {
              LayerNormForwardArgs args{.rows = rows, .cols = cols, .eps = 1e-5F};
              add_residual(op, args, form, dtype, rows * cols);
              args.weight = op.input(dtype, cols, 0.3, 1);
              args.bias = op.input(dtype, cols, 0.5);
              args.y = op.output(dtype, rows * cols);
              args.mean = op.output_floats(rows);
              args.rstd = op.output_floats(rows);
              ops.layernorm_forward(stream, args);
            },
            cols % 2);
      }
      for (int form = 0; form < 4; ++form) {
        const bool accumulate = form % 2 == 1, in_place = form / 2 == 1;
        check(
            backends, {.op = "layernorm_backward"},
            fmt::format("{} {}x{} accumulate {} residual in place {}", dtype_name(dtype), rows, cols, accumulate, in_place),
            [&](Ops& ops, StreamHandle* stream, Operands& op) {
              std::vector<double> mean, rstd;
              for (std::int64_t r = 0; r < rows; ++r) mean.push_back(0.1 * static_cast<double>(r % 7) - 0.3);
              for (std::int64_t r = 0; r < rows; ++r) rstd.push_back(0.8 + 0.05 * static_cast<double>(r % 5));
              LayerNormBackwardArgs args{.rows = rows, .cols = cols, .accumulate = accumulate};
              args.dy = op.input(dtype, rows * cols);
              args.x = op.input(dtype, rows * cols);
              args.weight = op.input(dtype, cols, 0.3, 1);
              args.mean = op.input_floats(mean);
              args.rstd = op.input_floats(rstd);
              args.dx = in_place ? op.in_place(dtype, rows * cols) : op.output(dtype, rows * cols);
              if (in_place) args.residual_grad = args.dx;
              args.dweight = op.accumulated(DType::f32, cols, accumulate);
              args.dbias = op.accumulated(DType::f32, cols, accumulate);
              ops.layernorm_backward(stream, args);
            },
            cols % 2);
      }
    }
  }
  // A long way from zero and nearly constant: the variance must not be a difference of large sums.
  check(backends, {.op = "layernorm_far_from_zero"}, "far", [](Ops& ops, StreamHandle* stream, Operands& op) {
    LayerNormForwardArgs args{.rows = 9, .cols = 333, .eps = 1e-5F};
    args.x = op.input(DType::f32, args.rows * args.cols, 0.5, 1000);
    args.weight = op.input(DType::f32, args.cols, 0.3, 1);
    args.bias = op.input(DType::f32, args.cols, 0.5);
    args.y = op.output(DType::f32, args.rows * args.cols);
    args.mean = op.output_floats(args.rows);
    args.rstd = op.output_floats(args.rows);
    ops.layernorm_forward(stream, args);
  });
}

void conform_rmsnorm(const Backends& backends) {
  for (const DType dtype : kFloatTypes) {
    for (const auto& [rows, cols] : kRowShapes) {
      for (const Residual form : kResiduals) {
        check(
            backends, {.op = "rmsnorm_forward"},
            fmt::format("{} {}x{} residual {}", dtype_name(dtype), rows, cols, static_cast<int>(form)),
            [&](Ops& ops, StreamHandle* stream, Operands& op) {
              RmsNormForwardArgs args{.outer = rows, .cols = cols, .eps = 1e-6F};
              add_residual(op, args, form, dtype, rows * cols);
              args.weight = op.input(dtype, cols, 0.3, 1);
              args.y = op.output(dtype, rows * cols);
              args.rstd = op.output_floats(rows);
              ops.rmsnorm_forward(stream, args);
            },
            cols % 2);
      }
      for (int form = 0; form < 4; ++form) {
        const bool accumulate = form % 2 == 1, in_place = form / 2 == 1;
        check(
            backends, {.op = "rmsnorm_backward"},
            fmt::format("{} {}x{} accumulate {} residual in place {}", dtype_name(dtype), rows, cols, accumulate, in_place),
            [&](Ops& ops, StreamHandle* stream, Operands& op) {
              RmsNormBackwardArgs args{.outer = rows, .cols = cols, .accumulate = accumulate};
              args.dy = op.input(dtype, rows * cols);
              args.x = op.input(dtype, rows * cols);
              args.weight = op.input(dtype, cols, 0.3, 1);
              args.rstd = op.input_floats(std::vector<double>(static_cast<std::size_t>(rows), 0.9));
              args.dx = in_place ? op.in_place(dtype, rows * cols) : op.output(dtype, rows * cols);
              if (in_place) args.residual_grad = args.dx;
              args.dweight = op.accumulated(DType::f32, cols, accumulate);
              ops.rmsnorm_backward(stream, args);
            },
            cols % 2);
      }
    }
    for (const auto& [outer, inner, cols, gap] : kVectorShapes) {
      const std::int64_t row = inner * cols, wide = row + gap;
      for (const bool in_place : {false, true}) {
        const std::string text =
            fmt::format("{} {}x{}x{} gap {} in place {}", dtype_name(dtype), outer, inner, cols, gap, in_place);
        check(backends, {.op = "rmsnorm_forward"}, text, [&](Ops& ops, StreamHandle* stream, Operands& op) {
          RmsNormForwardArgs args{.outer = outer, .inner = inner, .cols = cols, .x_stride = wide, .eps = 1e-6F};
          args.weight = op.input(dtype, cols, 0.3, 1);
          args.y = in_place ? op.in_place(dtype, outer * wide) : op.output(dtype, outer * row);
          args.x = in_place ? ConstPtr(args.y) : op.input(dtype, outer * wide);
          args.y_stride = in_place ? wide : 0;
          args.rstd = op.output_floats(outer * inner);
          ops.rmsnorm_forward(stream, args);
        });
        check(backends, {.op = "rmsnorm_backward"}, text, [&](Ops& ops, StreamHandle* stream, Operands& op) {
          RmsNormBackwardArgs args{.outer = outer, .inner = inner, .cols = cols};
          args.x = op.input(dtype, outer * row);
          args.weight = op.input(dtype, cols, 0.3, 1);
          args.dx = in_place ? op.in_place(dtype, outer * wide) : op.output(dtype, outer * wide);
          args.dy = in_place ? ConstPtr(args.dx) : op.input(dtype, outer * row);
          args.dy_stride = in_place ? wide : 0;
          args.dx_stride = wide;
          args.rstd = op.input_floats(std::vector<double>(static_cast<std::size_t>(outer * inner), 1.1));
          args.dweight = op.output(DType::f32, cols);
          ops.rmsnorm_backward(stream, args);
        });
      }
    }
  }
}

void conform_rope(const Backends& backends) {
  struct {
    std::int64_t tokens, seq_len, heads, head_dim, gap, first_position;
  } const shapes[] = {{1, 1, 1, 2, 0, 0},    {0, 4, 2, 8, 0, 0},    {6, 3, 2, 6, 0, 0},    {10, 5, 3, 16, 32, 0},
                      {34, 17, 4, 24, 1, 0}, {64, 64, 2, 64, 0, 0}, {65, 65, 3, 80, 5, 0}, {66, 33, 2, 128, 256, 0},
                      {1, 1, 8, 64, 0, 40},  {7, 7, 1, 34, 0, 11},  {12, 4, 2, 10, 3, 2},  {130, 130, 5, 64, 64, 0}};
  for (const DType dtype : kFloatTypes) {
    for (const auto& s : shapes) {
      for (const bool backward : {false, true}) {
        check(
            backends, {.op = "rope"},
            fmt::format("{} tokens {} seq {} heads {} dim {} gap {} from {} backward {}", dtype_name(dtype), s.tokens,
                        s.seq_len, s.heads, s.head_dim, s.gap, s.first_position, backward),
            [&](Ops& ops, StreamHandle* stream, Operands& op) {
              std::vector<double> cosines, sines;
              for (std::int64_t p = 0; p < s.first_position + s.seq_len; ++p) {
                for (std::int64_t i = 0; i < s.head_dim / 2; ++i) {
                  const double exponent = -2.0 * static_cast<double>(i) / static_cast<double>(s.head_dim);
                  const double angle = static_cast<double>(p) * std::pow(10000.0, exponent);
                  cosines.push_back(std::cos(angle));
                  sines.push_back(std::sin(angle));
                }
              }
              const std::int64_t stride = s.heads * s.head_dim + s.gap;
              RopeArgs args{.x = op.in_place(dtype, s.tokens * stride)};
              args.cos = op.input_floats(cosines);
              args.sin = op.input_floats(sines);
              args.tokens = s.tokens;
              args.seq_len = s.seq_len;
              args.heads = s.heads;
              args.head_dim = s.head_dim;
              args.x_stride = stride;
              args.first_position = s.first_position;
              args.backward = backward;
              ops.rope(stream, args);
            },
            s.gap % 2);
      }
    }
  }
}

void conform_softmax_cross_entropy(const Backends& backends) {
  struct {
    std::int64_t rows, cols, ld;
    double spread;
  } const shapes[] = {{1, 1, 1, 1},       {0, 9, 9, 1},       {1, 2, 2, 0.5},    {3, 15, 15, 1},
                      {5, 16, 20, 2},     {7, 17, 17, 1},     {33, 100, 128, 4}, {64, 257, 257, 1},
                      {9, 1000, 1024, 8}, {2, 5003, 5003, 2}, {40, 33, 40, 30},  {6, 300, 300, 1e4}};
  for (const auto& s : shapes) {
    for (const int masking : {0, 1, 2}) {  // no target masked, some, all
      for (const float scale : {0.0F, 0.125F, 1.0F}) {
        check(
            backends, {.op = s.spread > 8 ? "softmax_cross_entropy_huge" : "softmax_cross_entropy"},
            fmt::format("{}x{} ld {} spread {} masking {} scale {}", s.rows, s.cols, s.ld, s.spread, masking, scale),
            [&](Ops& ops, StreamHandle* stream, Operands& op) {
              std::vector<std::int32_t> targets = random_tokens(op, s.rows, s.cols);
              for (std::size_t r = 0; r < targets.size(); ++r) {
                if (masking == 2 || (masking == 1 && r % 3 != 1)) targets[r] = r % 2 == 0 ? -1 : -100;
              }
              SoftmaxCrossEntropyArgs args{.rows = s.rows, .cols = s.cols, .ld = s.ld, .scale = scale};
              args.logits = static_cast<float*>(op.in_place(DType::f32, s.rows * s.ld, s.spread, 1).data);
              args.targets = op.input_ints(targets);
              args.nll = op.output_floats(s.rows);
              ops.softmax_cross_entropy(stream, args);
            },
            s.cols % 2);
      }
    }
  }
}

}  // namespace spipe::test
