// Conformance of the update rules in every form of the state: the bits of the reference.
#include <fmt/core.h>

#include <cmath>

#include "tests/kernels/conformance.h"

namespace spipe::test {
namespace {

constexpr std::int64_t kLengths[] = {0, 1, 15, 17, 100, 4097, 20001};

enum class Master { alone, with_bf16, with_half, split };

struct Form {
  UpdateRule rule;
  Master master;
  DType moment, grad;
  bool out_of_place;
  int content;  // 0: as in training, 1: zeros, 2: huge numbers
};

std::vector<double> numbers(Operands& op, std::int64_t elements, int content, int exponent, bool positive) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < elements; ++i) {
    const std::uint64_t r = op.next_random();
    double value = std::ldexp(static_cast<double>(static_cast<std::int64_t>(r)) * 0x1p-63, exponent - static_cast<int>(r % 16));
    if (content == 1) value = r % 2 == 0 ? 0.0 : -0.0;
    if (content == 2) value = std::ldexp(value, r % 5 == 0 ? 110 : 60);
    values.push_back(positive ? value * value : value);
  }
  return values;
}

// The old planes, and in `to` the new ones: the same, or others.
void make_planes(Operands& op, const Form& form, std::int64_t n, UpdateArgs& args) {
  const auto plane = [&](DType dtype, const std::vector<double>& values) {
    if (!form.out_of_place) {
      const Ptr p = op.in_place_values(dtype, values);
      return std::pair{p, p};
    }
    return std::pair{Ptr{const_cast<void*>(op.input_values(dtype, values).data), dtype}, op.output(dtype, n)};
  };
  const std::vector<double> masters = numbers(op, n, form.content == 2 ? 0 : form.content, 2, false);
  if (form.master == Master::split) {
    // A compute copy, and any low bits: the halves of some master.
    std::tie(args.from.compute, args.to.compute) = plane(DType::bf16, masters);
    std::vector<double> low;
    for (std::int64_t i = 0; i < n; ++i) low.push_back(f32_from_bf16(static_cast<std::uint16_t>(op.next_random() % 65536)));
    std::tie(args.from.master, args.to.master) = plane(DType::bf16, low);
    args.from.master.dtype = args.to.master.dtype = DType::u16;
  } else {
    std::tie(args.from.master, args.to.master) = plane(DType::f32, masters);
    if (form.master != Master::alone)
      args.to.compute = op.output(form.master == Master::with_bf16 ? DType::bf16 : DType::f16, n);
  }
  std::tie(args.from.m, args.to.m) = plane(form.moment, numbers(op, n, form.content == 2 ? 0 : form.content, -8, false));
  if (has_second_moment(form.rule)) {
    std::tie(args.from.v, args.to.v) = plane(form.moment, numbers(op, n, form.content == 2 ? 0 : form.content, -8, true));
  }
}

void run(Ops& ops, StreamHandle* stream, Operands& op, const Form& form, std::int64_t n) {
  UpdateArgs args;
  args.rule = form.rule;
  args.elements = n;
  args.first_element = 4294967290ULL;  // the number wraps within the run
  args.moment_key = 0x9e3779b9U;
  args.grad_scale = 0.5F;
  args.beta1 = 0.9F;
  args.one_minus_beta1 = 0.1F;
  args.beta2 = 0.99F;
  args.one_minus_beta2 = 0.01F;
  args.decay = 0.9997F;
  args.l2 = 0.1F;
  args.inv_sqrt_bias2 = 3.2F;
  args.eps = 1e-8F;
  args.step_size = 3e-3F;
  args.grad =
      op.input_values(form.grad, numbers(op, n, form.grad == DType::f16 && form.content == 2 ? 0 : form.content, 0, false));
  make_planes(op, form, n, args);
  args.nonfinite_master = op.flag();
  ops.update(stream, args);
}

}  // namespace

void conform_update(const Backends& backends) {
  int number = 0;
  for (const UpdateRule rule :
       {UpdateRule::adamw, UpdateRule::adam, UpdateRule::sgd, UpdateRule::sgd_nesterov, UpdateRule::lion}) {
    for (const Master master : {Master::alone, Master::with_bf16, Master::with_half, Master::split}) {
      for (const DType moment : {DType::f32, DType::bf16}) {
        for (const DType grad : kFloatTypes) {
          for (const bool out_of_place : {false, true}) {
            for (int content = 0; content < 3; ++content) {
              const Form form{rule, master, moment, grad, out_of_place, content};
              // A different length for every form, and in place of the rest, all lengths for those that training has.
              const bool all = content == 0 && grad == (master == Master::alone ? DType::f32 : DType::bf16);
              for (std::size_t l = 0; l < std::size(kLengths); ++l) {
                if (!all && l != static_cast<std::size_t>(number) % std::size(kLengths)) continue;
                check(
                    backends, {.op = "update", .exact = true},
                    fmt::format("rule {} master {} moments {} gradient {} out of place {} content {}, {} elements",
                                static_cast<int>(rule), static_cast<int>(master), dtype_name(moment), dtype_name(grad),
                                out_of_place, content, kLengths[l]),
                    [&](Ops& ops, StreamHandle* stream, Operands& op) { run(ops, stream, op, form, kLengths[l]); },
                    kLengths[l] % 2);
              }
              ++number;
            }
          }
        }
      }
    }
  }
}

}  // namespace spipe::test
