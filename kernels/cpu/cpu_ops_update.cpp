// CpuOps: the last add of a gradient with its norm, and the update rules.
#include <atomic>
#include <cmath>

#include "kernels/cpu/cpu_ops_impl.h"
#include "kernels/cpu/ops_update.h"

namespace spipe::cpu {
namespace {

void raise(std::uint32_t* flag) { std::atomic_ref<std::uint32_t>(*flag).store(1, std::memory_order_relaxed); }

}  // namespace

void CpuOps::finish_gradient(StreamHandle*, const FinishGradientArgs& args) {
  SPIPE_CHECK(is_storage(args.dst.dtype), "finish_gradient: fp32, bf16 or fp16");
  SPIPE_CHECK(args.elements >= 0, "finish_gradient: size");
  const UpdateTable& table = SPIPE_TABLE(isa_, update_table);
  const auto block = [&](std::int64_t first, std::int64_t count, int) {
    const float* b = args.b != nullptr ? args.b + first : nullptr;
    const bool checks = args.block_sums != nullptr;
    const double sum = table.finish_gradient(args.a + first, b, offset(args.dst, first).data, args.dst.dtype, count, checks);
    if (!checks) return;
    args.block_sums[first / kNormBlock] = sum;
    if (!std::isfinite(sum)) raise(args.nonfinite);
  };
  if (args.dst.data == args.a && args.dst.dtype != DType::f32) {
    // A narrower result over its source lands on earlier blocks: in order, then.
    for (std::int64_t first = 0; first < args.elements; first += kNormBlock) {
      block(first, std::min(kNormBlock, args.elements - first), 0);
    }
    return;
  }
  for_blocks(args.elements, kNormBlock, block);
}

void CpuOps::adamw(StreamHandle* stream, const AdamWArgs& args) {
  const bool out = args.from_master != nullptr;
  SPIPE_CHECK(out == (args.from_m != nullptr) && out == (args.from_v != nullptr),
              "adamw: all of the state out of place or none");
  const auto floats = [](const float* p) { return Ptr{const_cast<float*>(p), DType::f32}; };
  UpdateArgs all;
  all.grad = args.grad;
  all.to = {.compute = args.compute_copy, .master = floats(args.master), .m = floats(args.m), .v = floats(args.v)};
  all.from = all.to;
  if (out) {
    all.from.master = floats(args.from_master);
    all.from.m = floats(args.from_m);
    all.from.v = floats(args.from_v);
  }
  all.nonfinite_master = args.nonfinite_master;
  all.elements = args.elements;
  all.grad_scale = args.grad_scale;
  all.beta1 = args.beta1;
  all.one_minus_beta1 = args.one_minus_beta1;
  all.beta2 = args.beta2;
  all.one_minus_beta2 = args.one_minus_beta2;
  all.decay = args.decay;
  all.inv_sqrt_bias2 = args.inv_sqrt_bias2;
  all.eps = args.eps;
  all.step_size = args.step_size;
  update(stream, all);
}

void CpuOps::update(StreamHandle*, const UpdateArgs& args) {
  SPIPE_CHECK(is_storage(args.grad.dtype), "update: fp32, bf16 or fp16 gradients");
  SPIPE_CHECK(args.elements >= 0, "update: size");
  const UpdatePlanes &from = args.from, &to = args.to;
  const bool split = to.master.dtype == DType::u16;
  SPIPE_CHECK(split || to.master.dtype == DType::f32, "update: the master is fp32, or its low half u16");
  SPIPE_CHECK(!split || (to.compute && to.compute.dtype == DType::bf16), "update: the upper half of a master is bf16");
  SPIPE_CHECK(!to.compute || to.compute.dtype == DType::bf16 || to.compute.dtype == DType::f16,
              "update: the compute copy is bf16 or fp16");
  SPIPE_CHECK(to.m.dtype == DType::f32 || to.m.dtype == DType::bf16, "update: moments are fp32 or bf16");
  SPIPE_CHECK(from.master.dtype == to.master.dtype && from.m.dtype == to.m.dtype, "update: old and new state are of one type");
  if (has_second_moment(args.rule)) {
    SPIPE_CHECK(from.v && to.v && from.v.dtype == to.m.dtype && to.v.dtype == to.m.dtype, "update: moments are of one type");
  }
  SPIPE_CHECK((from.master.data == to.master.data) == (from.m.data == to.m.data),
              "update: all of the state out of place or none");
  const UpdateTable& table = SPIPE_TABLE(isa_, update_table);
  for_blocks(args.elements, 16384, [&](std::int64_t first, std::int64_t count, int) {
    if (table.update(args, first, count)) raise(args.nonfinite_master);
  });
}

}  // namespace spipe::cpu
