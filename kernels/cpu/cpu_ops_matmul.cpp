// Matmul: tiles whose sizes are functions of the shape, each one single-threaded oneDNN sgemm, handed out by our pool. oneDNN's
// own threading would change bits with the thread count.
#include <dlfcn.h>
#include <oneapi/dnnl/dnnl.h>

#include <cstring>

#include "kernels/cpu/cpu_ops_impl.h"
#include "kernels/cpu/ops_basic.h"

namespace spipe::cpu {
namespace {

struct Tile {
  std::int64_t rows, cols;
};

std::int64_t round_to(std::int64_t x, std::int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// `size` cut into equal parts of at most `limit`, the part rounded up to `multiple`.
std::int64_t even_part(std::int64_t size, std::int64_t limit, std::int64_t multiple) {
  const std::int64_t parts = (size + limit - 1) / limit;
  return std::min(size, round_to((size + parts - 1) / parts, multiple));
}

// Large tiles reuse cache lines; a matmul wants some tiles to share among threads, of at least a million flops or so.
Tile tile_of(std::int64_t m, std::int64_t n, std::int64_t k) {
  constexpr std::int64_t kRows = 256, kCols = 384, kRowUnit = 8, kColUnit = 48, kWanted = 8;
  constexpr std::int64_t kSmallestWork = 500'000;  // multiply-adds
  Tile tile{even_part(m, kRows, kRowUnit), even_part(n, kCols, kColUnit)};
  for (;;) {
    const std::int64_t tiles = ((m + tile.rows - 1) / tile.rows) * ((n + tile.cols - 1) / tile.cols);
    const bool halve_rows = tile.rows >= 64 && tile.rows >= tile.cols / 4, halve_cols = tile.cols >= 192;
    if (tiles >= kWanted || !(halve_rows || halve_cols) || tile.rows * tile.cols * k < 2 * kSmallestWork) return tile;
    if (halve_rows) {
      tile.rows = std::min(m, round_to((tile.rows + 1) / 2, kRowUnit));
    } else {
      tile.cols = std::min(n, round_to((tile.cols + 1) / 2, kColUnit));
    }
  }
}

// oneDNN must not start OpenMP threads from the threads that run items. The pool sees to its own; the caller of a loop may be
// any thread.
void single_threaded_openmp() {
  thread_local const bool done = [] {
    using SetThreads = void (*)(int);
    if (auto* set_threads = reinterpret_cast<SetThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"))) set_threads(1);
    return true;
  }();
  (void)done;
}

struct Operand {
  const float* data;
  std::int64_t ld;
};

// The fp32 form of rows x cols stored elements at p: in place for fp32, else widened into `buffer`.
Operand as_float(const BasicTable& table, ConstPtr p, std::int64_t ld, std::int64_t rows, std::int64_t cols, float* buffer) {
  if (p.dtype == DType::f32) return {static_cast<const float*>(p.data), ld};
  table.widen_matrix(p.data, p.dtype, ld, buffer, cols, rows, cols);
  return {buffer, cols};
}

void sgemm(const MatmulArgs& args, std::int64_t m, std::int64_t n, std::int64_t k, Operand a, Operand b, bool accumulate,
           float* c, std::int64_t ldc) {
  const dnnl_status_t status = dnnl_sgemm(args.trans_a ? 'T' : 'N', args.trans_b ? 'T' : 'N', m, n, k, 1.0f, a.data, a.ld,
                                          b.data, b.ld, accumulate ? 1.0f : 0.0f, c, ldc);
  SPIPE_CHECK(status == dnnl_success, "dnnl_sgemm failed");
}

}  // namespace

void CpuOps::matmul(StreamHandle*, const MatmulArgs& args) {
  SPIPE_CHECK(is_storage(args.a.dtype) && is_storage(args.b.dtype) && is_storage(args.c.dtype), "matmul: fp32, bf16 or fp16");
  SPIPE_CHECK(args.m >= 0 && args.n >= 0 && args.k >= 0, "matmul: size");
  SPIPE_CHECK(!args.accumulate || (args.c.dtype == DType::f32 && !args.bias), "matmul: accumulate is fp32 without bias");
  SPIPE_CHECK(!args.bias || is_storage(args.bias.dtype), "matmul: bias is fp32, bf16 or fp16");
  const std::int64_t m = args.m, n = args.n, k = args.k;
  const std::int64_t a_row = args.trans_a ? m : k, b_row = args.trans_b ? k : n;
  const std::int64_t lda = args.lda != 0 ? args.lda : a_row, ldb = args.ldb != 0 ? args.ldb : b_row;
  const std::int64_t ldc = args.ldc != 0 ? args.ldc : n;
  SPIPE_CHECK(lda >= a_row && ldb >= b_row && ldc >= n, "matmul: a row is longer than its distance to the next");
  if (m == 0 || n == 0 || (k == 0 && args.accumulate)) return;

  const BasicTable& table = SPIPE_TABLE(isa_, basic_table);
  const Tile tile = tile_of(m, n, k);
  const std::int64_t row_tiles = (m + tile.rows - 1) / tile.rows, col_tiles = (n + tile.cols - 1) / tile.cols;
  const bool widen_a = args.a.dtype != DType::f32, widen_b = args.b.dtype != DType::f32, float_c = args.c.dtype == DType::f32;
  // Half operands are widened tile by tile, k in slices so that the buffers stay small; fp32 needs no slices.
  constexpr std::int64_t kSlice = 1024;
  const std::int64_t slice = widen_a || widen_b ? std::min(k, kSlice) : k;
  const std::int64_t a_floats = widen_a ? round_to(tile.rows * slice, 16) : 0;
  const std::int64_t b_floats = widen_b ? round_to(slice * tile.cols, 16) : 0;
  const std::int64_t c_floats = float_c ? 0 : tile.rows * tile.cols;

  // Rows fastest: neighbours share the panel of B.
  pool_.parallel_for(row_tiles * col_tiles, [&](std::int64_t item, int worker) {
    single_threaded_openmp();
    const std::int64_t i = item % row_tiles * tile.rows, j = item / row_tiles * tile.cols;
    const std::int64_t rows = std::min(tile.rows, m - i), cols = std::min(tile.cols, n - j);
    float* scratch = a_floats + b_floats + c_floats > 0 ? scratch_.get(worker, a_floats + b_floats + c_floats) : nullptr;
    float* a_buffer = scratch;
    float* b_buffer = scratch + a_floats;
    const Ptr c_out = offset(args.c, i * ldc + j);
    float* c = float_c ? static_cast<float*>(c_out.data) : scratch + a_floats + b_floats;
    const std::int64_t c_ld = float_c ? ldc : tile.cols;

    if (k == 0) {
      for (std::int64_t r = 0; r < rows; ++r) std::memset(c + r * c_ld, 0, static_cast<std::size_t>(cols) * sizeof(float));
    }
    for (std::int64_t s = 0; s < k; s += slice) {
      const std::int64_t depth = std::min(slice, k - s);
      const ConstPtr a_at = offset(args.a, args.trans_a ? s * lda + i : i * lda + s);
      const ConstPtr b_at = offset(args.b, args.trans_b ? j * ldb + s : s * ldb + j);
      const Operand a =
          args.trans_a ? as_float(table, a_at, lda, depth, rows, a_buffer) : as_float(table, a_at, lda, rows, depth, a_buffer);
      const Operand b =
          args.trans_b ? as_float(table, b_at, ldb, cols, depth, b_buffer) : as_float(table, b_at, ldb, depth, cols, b_buffer);
      sgemm(args, rows, cols, depth, a, b, args.accumulate || s > 0, c, c_ld);
    }
    if (args.bias || !float_c) {
      const ConstPtr bias = args.bias ? offset(args.bias, j) : ConstPtr{};
      table.finish_tile(c, c_ld, bias.data, bias.dtype, c_out.data, args.c.dtype, ldc, rows, cols);
    }
  });
}

}  // namespace spipe::cpu
