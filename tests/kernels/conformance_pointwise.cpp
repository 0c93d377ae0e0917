// Conformance of activations, embedding, dropout and the plain elementwise ops.
#include <fmt/core.h>

#include <cmath>
#include <limits>

#include "tests/kernels/conformance.h"

namespace spipe::test {
namespace {

constexpr std::int64_t kLengths[] = {0, 1, 2, 15, 16, 17, 31, 33, 64, 100, 1023, 4097, 20000};
constexpr Activation kActivations[] = {Activation::gelu_tanh, Activation::gelu_erf, Activation::relu, Activation::silu};

struct GatedShape {
  std::int64_t rows, cols;
};
constexpr GatedShape kGatedShapes[] = {{1, 1},   {0, 5},   {3, 2},    {2, 15},   {5, 16},  {7, 17},
                                       {33, 33}, {9, 100}, {65, 257}, {2, 1376}, {64, 64}, {129, 3}};

// Zeros, tiny and large arguments beside random ones.
std::vector<double> hard_arguments(Operands& op, std::int64_t elements) {
  const double special[] = {0.0, -0.0, 1e-30, -1e-30, 1e-6, -1e-6, 0.7, -0.7, 3.0, -3.0, 8.0, -8.0, 30.0, -30.0, 100.0, -100.0};
  std::vector<double> values;
  for (std::int64_t i = 0; i < elements; ++i) {
    const double random = static_cast<double>(op.next_random() >> 11) * 0x1p-53;
    values.push_back(i % 3 == 0 ? special[static_cast<std::size_t>(i / 3 % 16)] : 10 * random - 5);
  }
  return values;
}

}  // namespace

void conform_activation(const Backends& backends) {
  for (const DType dtype : kFloatTypes) {
    for (const Activation kind : kActivations) {
      for (const std::int64_t elements : kLengths) {
        const std::string text = fmt::format("{} kind {} elements {}", dtype_name(dtype), static_cast<int>(kind), elements);
        check(
            backends, {.op = "activation_forward"}, text,
            [&](Ops& ops, StreamHandle* stream, Operands& op) {
              const ConstPtr x = op.input(dtype, elements, 2);
              ops.activation_forward(stream, {.kind = kind, .x = x, .y = op.output(dtype, elements), .elements = elements});
            },
            elements % 2);
        for (const bool in_place : {false, true}) {
          check(
              backends, {.op = "activation_backward"}, text + (in_place ? " in place" : ""),
              [&](Ops& ops, StreamHandle* stream, Operands& op) {
                ActivationBackwardArgs args{.kind = kind, .elements = elements};
                args.x = op.input_values(dtype, hard_arguments(op, elements));
                args.dx = in_place ? op.in_place(dtype, elements) : op.output(dtype, elements);
                args.dy = in_place ? ConstPtr(args.dx) : op.input(dtype, elements);
                ops.activation_backward(stream, args);
              },
              elements % 2);
        }
      }
    }
  }
  // Small values of the left tail, which the others would drown: relative accuracy holds there too.
  for (const Activation kind : {Activation::gelu_tanh, Activation::gelu_erf, Activation::silu}) {
    for (int from = -9; from < 0; ++from) {
      check(backends, {.op = "activation_tail"}, fmt::format("tail kind {} from {}", static_cast<int>(kind), from),
            [&](Ops& ops, StreamHandle* stream, Operands& op) {
              std::vector<double> values;
              for (int i = 0; i <= 200; ++i) values.push_back(from + i * 0.005);
              const ConstPtr x = op.input_values(DType::f32, values);
              ops.activation_forward(stream, {.kind = kind, .x = x, .y = op.output(DType::f32, 201), .elements = 201});
            });
    }
  }
}

void conform_gated(const Backends& backends) {
  for (const DType dtype : kFloatTypes) {
    for (const Activation kind : kActivations) {
      for (const auto& [rows, cols] : kGatedShapes) {
        const std::string text = fmt::format("{} kind {} {}x{}", dtype_name(dtype), static_cast<int>(kind), rows, cols);
        check(
            backends, {.op = "gated_forward"}, text,
            [&](Ops& ops, StreamHandle* stream, Operands& op) {
              const ConstPtr x = op.input(dtype, rows * 2 * cols, 2);
              ops.gated_forward(stream, {.kind = kind, .x = x, .y = op.output(dtype, rows * cols), .rows = rows, .cols = cols});
            },
            cols % 2);
        for (const bool in_place : {false, true}) {
          check(
              backends, {.op = "gated_backward"}, text + (in_place ? " in place" : ""),
              [&](Ops& ops, StreamHandle* stream, Operands& op) {
                GatedBackwardArgs args{.kind = kind, .rows = rows, .cols = cols};
                args.dx = in_place ? op.in_place(dtype, rows * 2 * cols, 2) : op.output(dtype, rows * 2 * cols);
                args.x = in_place ? ConstPtr(args.dx) : op.input(dtype, rows * 2 * cols, 2);
                args.dy = op.input(dtype, rows * cols);
                ops.gated_backward(stream, args);
              },
              cols % 2);
        }
      }
    }
  }
}

void conform_embedding(const Backends& backends) {
  struct {
    std::int64_t count, seq_len, cols, vocab, first_position, position_rows;
  } const shapes[] = {{1, 1, 1, 1, 0, 1},      {0, 4, 8, 5, 0, 4},     {6, 3, 5, 4, 0, 3},          {10, 5, 16, 100, 2, 9},
                      {64, 16, 17, 30, 0, 16}, {33, 33, 33, 7, 2, 40}, {128, 64, 48, 1000, 0, 64},  {7, 7, 257, 3, 0, 8},
                      {200, 50, 31, 2, 0, 50}, {12, 4, 768, 11, 1, 5}, {256, 128, 64, 300, 0, 128}, {5, 1, 10, 50, 3, 6}};
  for (const DType dtype : kFloatTypes) {
    for (const auto& s : shapes) {
      for (const bool positions : {false, true}) {
        const std::string text = fmt::format("{} count {} seq {} cols {} vocab {} from {} positions {}", dtype_name(dtype),
                                             s.count, s.seq_len, s.cols, s.vocab, s.first_position, positions);
        check(
            backends, {.op = "embedding_forward"}, text,
            [&](Ops& ops, StreamHandle* stream, Operands& op) {
              EmbeddingForwardArgs args{.count = s.count, .seq_len = s.seq_len, .cols = s.cols, .vocab = s.vocab};
              args.first_position = s.first_position;
              args.tokens = op.input_ints(random_tokens(op, s.count, s.vocab));
              args.table = op.input(dtype, s.vocab * s.cols);
              if (positions) args.positions = op.input(dtype, s.position_rows * s.cols, 0.3);
              args.out = op.output(dtype, s.count * s.cols);
              ops.embedding_forward(stream, args);
            },
            s.cols % 2);
        for (const bool accumulate : {false, true}) {
          for (const bool table : {true, false}) {
            check(backends, {.op = "embedding_backward"}, fmt::format("{} accumulate {} table {}", text, accumulate, table),
                  [&](Ops& ops, StreamHandle* stream, Operands& op) {
                    EmbeddingBackwardArgs args{.count = s.count, .seq_len = s.seq_len, .cols = s.cols, .vocab = s.vocab};
                    args.first_position = s.first_position;
                    args.position_rows = s.position_rows;
                    args.accumulate = accumulate;
                    args.tokens = op.input_ints(random_tokens(op, s.count, s.vocab));
                    args.dout = op.input(dtype, s.count * s.cols);
                    if (table) args.dtable = op.accumulated(DType::f32, s.vocab * s.cols, accumulate);
                    if (positions) args.dpositions = op.accumulated(DType::f32, s.position_rows * s.cols, accumulate);
                    args.workspace = op.workspace(embedding_workspace_bytes(s.count, s.vocab));
                    ops.embedding_backward(stream, args);
                  });
          }
        }
      }
    }
  }
}

void conform_dropout(const Backends& backends) {
  for (const DType dtype : kFloatTypes) {
    for (const std::int64_t elements : kLengths) {
      for (const float p : {0.0F, 0.1F, 0.5F, 0.999F}) {
        const bool in_place = p == 0.5F;
        check(
            backends, {.op = "dropout"}, fmt::format("{} elements {} p {}", dtype_name(dtype), elements, p),
            [&](Ops& ops, StreamHandle* stream, Operands& op) {
              DropoutArgs args{.sequences = elements < 1000 ? 5 : 2, .elements_per_sequence = elements};
              args.seed = 0x123456789abcdefU;
              args.step = 77;
              args.first_sequence = 40;
              args.site = 3;
              args.p = p;
              args.y = in_place ? op.in_place(dtype, args.sequences * elements) : op.output(dtype, args.sequences * elements);
              args.x = in_place ? ConstPtr(args.y) : op.input(dtype, args.sequences * elements);
              ops.dropout(stream, args);
            },
            elements % 2);
      }
    }
  }
}

void conform_simple(const Backends& backends) {
  for (const std::int64_t elements : kLengths) {
    for (const DType dtype : kFloatTypes) {
      for (int aliasing = 0; aliasing < 3; ++aliasing) {  // none, out over a, out over b
        check(
            backends, {.op = "add"}, fmt::format("{} elements {} aliasing {}", dtype_name(dtype), elements, aliasing),
            [&](Ops& ops, StreamHandle* stream, Operands& op) {
              const Ptr out = aliasing == 0 ? op.output(dtype, elements) : op.in_place(dtype, elements);
              const ConstPtr a = aliasing == 1 ? ConstPtr(out) : op.input(dtype, elements);
              const ConstPtr b = aliasing == 2 ? ConstPtr(out) : op.input(dtype, elements, 0.01);
              ops.add(stream, {.a = a, .b = b, .out = out, .elements = elements});
            },
            elements % 2);
      }
      check(
          backends, {.op = "zero", .exact = true}, fmt::format("{} elements {}", dtype_name(dtype), elements),
          [&](Ops& ops, StreamHandle* stream, Operands& op) {
            ops.zero(stream, {.dst = op.output(dtype, elements), .elements = elements});
          },
          elements % 2);
      for (const DType to : kFloatTypes) {
        for (const bool half_up : {false, true}) {
          if (half_up && (dtype != DType::f32 || to != DType::bf16)) continue;
          for (const double spread : {1.0, 1e-7, 1e5, 2e38}) {
            check(
                backends, {.op = "convert", .exact = true},
                fmt::format("{} to {} elements {} half up {} spread {}", dtype_name(dtype), dtype_name(to), elements, half_up,
                            spread),
                [&](Ops& ops, StreamHandle* stream, Operands& op) {
                  const ConstPtr src = op.input(dtype, elements, spread);
                  ops.convert(stream, {.src = src, .dst = op.output(to, elements), .elements = elements, .half_up = half_up});
                },
                elements % 2);
          }
        }
      }
    }
  }
  const double infinity = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  // Ties to even and away, the largest finite values, what rounds to infinity, denormals of each format.
  const std::vector<double> special = {0.0,     -0.0,     infinity, -infinity, nan,     1.00390625,  1.01171875, -1.00390625,
                                       65504,   65519.9,  65520,    -65536,    6e-8,    3e-8,        2.9e-8,     1e-40,
                                       3.39e38, 3.402e38, -3.4e38,  1e-45,     0x1p-14, 0x1.ffcp-15, 2049,       2051};
  for (const DType to : kFloatTypes) {
    for (const bool half_up : {false, true}) {
      if (half_up && to != DType::bf16) continue;
      check(backends, {.op = "convert", .exact = true}, fmt::format("special values to {} half up {}", dtype_name(to), half_up),
            [&](Ops& ops, StreamHandle* stream, Operands& op) {
              const ConstPtr src = op.input_values(DType::f32, special);
              const auto elements = static_cast<std::int64_t>(special.size());
              ops.convert(stream, {.src = src, .dst = op.output(to, elements), .elements = elements, .half_up = half_up});
            });
    }
  }
}

}  // namespace spipe::test
