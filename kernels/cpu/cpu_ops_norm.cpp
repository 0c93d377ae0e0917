// CpuOps: layernorm and rmsnorm.
#include <cstring>

#include "kernels/cpu/cpu_ops_impl.h"
#include "kernels/cpu/ops_basic.h"
#include "kernels/cpu/ops_norm.h"

namespace spipe::cpu {
namespace {

// Rows an item of a forward takes: enough work to be worth handing out.
std::int64_t forward_rows(std::int64_t cols) { return std::max<std::int64_t>(1, 8192 / std::max<std::int64_t>(1, cols)); }

// Rows whose weight gradients are summed in one go; the sums of the blocks are then added in ascending order. A function of
// the number of rows only, at most 64 blocks.
std::int64_t backward_rows(std::int64_t rows) { return std::max<std::int64_t>(16, (rows + 63) / 64); }

bool same_or_absent(ConstPtr p, DType dtype) { return !p || p.dtype == dtype; }

// A parameter vector as fp32: itself, or a widened copy.
class Widened {
 public:
  Widened(const BasicTable& table, ConstPtr parameter, std::int64_t elements) : pointer_(parameter) {
    if (parameter.dtype == DType::f32) return;
    copy_.reset(new float[static_cast<std::size_t>(elements)]);
    table.convert(parameter.data, parameter.dtype, copy_.get(), DType::f32, false, elements);
    pointer_ = {copy_.get(), DType::f32};
  }
  operator ConstPtr() const { return pointer_; }  // NOLINT(google-explicit-constructor)

 private:
  ConstPtr pointer_;
  std::unique_ptr<float[]> copy_;
};

// Weight gradients of blocks of rows, before they are added up.
class Partials {
 public:
  Partials(std::int64_t rows, std::int64_t block, std::int64_t stride)
      : block_(block),
        parts_((rows + block - 1) / block),
        stride_(stride),
        sums_(new float[static_cast<std::size_t>(parts_ * stride)]) {}
  float* of_row(std::int64_t row) const { return sums_.get() + row / block_ * stride_; }
  // out[cols] (+)= columns [first, first + cols) of all parts in ascending order.
  void combine(ThreadPool& pool, const NormTable& table, std::int64_t first, std::int64_t cols, bool accumulate,
               Ptr out) const {
    auto* sums = static_cast<float*>(out.data);
    if (parts_ == 0) {
      if (!accumulate) std::memset(sums, 0, static_cast<std::size_t>(cols) * sizeof(float));
      return;
    }
    constexpr std::int64_t kColumns = 512;
    pool.parallel_for((cols + kColumns - 1) / kColumns, [&](std::int64_t item, int) {
      const std::int64_t at = item * kColumns;
      table.sum_partials(sums_.get() + first + at, parts_, stride_, std::min(kColumns, cols - at), accumulate, sums + at);
    });
  }

