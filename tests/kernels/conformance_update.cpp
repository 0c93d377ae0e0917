// Conformance of finish_gradient and AdamW: the bits of the reference.
#include <fmt/core.h>

#include <cmath>
#include <limits>

#include "tests/kernels/conformance.h"

namespace spipe::test {
namespace {

constexpr std::int64_t kLengths[] = {0, 1, 7, 15, 16, 17, 100, 1000, 4095, 4096, 4097, 8191, 12288, 20001};

enum class Content { ordinary, zero, tiny, huge, not_finite };
constexpr Content kContents[] = {Content::ordinary, Content::zero, Content::tiny, Content::huge, Content::not_finite};

std::vector<double> gradient(Operands& op, std::int64_t elements, Content content) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < elements; ++i) {
    const std::uint64_t r = op.next_random();
    double value = static_cast<double>(static_cast<std::int64_t>(r)) * 0x1p-63;
    switch (content) {
      case Content::ordinary:
        value = std::ldexp(value, static_cast<int>(r % 24) - 20);
        break;
      case Content::zero:
        value = i % 2 == 0 ? 0.0 : -0.0;
        break;
      case Content::tiny:
        value = std::ldexp(value, -120 - static_cast<int>(r % 30));
        break;
      case Content::huge:
        value = std::ldexp(value, 100 + static_cast<int>(r % 27));
        break;
      case Content::not_finite:
        if (r % 11 == 0) value = std::numeric_limits<double>::infinity() * (r % 2 == 0 ? 1 : -1);
        if (r % 13 == 0) value = std::numeric_limits<double>::quiet_NaN();
        break;
    }
    values.push_back(value);
  }
  return values;
}

}  // namespace

void conform_finish_gradient(const Backends& backends) {
  for (const std::int64_t elements : kLengths) {
    for (const Content content : kContents) {
      for (const DType dtype : kFloatTypes) {
        for (int form = 0; form < 8; ++form) {
          const bool second = form % 2 == 1, in_place = form / 2 % 2 == 1, checked = form < 4;
          check(
              backends, {.op = "finish_gradient", .exact = true},
              fmt::format("{} elements {} content {} second {} in place {} checked {}", dtype_name(dtype), elements,
                          static_cast<int>(content), second, in_place, checked),
              [&](Ops& ops, StreamHandle* stream, Operands& op) {
                FinishGradientArgs args{.elements = elements};
                const std::vector<double> a = gradient(op, elements, content);
                const Ptr a_in_place = in_place ? op.in_place_values(DType::f32, a) : Ptr{};
                args.a = in_place ? static_cast<const float*>(a_in_place.data) : op.input_floats(a);
                if (second) args.b = op.input_floats(gradient(op, elements, content));
                args.dst = in_place ? Ptr{a_in_place.data, dtype} : op.output(dtype, elements);
                const std::int64_t blocks = (elements + kNormBlock - 1) / kNormBlock;
                if (checked) {
                  args.block_sums = static_cast<double*>(op.output(DType::f64, blocks).data);
                  args.nonfinite = op.flag();
                }
                ops.finish_gradient(stream, args);
              },
              elements % 2);
        }
      }
    }
  }
}

