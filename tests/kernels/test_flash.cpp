// Attention by emulated tensor cores: it really takes them, and slices of heads give the bits of the whole.
#include <catch2/catch.hpp>
#include <cmath>

#include "kernels/cuda/flash.h"
#include "tests/emulator/emulated_backend.h"

namespace spipe::test {
namespace {

struct Shape {
  std::int64_t batch, length, heads, kv_heads, head_dim;
};

AttentionForwardArgs forward_args(Operands& op, const Shape& s, DType dtype) {
  const std::int64_t row = s.heads * s.head_dim, kv_row = s.kv_heads * s.head_dim, tokens = s.batch * s.length;
  AttentionForwardArgs args{.batch = s.batch, .q_len = s.length, .kv_len = s.length, .heads = s.heads, .kv_heads = s.kv_heads};
  args.head_dim = s.head_dim;
  args.q_stride = args.out_stride = row;
  args.k_stride = args.v_stride = kv_row;
  args.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(s.head_dim)));
  args.q = op.input(dtype, tokens * row);
  args.k = op.input(dtype, tokens * kv_row);
  args.v = op.input(dtype, tokens * kv_row);
  args.out = op.output(dtype, tokens * row);
  args.lse = op.output_floats(s.batch * s.heads * s.length);
  return args;
}

std::vector<std::byte> output_of(const Backend& backend, const Shape& shape, DType dtype) {
  Operands op(*backend.memory, 7);
  backend.ops->attention_forward(nullptr, forward_args(op, shape, dtype));
  std::vector<std::string> faults;
  std::vector<std::byte> bytes = op.finish(faults).front().bytes;
  CHECK(faults.empty());
  return bytes;
}

// dq, dk and dv with room for the deltas of `slice` heads; empty when that is refused.
std::vector<std::vector<std::byte>> gradients(const Shape& s, std::int64_t slice) {
  const Backend& backend = emulated_cuda<CudaAttention::kBest>().front();
  Operands op(*backend.memory, 7);
  const AttentionForwardArgs forward = forward_args(op, s, DType::bf16);
  backend.ops->attention_forward(nullptr, forward);
  AttentionBackwardArgs args{.q = forward.q, .k = forward.k, .v = forward.v, .out = forward.out, .lse = forward.lse};
  args.batch = s.batch;
  args.seq_len = s.length;
  args.heads = s.heads;
  args.kv_heads = s.kv_heads;
  args.head_dim = s.head_dim;
  args.q_stride = args.out_stride = args.dout_stride = args.dq_stride = forward.q_stride;
  args.k_stride = args.v_stride = args.dk_stride = args.dv_stride = forward.k_stride;
  args.scale = forward.scale;
  const std::int64_t tokens = s.batch * s.length;
  args.dout = op.input(DType::bf16, tokens * forward.q_stride);
  args.dq = op.output(DType::bf16, tokens * forward.q_stride);
  args.dk = op.output(DType::bf16, tokens * forward.k_stride);
  args.dv = op.output(DType::bf16, tokens * forward.k_stride);
  auto* deltas = static_cast<float*>(op.workspace(static_cast<std::uint64_t>(slice * s.length) * sizeof(float)));
  if (!cuda::flash_backward(nullptr, args, deltas, slice * s.length)) return {};
  std::vector<std::string> faults;
  const auto outputs = op.finish(faults);
  CHECK(faults.empty());
  std::vector<std::vector<std::byte>> result;
  for (std::size_t i = 2; i < outputs.size(); ++i) result.push_back(outputs[i].bytes);  // after out and lse
  return result;
}

}  // namespace

TEST_CASE("attention takes the tensor cores for half types and head sizes of whole rows, and only then") {
  const Backend& best = emulated_cuda<CudaAttention::kBest>().front();
  const Backend& plain = emulated_cuda<CudaAttention::kPlain>().front();
  for (const DType dtype : {DType::bf16, DType::f16}) {
    CHECK(output_of(best, {1, 70, 2, 1, 64}, dtype) != output_of(plain, {1, 70, 2, 1, 64}, dtype));
    CHECK(output_of(best, {1, 30, 2, 1, 20}, dtype) == output_of(plain, {1, 30, 2, 1, 20}, dtype));
  }
  CHECK(output_of(best, {1, 30, 2, 1, 64}, DType::f32) == output_of(plain, {1, 30, 2, 1, 64}, DType::f32));
}

TEST_CASE("attention backward in slices of heads gives the bits of the whole") {
  const Shape shape{2, 70, 6, 3, 40};  // two query heads to a KV head
  const auto whole = gradients(shape, 12);
  REQUIRE(whole.size() == 3);
  CHECK(gradients(shape, 2) == whole);
  CHECK(gradients(shape, 5) == whole);  // room for two KV heads and a half
  CHECK(gradients(shape, 1).empty());   // not for one
}

TEST_CASE("attention backward on head sizes up to 256") {
  for (const std::int64_t head_dim : {8, 136, 256}) CHECK(gradients({1, 67, 2, 1, head_dim}, 2).size() == 3);
}

}  // namespace spipe::test
