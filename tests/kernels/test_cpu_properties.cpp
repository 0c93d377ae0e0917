// What the CPU kernels promise beyond single results: pieces give the bits of the whole, dropout masks depend on names only,
// impossible arguments are refused.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/cpu/cpu_ops.h"
#include "spipe/base/error.h"

namespace spipe::test {
namespace {

struct Cpu {
  ThreadPool pool{2};
  std::unique_ptr<Ops> ops = make_cpu_ops(pool);
};

std::vector<float> ramp(std::int64_t elements, float step) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < elements; ++i) values.push_back(step * static_cast<float>(i * 7919 % 1009 - 500));
  return values;
}

Ptr f32(std::vector<float>& values) { return {values.data(), DType::f32}; }

std::vector<float> dropped(Ops& ops, DropoutArgs args, std::int64_t sequences, std::int64_t elements) {
  std::vector<float> x(static_cast<std::size_t>(sequences * elements), 1.0F), y(x.size());
  args.x = f32(x);
  args.y = f32(y);
  args.sequences = sequences;
  args.elements_per_sequence = elements;
  ops.dropout(nullptr, args);
  return y;
}

}  // namespace

TEST_CASE("AdamW on pieces of a tensor gives the bits of AdamW on the whole") {
  Cpu cpu;
  const std::int64_t elements = 50000;
  const std::vector<float> grad = ramp(elements, 1e-5F), p0 = ramp(elements, 3e-4F), m0 = ramp(elements, 1e-6F);
  const auto update = [&](std::int64_t piece) {
    std::vector<float> g = grad, p = p0, m = m0, v(p.size(), 1e-8F);
    std::vector<std::uint16_t> copy(p.size());
    std::uint32_t overflow = 0;
    for (std::int64_t first = 0; first < elements; first += piece) {
      cpu.ops->adamw(nullptr, {.grad = offset(f32(g), first),
                               .master = p.data() + first,
                               .m = m.data() + first,
                               .v = v.data() + first,
                               .compute_copy = {copy.data() + first, DType::bf16},
                               .nonfinite_master = &overflow,
                               .elements = std::min(piece, elements - first),
                               .grad_scale = 0.5F,
                               .beta1 = 0.9F,
                               .one_minus_beta1 = 0.1F,
                               .beta2 = 0.95F,
                               .one_minus_beta2 = 0.05F,
                               .decay = 0.999F,
                               .inv_sqrt_bias2 = 2,
                               .eps = 1e-8F,
                               .step_size = 1e-3F});
    }
    std::vector<float> result = p;
    result.insert(result.end(), m.begin(), m.end());
    result.insert(result.end(), v.begin(), v.end());
    for (const std::uint16_t bits : copy) result.push_back(f32_from_bf16(bits));
    return result;
  };
  const std::vector<float> whole = update(elements);
  for (const std::int64_t piece : {1, 7, 1000, 4096, 16385}) {
    INFO("pieces of " << piece);
    const std::vector<float> pieces = update(piece);
    CHECK(std::memcmp(whole.data(), pieces.data(), whole.size() * sizeof(float)) == 0);
  }
  CHECK(std::memcmp(whole.data(), p0.data(), p0.size() * sizeof(float)) != 0);
}

TEST_CASE("norm blocks of finish_gradient do not depend on how a tensor is cut at multiples of 4096") {
  Cpu cpu;
  const std::int64_t elements = 5 * kNormBlock + 123;
  const std::vector<float> a = ramp(elements, 1e-3F);
  const auto finish = [&](std::int64_t piece) {
    std::vector<std::uint16_t> rounded(a.size());
    std::vector<double> sums(6);
    std::uint32_t nonfinite = 0;
    for (std::int64_t first = 0; first < elements; first += piece) {
      cpu.ops->finish_gradient(nullptr, {.a = a.data() + first,
                                         .dst = {rounded.data() + first, DType::bf16},
                                         .block_sums = sums.data() + first / kNormBlock,
                                         .nonfinite = &nonfinite,
                                         .elements = std::min(piece, elements - first)});
    }
    CHECK(nonfinite == 0);
    return sums;
  };
  CHECK(finish(elements) == finish(kNormBlock));
  CHECK(finish(elements) == finish(2 * kNormBlock));
}

TEST_CASE("a dropout mask is named by seed, step, sequence, site and element, not by the batch it came in") {
  Cpu cpu;
  const std::int64_t elements = 8192 * 2 + 77;
  const DropoutArgs args{.seed = 5, .step = 9, .first_sequence = 100, .site = 2, .p = 0.25F};
  const std::vector<float> four = dropped(*cpu.ops, args, 4, elements);
  DropoutArgs later = args;
  later.first_sequence = 102;
  const std::vector<float> two = dropped(*cpu.ops, later, 2, elements);
  CHECK(std::memcmp(four.data() + 2 * elements, two.data(), two.size() * sizeof(float)) == 0);
  CHECK(std::memcmp(four.data(), two.data(), two.size() * sizeof(float)) != 0);

  const auto changed = [&](auto change) {
    DropoutArgs other = args;
    change(other);
    return dropped(*cpu.ops, other, 4, elements) != four;
  };
  CHECK(changed([](DropoutArgs& a) { a.seed = 6; }));
  CHECK(changed([](DropoutArgs& a) { a.step = 10; }));
  CHECK(changed([](DropoutArgs& a) { a.site = 3; }));
  CHECK_FALSE(changed([](DropoutArgs&) {}));

  // Kept with probability 0.75: 65,844 draws have a standard deviation of 111.
  const auto kept = std::count_if(four.begin(), four.end(), [](float y) { return y != 0; });
  CHECK(std::abs(static_cast<double>(kept) - 0.75 * static_cast<double>(four.size())) < 600);
}

TEST_CASE("a longer sequence begins with the dropout mask of a shorter one") {
  Cpu cpu;
  const DropoutArgs args{.seed = 1, .step = 2, .p = 0.5F};
  const std::vector<float> longer = dropped(*cpu.ops, args, 1, 20000), shorter = dropped(*cpu.ops, args, 1, 9001);
  CHECK(std::equal(shorter.begin(), shorter.end(), longer.begin()));
}

TEST_CASE("impossible arguments are refused") {
  Cpu cpu;
  std::vector<float> x(64), y(64);
  std::vector<std::uint16_t> half(64);
  const std::int32_t beyond = 4, negative = -1;
  EmbeddingForwardArgs embedding{.table = f32(x), .out = f32(y), .count = 1, .seq_len = 1, .cols = 8, .vocab = 4};
  embedding.tokens = &beyond;
  CHECK_THROWS_AS(cpu.ops->embedding_forward(nullptr, embedding), InternalError);
  embedding.tokens = &negative;
  CHECK_THROWS_AS(cpu.ops->embedding_forward(nullptr, embedding), InternalError);
  CHECK_THROWS_AS(dropped(*cpu.ops, {.p = 1.0F}, 1, 8), InternalError);
  CHECK_THROWS_AS(dropped(*cpu.ops, {.step = std::uint64_t{1} << 32, .p = 0.5F}, 1, 8), InternalError);
  CHECK_THROWS_AS(cpu.ops->activation_forward(nullptr, {.x = f32(x), .y = {half.data(), DType::bf16}, .elements = 64}),
                  InternalError);
  CHECK_THROWS_AS(cpu.ops->rope(nullptr, {.x = f32(x), .tokens = 1, .seq_len = 1, .heads = 1, .head_dim = 7, .x_stride = 7}),
                  InternalError);
}

}  // namespace spipe::test