void conform_adamw(const Backends& backends) {
  for (const std::int64_t elements : kLengths) {
    for (const Content content : kContents) {
      for (const DType grad : kFloatTypes) {
        for (int copy = 0; copy < 3; ++copy) {  // no compute copy, bf16, fp16
          for (const int step : {1, 1000}) {
            check(
                backends, {.op = "adamw", .exact = true},
                fmt::format("{} elements {} content {} copy {} step {}", dtype_name(grad), elements, static_cast<int>(content),
                            copy, step),
                [&](Ops& ops, StreamHandle* stream, Operands& op) {
                  const double lr = 3e-4, beta1 = 0.9, beta2 = 0.95;
                  AdamWArgs args{.elements = elements, .eps = 1e-8F};
                  args.grad_scale = content == Content::ordinary ? 1.0F / 1024 : 1.0F;
                  args.beta1 = static_cast<float>(beta1);
                  args.one_minus_beta1 = static_cast<float>(1 - beta1);
                  args.beta2 = static_cast<float>(beta2);
                  args.one_minus_beta2 = static_cast<float>(1 - beta2);
                  args.decay = copy == 1 ? 1.0F : static_cast<float>(1 - lr * 0.1);
                  args.inv_sqrt_bias2 = static_cast<float>(1 / std::sqrt(1 - std::pow(beta2, step)));
                  args.step_size = static_cast<float>(lr / (1 - std::pow(beta1, step)));
                  args.grad = op.input_values(grad, gradient(op, elements, content));
                  // Masters beyond the range of the fp16 copy must raise the flag.
                  const double spread = content == Content::huge ? 1e5 : 0.02;
                  args.master = static_cast<float*>(op.in_place(DType::f32, elements, spread).data);
                  std::vector<double> second_moments =
                      gradient(op, elements, content == Content::zero ? content : Content::ordinary);
                  for (double& v : second_moments) v = v * v * 1e-6;
                  args.m = static_cast<float*>(op.in_place(DType::f32, elements, content == Content::zero ? 0 : 1e-4).data);
                  args.v = static_cast<float*>(op.in_place_values(DType::f32, second_moments).data);
                  if (copy != 0) args.compute_copy = op.output(copy == 1 ? DType::bf16 : DType::f16, elements);
                  args.nonfinite_master = op.flag();
                  ops.adamw(stream, args);
                },
                elements % 2);
          }
        }
      }
    }
  }
  // Out of place the old state stays and the new one has the same bits; aligned or not.
  for (const std::int64_t elements : kLengths) {
    for (const std::int64_t shift : {0, 3}) {
      check(backends, {.op = "adamw", .exact = true}, fmt::format("{} elements out of place, shift {}", elements, shift),
            [&](Ops& ops, StreamHandle* stream, Operands& op) {
              AdamWArgs args{.elements = elements, .beta1 = 0.9F, .one_minus_beta1 = 0.1F, .beta2 = 0.95F};
              args.one_minus_beta2 = 0.05F;
              args.decay = 0.999F;
              args.eps = 1e-8F;
              args.step_size = 1e-3F;
              const std::int64_t all = elements + shift;
              args.grad = offset(
                  Ptr{const_cast<void*>(op.input_values(DType::f32, gradient(op, all, Content::ordinary)).data), DType::f32},
                  shift);
              args.from_master = static_cast<const float*>(op.input(DType::f32, all, 0.02).data) + shift;
              args.from_m = static_cast<const float*>(op.input(DType::f32, all, 1e-4).data) + shift;
              args.from_v = static_cast<const float*>(
                                op.input_values(DType::f32, std::vector<double>(static_cast<std::size_t>(all), 1e-7)).data) +
                            shift;
              args.master = static_cast<float*>(op.output(DType::f32, elements).data);
              args.m = static_cast<float*>(op.output(DType::f32, elements).data);
              args.v = static_cast<float*>(op.output(DType::f32, elements).data);
              args.nonfinite_master = op.flag();
              ops.adamw(stream, args);
            });
    }
  }
  // A finite master whose bf16 copy rounds to infinity raises the flag; an infinite one does not.
  check(backends, {.op = "adamw", .exact = true}, "masters near the largest float",
        [](Ops& ops, StreamHandle* stream, Operands& op) {
          AdamWArgs args{.elements = 20, .eps = 1e-8F, .step_size = 1e-3F};
          args.grad = op.input_values(DType::f32, std::vector<double>(20, 0.0));
          std::vector<double> masters(20, 1.0);
          masters[18] = 3.4e38;
          args.master = static_cast<float*>(op.in_place_values(DType::f32, masters).data);
          args.m = static_cast<float*>(op.in_place_values(DType::f32, std::vector<double>(20, 0.0)).data);
          args.v = static_cast<float*>(op.in_place_values(DType::f32, std::vector<double>(20, 0.0)).data);
          args.compute_copy = op.output(DType::bf16, 20);
          args.nonfinite_master = op.flag();
          ops.adamw(stream, args);
        });
}

}  // namespace spipe::test