 private:
  std::int64_t block_, parts_, stride_;
  std::unique_ptr<float[]> sums_;
};

std::int64_t or_packed(std::int64_t stride, std::int64_t packed) { return stride != 0 ? stride : packed; }

}  // namespace

void CpuOps::layernorm_forward(StreamHandle*, const LayerNormForwardArgs& given) {
  LayerNormForwardArgs args = given;
  const DType type = args.x.dtype;
  SPIPE_CHECK(
      is_storage(type) && args.y.dtype == type && same_or_absent(args.residual, type) && same_or_absent(args.sum_out, type),
      "layernorm: activations of one type");
  SPIPE_CHECK(is_storage(args.weight.dtype) && is_storage(args.bias.dtype), "layernorm: parameter types");
  SPIPE_CHECK(!args.residual || args.sum_out, "layernorm: a residual needs sum_out");
  SPIPE_CHECK(args.rows >= 0 && args.cols > 0, "layernorm: size");
  const NormTable& table = SPIPE_TABLE(isa_, norm_table);
  const Widened weight(SPIPE_TABLE(isa_, basic_table), args.weight, args.cols);
  args.weight = weight;
  const Widened bias(SPIPE_TABLE(isa_, basic_table), args.bias, args.cols);
  args.bias = bias;
  for_blocks(args.rows, forward_rows(args.cols),
             [&](std::int64_t first, std::int64_t count, int) { table.layernorm_forward(args, first, count); });
}

void CpuOps::layernorm_backward(StreamHandle*, const LayerNormBackwardArgs& given) {
  LayerNormBackwardArgs args = given;
  const DType type = args.x.dtype;
  SPIPE_CHECK(is_storage(type) && args.dy.dtype == type && args.dx.dtype == type && same_or_absent(args.residual_grad, type),
              "layernorm: activations of one type");
  SPIPE_CHECK(is_storage(args.weight.dtype) && args.dweight.dtype == DType::f32 && args.dbias.dtype == DType::f32,
              "layernorm: weight gradients are fp32");
  SPIPE_CHECK(args.rows >= 0 && args.cols > 0, "layernorm: size");
  const NormTable& table = SPIPE_TABLE(isa_, norm_table);
  const Widened weight(SPIPE_TABLE(isa_, basic_table), args.weight, args.cols);
  args.weight = weight;
  const std::int64_t block = backward_rows(args.rows), cols = args.cols;
  const Partials partials(args.rows, block, 2 * cols);
  for_blocks(args.rows, block, [&](std::int64_t first, std::int64_t count, int) {
    float* part = partials.of_row(first);
    table.layernorm_backward(args, first, count, part, part + cols);
  });
  partials.combine(pool_, table, 0, cols, args.accumulate, args.dweight);
  partials.combine(pool_, table, cols, cols, args.accumulate, args.dbias);
}

void CpuOps::rmsnorm_forward(StreamHandle*, const RmsNormForwardArgs& given) {
  RmsNormForwardArgs args = given;
  args.x_stride = or_packed(args.x_stride, args.inner * args.cols);
  args.y_stride = or_packed(args.y_stride, args.inner * args.cols);
  const DType type = args.x.dtype;
  SPIPE_CHECK(
      is_storage(type) && args.y.dtype == type && same_or_absent(args.residual, type) && same_or_absent(args.sum_out, type),
      "rmsnorm: activations of one type");
  SPIPE_CHECK(is_storage(args.weight.dtype), "rmsnorm: weight type");
  SPIPE_CHECK(!args.residual || (args.sum_out && args.inner == 1 && args.x_stride == args.cols),
              "rmsnorm: a residual needs sum_out and packed rows");
  SPIPE_CHECK(args.outer >= 0 && args.inner > 0 && args.cols > 0, "rmsnorm: size");
  const NormTable& table = SPIPE_TABLE(isa_, norm_table);
  const Widened weight(SPIPE_TABLE(isa_, basic_table), args.weight, args.cols);
  args.weight = weight;
  for_blocks(args.outer * args.inner, forward_rows(args.cols),
             [&](std::int64_t first, std::int64_t count, int) { table.rmsnorm_forward(args, first, count); });
}

void CpuOps::rmsnorm_backward(StreamHandle*, const RmsNormBackwardArgs& given) {
  RmsNormBackwardArgs args = given;
  args.dy_stride = or_packed(args.dy_stride, args.inner * args.cols);
  args.x_stride = or_packed(args.x_stride, args.inner * args.cols);
  args.dx_stride = or_packed(args.dx_stride, args.inner * args.cols);
  const DType type = args.x.dtype;
  SPIPE_CHECK(is_storage(type) && args.dy.dtype == type && args.dx.dtype == type && same_or_absent(args.residual_grad, type),
              "rmsnorm: activations of one type");
  SPIPE_CHECK(is_storage(args.weight.dtype) && args.dweight.dtype == DType::f32, "rmsnorm: weight gradients are fp32");
  SPIPE_CHECK(!args.residual_grad || args.inner == 1, "rmsnorm: a residual gradient needs whole rows");
  SPIPE_CHECK(args.outer >= 0 && args.inner > 0 && args.cols > 0, "rmsnorm: size");
  const NormTable& table = SPIPE_TABLE(isa_, norm_table);
  const Widened weight(SPIPE_TABLE(isa_, basic_table), args.weight, args.cols);
  args.weight = weight;
  const std::int64_t vectors = args.outer * args.inner, block = backward_rows(vectors);
  const Partials partials(vectors, block, args.cols);
  for_blocks(vectors, block, [&](std::int64_t first, std::int64_t count, int) {
    table.rmsnorm_backward(args, first, count, partials.of_row(first));
  });
  partials.combine(pool_, table, 0, args.cols, args.accumulate, args.dweight);
}

}  // namespace spipe::cpu
