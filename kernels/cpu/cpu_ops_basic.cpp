// CpuOps: conversion, addition, column sums, zeroing, cross-entropy.
#include <cstring>

#include "kernels/cpu/cpu_ops_impl.h"
#include "kernels/cpu/ops_basic.h"

namespace spipe::cpu {
namespace {

constexpr std::int64_t kBlock = 16384;  // elements an item of an elementwise op

}  // namespace

void CpuOps::convert(StreamHandle*, const ConvertArgs& args) {
  SPIPE_CHECK(is_storage(args.src.dtype) && is_storage(args.dst.dtype), "convert: fp32, bf16 or fp16");
  SPIPE_CHECK(!args.half_up || (args.src.dtype == DType::f32 && args.dst.dtype == DType::bf16), "half-up is fp32 to bf16");
  SPIPE_CHECK(args.elements >= 0, "convert: size");
  const BasicTable& table = SPIPE_TABLE(isa_, basic_table);
  for_blocks(args.elements, kBlock, [&](std::int64_t first, std::int64_t count, int) {
    table.convert(offset(args.src, first).data, args.src.dtype, offset(args.dst, first).data, args.dst.dtype, args.half_up,
                  count);
  });
}

void CpuOps::add(StreamHandle*, const AddArgs& args) {
  SPIPE_CHECK(is_storage(args.a.dtype) && is_storage(args.b.dtype) && is_storage(args.out.dtype), "add: fp32, bf16 or fp16");
  SPIPE_CHECK(args.elements >= 0, "add: size");
  const BasicTable& table = SPIPE_TABLE(isa_, basic_table);
  for_blocks(args.elements, kBlock, [&](std::int64_t first, std::int64_t count, int) {
    table.add(offset(args.a, first).data, args.a.dtype, offset(args.b, first).data, args.b.dtype, offset(args.out, first).data,
              args.out.dtype, count);
  });
}

void CpuOps::zero(StreamHandle*, const ZeroArgs& args) {
  SPIPE_CHECK(args.elements >= 0, "zero: size");
  for_blocks(args.elements, kBlock, [&](std::int64_t first, std::int64_t count, int) {
    std::memset(offset(args.dst, first).data, 0, static_cast<std::size_t>(count) * dtype_size(args.dst.dtype));
  });
}

void CpuOps::column_sum(StreamHandle*, const ColumnSumArgs& args) {
  SPIPE_CHECK(is_storage(args.x.dtype) && args.out.dtype == DType::f32, "column_sum: fp32 out");
  SPIPE_CHECK(args.rows >= 0 && args.cols >= 0, "column_sum: size");
  const std::int64_t ldx = args.ldx != 0 ? args.ldx : args.cols;
  SPIPE_CHECK(ldx >= args.cols, "column_sum: ldx is shorter than a row");
  const BasicTable& table = SPIPE_TABLE(isa_, basic_table);
  constexpr std::int64_t kColumns = 64;  // an item owns whole columns, so nothing is joined across items
  for_blocks(args.cols, kColumns, [&](std::int64_t first, std::int64_t count, int) {
    table.column_sum(offset(args.x, first).data, args.x.dtype, ldx, args.rows, count, args.accumulate,
                     static_cast<float*>(args.out.data) + first);
  });
}

void CpuOps::softmax_cross_entropy(StreamHandle*, const SoftmaxCrossEntropyArgs& args) {
  SPIPE_CHECK(args.rows >= 0 && args.cols > 0, "softmax_cross_entropy: size");
  const std::int64_t ld = args.ld != 0 ? args.ld : args.cols;
  SPIPE_CHECK(ld >= args.cols, "softmax_cross_entropy: ld is shorter than a row");
  const BasicTable& table = SPIPE_TABLE(isa_, basic_table);
  for_blocks(args.rows, 4, [&](std::int64_t first, std::int64_t count, int) {
    for (std::int64_t r = first; r < first + count; ++r) {
      const std::int32_t target = args.targets[r];
      float* row = args.logits + r * ld;
      SPIPE_CHECK(target < args.cols, "target beyond the vocabulary");
      if (target >= 0) {
        args.nll[r] = table.cross_entropy(row, args.cols, target, args.scale);
      } else {
        args.nll[r] = 0;
        if (args.scale != 0) std::memset(row, 0, static_cast<std::size_t>(args.cols) * sizeof(float));
      }
    }
  });
}

}  // namespace spipe::cpu
