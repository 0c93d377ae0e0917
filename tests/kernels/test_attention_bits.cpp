// Attention and matmul on sizes of several items: the same bits with any number of threads, and attention on any instruction
// set.
#include <bit>
#include <catch2/catch.hpp>
#include <cstring>
#include <vector>

#include "kernels/cpu/cpu_ops.h"
#include "spipe/base/random.h"

namespace spipe {
namespace {

std::vector<float> numbers(std::uint64_t stream, std::size_t count) {
  const PhiloxKey key = make_key(11, 1);
  std::vector<float> x(count);
  for (std::size_t i = 0; i < count; ++i) x[i] = 2 * uniform_at(key, stream, i) - 1;
  return x;
}

struct Problem {
  std::int64_t batch, length, heads, kv_heads, head_dim, window;
  DType grad = DType::f32;
};

// q, k, v and dout of a problem, and everything attention makes of them, as bytes.
struct Run {
  std::vector<float> q, k, v, dout;
  Problem p;
  explicit Run(const Problem& problem) : p(problem) {
    const auto tokens = static_cast<std::size_t>(p.batch * p.length);
    q = numbers(1, tokens * static_cast<std::size_t>(p.heads * p.head_dim));
    k = numbers(2, tokens * static_cast<std::size_t>(p.kv_heads * p.head_dim));
    v = numbers(3, k.size());
    dout = numbers(4, q.size());
  }
  [[nodiscard]] std::vector<std::vector<std::byte>> results(Isa isa, int threads) {
    ThreadPool pool(threads);
    const auto ops = make_cpu_ops(pool, isa);
    std::vector<float> out(q.size()), lse(static_cast<std::size_t>(p.batch * p.heads * p.length));
    const std::size_t width = dtype_size(p.grad);
    std::vector<std::byte> dq(q.size() * width), dk(k.size() * width), dv(v.size() * width);
    const float scale = 0.3f;
    ops->attention_forward(nullptr, {.q = {q.data(), DType::f32},
                                     .k = {k.data(), DType::f32},
                                     .v = {v.data(), DType::f32},
                                     .out = {out.data(), DType::f32},
                                     .lse = lse.data(),
                                     .batch = p.batch,
                                     .q_len = p.length,
                                     .kv_len = p.length,
                                     .heads = p.heads,
                                     .kv_heads = p.kv_heads,
                                     .head_dim = p.head_dim,
                                     .window = p.window,
                                     .scale = scale});
    ops->attention_backward(nullptr, {.q = {q.data(), DType::f32},
                                      .k = {k.data(), DType::f32},
                                      .v = {v.data(), DType::f32},
                                      .out = {out.data(), DType::f32},
                                      .dout = {dout.data(), DType::f32},
                                      .lse = lse.data(),
                                      .dq = {dq.data(), p.grad},
                                      .dk = {dk.data(), p.grad},
                                      .dv = {dv.data(), p.grad},
                                      .batch = p.batch,
                                      .seq_len = p.length,
                                      .heads = p.heads,
                                      .kv_heads = p.kv_heads,
                                      .head_dim = p.head_dim,
                                      .window = p.window,
                                      .scale = scale});
    const auto bytes = [](const std::vector<float>& x) {
      std::vector<std::byte> b(x.size() * sizeof(float));
      std::memcpy(b.data(), x.data(), b.size());
      return b;
    };
    return {bytes(out), bytes(lse), dq, dk, dv};
  }
};

// The first is cut into whole heads in backward, the others into key blocks that take turns.
const Problem kProblems[] = {{3, 150, 6, 3, 24, 0},
                             {1, 330, 4, 2, 16, 0},
                             {1, 300, 2, 1, 40, 90},
                             {2, 200, 2, 2, 16, 0, DType::bf16},
                             {4, 140, 4, 2, 16, 70, DType::f16}};

}  // namespace

TEST_CASE("attention gives the same bits with 1, 2 and 3 threads and on every instruction set") {
  for (const Problem& problem : kProblems) {
    CAPTURE(problem.batch, problem.length, problem.heads, problem.kv_heads, problem.head_dim, problem.window);
    Run run(problem);
    const auto expected = run.results(best_isa(), 1);
    CHECK(run.results(best_isa(), 2) == expected);
    CHECK(run.results(best_isa(), 3) == expected);
    for (const Isa isa : {Isa::scalar, Isa::avx2}) {
      if (isa < best_isa()) CHECK(run.results(isa, 2) == expected);
    }
    // The twin: one input changed by one unit in its last place shows.
    run.k[run.k.size() / 2] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(run.k[run.k.size() / 2]) ^ 1u);
    CHECK(run.results(best_isa(), 2) != expected);
  }
}

TEST_CASE("attention backward gives the same bits by whole heads and by key blocks taking turns") {
  for (const DType grad : {DType::f32, DType::bf16}) {
    Problem many{4, 200, 4, 2, 16, 0, grad}, few = many;  // 8 kv heads in all, and the 2 of the first sequence
    few.batch = 1;
    const auto whole = Run(many).results(best_isa(), 2), turns = Run(few).results(best_isa(), 2);
    for (std::size_t i : {0, 2, 3, 4}) {  // lse runs over batch and heads alike; the rest is tokens first
      CHECK(std::equal(turns[i].begin(), turns[i].end(), whole[i].begin()));
    }
  }
}

TEST_CASE("matmul gives the same bits with 1, 2 and 3 threads") {
  const std::int64_t m = 300, n = 1000, k = 1100;  // several tiles; two slices of k where operands are widened
  for (const DType type : {DType::f32, DType::bf16}) {
    for (const bool trans_a : {false, true}) {
      for (const bool trans_b : {false, true}) {
        const std::vector<float> a = numbers(5, static_cast<std::size_t>(m * k)),
                                 b = numbers(6, static_cast<std::size_t>(k * n));
        std::vector<float> expected;
        for (const int threads : {1, 2, 3}) {
          ThreadPool pool(threads);
          const auto ops = make_cpu_ops(pool);
          std::vector<std::byte> a_typed(a.size() * dtype_size(type)), b_typed(b.size() * dtype_size(type));
          const Ptr a_ptr{a_typed.data(), type}, b_ptr{b_typed.data(), type};
          ops->convert(nullptr, {.src = {a.data(), DType::f32}, .dst = a_ptr, .elements = m * k});
          ops->convert(nullptr, {.src = {b.data(), DType::f32}, .dst = b_ptr, .elements = k * n});
          std::vector<float> c(static_cast<std::size_t>(m * n), 0.5f);
          ops->matmul(nullptr, {.a = a_ptr,
                                .b = b_ptr,
                                .c = {c.data(), DType::f32},
                                .m = m,
                                .n = n,
                                .k = k,
                                .trans_a = trans_a,
                                .trans_b = trans_b,
                                .accumulate = true});
          if (expected.empty()) expected = c;
          CHECK(std::memcmp(c.data(), expected.data(), c.size() * sizeof(float)) == 0);
        }
        CHECK(expected[0] != expected[1]);
      }
    }
  }
}

}  // namespace spipe
