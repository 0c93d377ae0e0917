// The CUDA kernels at sizes of training: time of a call, and what it achieves in FLOP/s or bytes/s. Times are the medians of
// several calls between events of the device, after warming up; memory holds one set of operands, so small ones may stay in the
// caches. Without a CUDA device it says so.
#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "spipe/base/error.h"

namespace {

using namespace spipe;

void check_cuda(cudaError_t error) { SPIPE_CHECK(error == cudaSuccess, std::string("CUDA: ") + cudaGetErrorString(error)); }

// Device memory of a case, zero: kernels take the same time for any finite numbers (clocks may be higher than with random
// ones).
class Operands {
 public:
  Operands() = default;
  ~Operands() {
    for (void* p : owned_) (void)cudaFree(p);
  }
  Operands(const Operands&) = delete;
  Operands& operator=(const Operands&) = delete;
  void* bytes(std::uint64_t size) {
    void* p = nullptr;
    check_cuda(cudaMalloc(&p, size));
    owned_.push_back(p);
    check_cuda(cudaMemset(p, 0, size));
    return p;
  }
  Ptr tensor(DType dtype, std::int64_t elements) {
    return {bytes(static_cast<std::uint64_t>(elements) * dtype_size(dtype)), dtype};
  }
  float* floats(std::int64_t elements) { return static_cast<float*>(tensor(DType::f32, elements).data); }

 private:
  std::vector<void*> owned_;
};

double median_seconds(const std::function<void()>& call) {
  cudaEvent_t begin{}, end{};
  check_cuda(cudaEventCreate(&begin));
  check_cuda(cudaEventCreate(&end));
  std::vector<float> times;
  constexpr int kWarm = 2, kTimed = 9;
  for (int i = 0; i < kWarm + kTimed; ++i) {
    check_cuda(cudaEventRecord(begin, nullptr));
    call();
    check_cuda(cudaEventRecord(end, nullptr));
    check_cuda(cudaEventSynchronize(end));
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, begin, end));
    if (i >= kWarm) times.push_back(milliseconds);
  }
  (void)cudaEventDestroy(begin);
  (void)cudaEventDestroy(end);
  std::nth_element(times.begin(), times.begin() + kTimed / 2, times.end());
  return static_cast<double>(times[kTimed / 2]) * 1e-3;
}

struct Row {
  std::string name;
  double seconds, flops, bytes;
};

class Bench {
 public:
  Bench() : ops_(make_cuda_ops(scratch_.bytes(kCudaScratchBytes))) {}

