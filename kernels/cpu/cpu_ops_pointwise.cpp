// CpuOps: rope, activations, gated units, dropout.
#include <cmath>

#include "kernels/cpu/cpu_ops_impl.h"
#include "kernels/cpu/ops_pointwise.h"
#include "spipe/base/checked.h"
#include "spipe/base/random.h"

namespace spipe::cpu {
namespace {

constexpr std::int64_t kBlock = 8192;  // elements an item takes; a multiple of 64 (a vector's worth of Philox words)

// Rows of `elements` an item takes.
std::int64_t block_rows(std::int64_t elements) {
  return std::max<std::int64_t>(1, kBlock / std::max<std::int64_t>(1, elements));
}

}  // namespace

void CpuOps::rope(StreamHandle*, const RopeArgs& args) {
  SPIPE_CHECK(is_storage(args.x.dtype), "rope: fp32, bf16 or fp16");
  SPIPE_CHECK(args.head_dim > 0 && args.head_dim % 2 == 0, "rope: an even head size");
  SPIPE_CHECK(args.tokens >= 0 && args.seq_len > 0 && args.x_stride >= args.heads * args.head_dim, "rope: size");
  const PointwiseTable& table = SPIPE_TABLE(isa_, pointwise_table);
  for_blocks(args.tokens, block_rows(args.heads * args.head_dim),
             [&](std::int64_t first, std::int64_t count, int) { table.rope(args, first, count); });
}

void CpuOps::activation_forward(StreamHandle*, const ActivationForwardArgs& args) {
  SPIPE_CHECK(is_storage(args.x.dtype) && args.y.dtype == args.x.dtype, "activation: one of fp32, bf16, fp16");
  SPIPE_CHECK(args.elements >= 0, "activation: size");
  const PointwiseTable& table = SPIPE_TABLE(isa_, pointwise_table);
  for_blocks(args.elements, kBlock,
             [&](std::int64_t first, std::int64_t count, int) { table.activation_forward(args, first, count); });
}

void CpuOps::activation_backward(StreamHandle*, const ActivationBackwardArgs& args) {
  SPIPE_CHECK(is_storage(args.x.dtype) && args.dy.dtype == args.x.dtype && args.dx.dtype == args.x.dtype,
              "activation: one of fp32, bf16, fp16");
  SPIPE_CHECK(args.elements >= 0, "activation: size");
  const PointwiseTable& table = SPIPE_TABLE(isa_, pointwise_table);
  for_blocks(args.elements, kBlock,
             [&](std::int64_t first, std::int64_t count, int) { table.activation_backward(args, first, count); });
}

void CpuOps::gated_forward(StreamHandle*, const GatedForwardArgs& args) {
  SPIPE_CHECK(is_storage(args.x.dtype) && args.y.dtype == args.x.dtype, "gated: one of fp32, bf16, fp16");
  SPIPE_CHECK(args.rows >= 0 && args.cols >= 0, "gated: size");
  const PointwiseTable& table = SPIPE_TABLE(isa_, pointwise_table);
  for_blocks(args.rows, block_rows(args.cols),
             [&](std::int64_t first, std::int64_t count, int) { table.gated_forward(args, first, count); });
}

void CpuOps::gated_backward(StreamHandle*, const GatedBackwardArgs& args) {
  SPIPE_CHECK(is_storage(args.x.dtype) && args.dy.dtype == args.x.dtype && args.dx.dtype == args.x.dtype,
              "gated: one of fp32, bf16, fp16");
  SPIPE_CHECK(args.rows >= 0 && args.cols >= 0, "gated: size");
  const PointwiseTable& table = SPIPE_TABLE(isa_, pointwise_table);
  for_blocks(args.rows, block_rows(args.cols),
             [&](std::int64_t first, std::int64_t count, int) { table.gated_backward(args, first, count); });
}

void CpuOps::dropout(StreamHandle*, const DropoutArgs& args) {
  SPIPE_CHECK(is_storage(args.x.dtype) && args.y.dtype == args.x.dtype, "dropout: one of fp32, bf16, fp16");
  SPIPE_CHECK(args.p >= 0 && args.p < 1, "dropout: 0 <= p < 1");
  SPIPE_CHECK(args.sequences >= 0 && args.elements_per_sequence >= 0, "dropout: size");
  const std::int64_t elements = args.elements_per_sequence;
  (void)narrow<std::uint32_t>(elements / 4);
  (void)narrow<std::uint32_t>(args.first_sequence + static_cast<std::uint64_t>(args.sequences));
  const PhiloxKey key = make_key(args.seed, static_cast<std::uint64_t>(RandomPurpose::dropout));
  const double p = static_cast<double>(args.p);
  const DropoutRange whole{.dtype = args.x.dtype,
                           .step = narrow<std::uint32_t>(args.step),
                           .site = args.site,
                           .key_lo = key.lo,
                           .key_hi = key.hi,
                           .threshold = static_cast<std::uint32_t>(std::ceil(p * 0x1p24)),
                           .factor = static_cast<float>(1 / (1 - p))};
  const PointwiseTable& table = SPIPE_TABLE(isa_, pointwise_table);
  const std::int64_t items = (elements + kBlock - 1) / kBlock;
  pool_.parallel_for(args.sequences * items, [&](std::int64_t item, int) {
    const std::int64_t b = item / items, first = item % items * kBlock;
    DropoutRange range = whole;
    range.x = offset(args.x, b * elements + first).data;
    range.y = offset(args.y, b * elements + first).data;
    range.elements = std::min(kBlock, elements - first);
    range.first_quad = static_cast<std::uint32_t>(first / 4);
    range.sequence = static_cast<std::uint32_t>(args.first_sequence + static_cast<std::uint64_t>(b));
    table.dropout(range);
  });
}

}  // namespace spipe::cpu
