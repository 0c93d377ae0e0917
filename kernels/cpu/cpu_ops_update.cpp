// CpuOps: the last add of a gradient with its norm, and AdamW.
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
    const double sum = table.finish_gradient(args.a + first, b, offset(args.dst, first).data, args.dst.dtype, count);
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

void CpuOps::adamw(StreamHandle*, const AdamWArgs& args) {
  SPIPE_CHECK(is_storage(args.grad.dtype), "adamw: fp32, bf16 or fp16 gradients");
  SPIPE_CHECK(!args.compute_copy || args.compute_copy.dtype == DType::bf16 || args.compute_copy.dtype == DType::f16,
              "adamw: the compute copy is bf16 or fp16");
  SPIPE_CHECK(args.elements >= 0, "adamw: size");
  const bool out = args.from_master != nullptr;
  SPIPE_CHECK(out == (args.from_m != nullptr) && out == (args.from_v != nullptr),
              "adamw: all of the state out of place or none");
  const UpdateTable& table = SPIPE_TABLE(isa_, update_table);
  for_blocks(args.elements, 16384, [&](std::int64_t first, std::int64_t count, int) {
    if (table.adamw(args, first, count)) raise(args.nonfinite_master);
  });
}

}  // namespace spipe::cpu