  void attention(std::int64_t length, std::int64_t head_dim) {
    Operands op;
    const std::int64_t heads = 32, kv_heads = 8, row = heads * head_dim, kv_row = kv_heads * head_dim;
    AttentionForwardArgs f{.batch = 1, .q_len = length, .kv_len = length, .heads = heads, .kv_heads = kv_heads};
    f.head_dim = head_dim;
    f.q_stride = f.out_stride = row;
    f.k_stride = f.v_stride = kv_row;
    f.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(head_dim)));
    f.q = op.tensor(DType::bf16, length * row);
    f.k = op.tensor(DType::bf16, length * kv_row);
    f.v = op.tensor(DType::bf16, length * kv_row);
    f.out = op.tensor(DType::bf16, length * row);
    f.lse = op.floats(heads * length);
    const double pairs = static_cast<double>(heads * length) * static_cast<double>(length + 1) / 2;
    const double flops = 4 * pairs * static_cast<double>(head_dim);
    add(fmt::format("attention forward {} x {} bf16, causal", length, head_dim), flops, 0,
        [&] { ops_->attention_forward(nullptr, f); });
    AttentionBackwardArgs b{.q = f.q, .k = f.k, .v = f.v, .out = f.out, .dout = op.tensor(DType::bf16, length * row)};
    b.lse = f.lse;
    b.dq = op.tensor(DType::bf16, length * row);
    b.dk = op.tensor(DType::bf16, length * kv_row);
    b.dv = op.tensor(DType::bf16, length * kv_row);
    b.batch = 1;
    b.seq_len = length;
    b.heads = heads;
    b.kv_heads = kv_heads;
    b.head_dim = head_dim;
    b.q_stride = b.out_stride = b.dout_stride = b.dq_stride = row;
    b.k_stride = b.v_stride = b.dk_stride = b.dv_stride = kv_row;
    b.scale = f.scale;
    add(fmt::format("attention backward {} x {} bf16, causal (5 products counted)", length, head_dim), 2.5 * flops, 0,
        [&] { ops_->attention_backward(nullptr, b); });
  }

  void matmul(std::int64_t n) {
    Operands op;
    const MatmulArgs args{.a = op.tensor(DType::bf16, n * n),
                          .b = op.tensor(DType::bf16, n * n),
                          .c = op.tensor(DType::bf16, n * n),
                          .m = n,
                          .n = n,
                          .k = n,
                          .trans_b = true};
    add(fmt::format("plain matmul {0} x {0} x {0} bf16", n), 2.0 * std::pow(static_cast<double>(n), 3), 0,
        [&] { ops_->matmul(nullptr, args); });
  }

  void rows(std::int64_t count, std::int64_t cols) {
    Operands op;
    const double elements = static_cast<double>(count * cols);
    const Ptr x = op.tensor(DType::bf16, count * cols), y = op.tensor(DType::bf16, count * cols);
    const Ptr dy = op.tensor(DType::bf16, count * cols), weight = op.tensor(DType::bf16, cols);
    float* rstd = op.floats(count);
    RmsNormForwardArgs f{.x = x, .weight = weight, .y = y, .rstd = rstd, .outer = count, .cols = cols, .eps = 1e-5F};
    add(fmt::format("RMSNorm forward {} x {} bf16", count, cols), 0, 4 * elements, [&] { ops_->rmsnorm_forward(nullptr, f); });
    RmsNormBackwardArgs b{.dy = dy, .x = x, .weight = weight, .rstd = rstd, .dx = y, .outer = count, .cols = cols};
    b.dweight = op.tensor(DType::f32, cols);
    add(fmt::format("RMSNorm backward {} x {} bf16", count, cols), 0, 10 * elements,
        [&] { ops_->rmsnorm_backward(nullptr, b); });
  }

  void gated(std::int64_t count, std::int64_t cols) {
    Operands op;
    const double elements = static_cast<double>(count * cols);
    const Ptr x = op.tensor(DType::bf16, 2 * count * cols), y = op.tensor(DType::bf16, count * cols);
    add(fmt::format("SwiGLU forward {} x {} bf16", count, cols), 0, 6 * elements,
        [&] { ops_->gated_forward(nullptr, {.x = x, .y = y, .rows = count, .cols = cols}); });
    add(fmt::format("SwiGLU backward {} x {} bf16, in place", count, cols), 0, 10 * elements,
        [&] { ops_->gated_backward(nullptr, {.x = x, .dy = y, .dx = x, .rows = count, .cols = cols}); });
  }

  void cross_entropy(std::int64_t count, std::int64_t cols) {
    Operands op;
    SoftmaxCrossEntropyArgs args{.rows = count, .cols = cols, .ld = cols, .scale = 1};
    args.logits = op.floats(count * cols);
    args.targets = static_cast<const std::int32_t*>(op.tensor(DType::i32, count).data);
    args.nll = op.floats(count);
    add(fmt::format("cross-entropy {} x {}", count, cols), 0, 12.0 * static_cast<double>(count * cols),
        [&] { ops_->softmax_cross_entropy(nullptr, args); });
  }

  void updates(std::int64_t elements) {
    Operands op;
    UpdateArgs args;
    args.grad = op.tensor(DType::bf16, elements);
    args.to.compute = op.tensor(DType::bf16, elements);
    args.to.master = op.tensor(DType::f32, elements);
    args.to.m = op.tensor(DType::f32, elements);
    args.to.v = op.tensor(DType::f32, elements);
    args.from = args.to;
    args.nonfinite_master = static_cast<std::uint32_t*>(op.bytes(4));
    args.elements = elements;
    args.eps = 1e-8F;
    args.step_size = 1e-3F;
    add(fmt::format("AdamW {} elements", elements), 0, 28.0 * static_cast<double>(elements),
        [&] { ops_->update(nullptr, args); });
    FinishGradientArgs finish{.a = static_cast<const float*>(args.to.m.data), .dst = args.to.compute, .elements = elements};
    finish.block_sums = static_cast<double*>(op.tensor(DType::f64, (elements + kNormBlock - 1) / kNormBlock).data);
    finish.nonfinite = args.nonfinite_master;
    add(fmt::format("gradient's norm and rounding {} elements", elements), 0, 6.0 * static_cast<double>(elements),
        [&] { ops_->finish_gradient(nullptr, finish); });
  }

  void print() const {
    fmt::print("{:64} {:>10} {:>12} {:>10}\n", "kernel", "ms", "TFLOP/s", "GB/s");
    nlohmann::json json;
    for (const Row& r : rows_) {
      const double tera = r.flops / r.seconds * 1e-12, giga = r.bytes / r.seconds * 1e-9;
      fmt::print("{:64} {:10.3f} {:>12} {:>10}\n", r.name, r.seconds * 1e3, r.flops > 0 ? fmt::format("{:.1f}", tera) : "-",
                 r.bytes > 0 ? fmt::format("{:.0f}", giga) : "-");
      json[r.name] = {{"seconds", r.seconds}, {"flops_per_second", tera * 1e12}, {"bytes_per_second", giga * 1e9}};
    }
    fmt::print("{}\n", json.dump());
  }

 private:
  void add(const std::string& name, double flops, double bytes, const std::function<void()>& call) {
    rows_.push_back({name, median_seconds(call), flops, bytes});
  }

  Operands scratch_;
  std::unique_ptr<Ops> ops_;
  std::vector<Row> rows_;
};

}  // namespace

// bench_cuda [--probe]: with --probe only says whether there is a device.
int main(int count, char** values) {
  const bool probe = count == 2 && std::string(values[1]) == "--probe";
  if (count > 1 && !probe) {
    fmt::print(stderr, "bench_cuda: unknown argument '{}'; it takes --probe or nothing\n", values[1]);
    return 2;
  }
  if (cuda_device_count() == 0) {
    fmt::print(stderr, "bench_cuda: no CUDA device here; run it on a machine with a GPU and its driver\n");
    return 2;
  }
  if (probe) return 0;
  try {
    Bench bench;
    for (const std::int64_t head_dim : {64, 128, 256}) bench.attention(4096, head_dim);
    bench.matmul(4096);
    bench.rows(8192, 4096);
    bench.gated(8192, 14336);
    bench.cross_entropy(1024, 128256);
    bench.updates(std::int64_t{1} << 26);
    bench.print();
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_cuda: {}\n", error.what());
    return 1;
  }
  return 0;
}
