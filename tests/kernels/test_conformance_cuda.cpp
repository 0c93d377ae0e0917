// The CUDA kernels on a GPU, under the conformance suite. Without a GPU or a driver the program starts all the same, says what
// it skipped, and counts it.
#define CATCH_CONFIG_EXTERNAL_INTERFACES  // listeners
#include <catch2/catch.hpp>
#include <cstdio>

#include "kernels/cuda/cuda_ops.h"
#include "tests/kernels/cuda_memory.h"

namespace spipe::test {
namespace {

int skipped = 0;

template <CudaAttention attention>
const Backends& gpus() {
  static std::unique_ptr<Ops> ops;
  static const Backends backends = [] {
    Backends result;
    if (cuda_device_count() == 0) return result;
    ops = make_cuda_ops(cuda_memory().allocate(kCudaScratchBytes), attention);
    result.push_back({.name = "CUDA",
                      .ops = ops.get(),
                      .memory = &cuda_memory(),
                      .rounds_probabilities = attention == CudaAttention::kBest});
    return result;
  }();
  if (backends.empty()) ++skipped;
  return backends;
}

}  // namespace

struct Summary : Catch::TestEventListenerBase {
  using TestEventListenerBase::TestEventListenerBase;
  void testRunEnded(const Catch::TestRunStats&) override {
    if (skipped > 0) std::printf("SKIPPED: no CUDA device: %d ops\n", skipped);
    std::printf("%s", worst_errors().c_str());
  }
};
CATCH_REGISTER_LISTENER(Summary)

SPIPE_CONFORMANCE_TESTS("cuda", gpus<CudaAttention::kBest>())
SPIPE_UPDATE_TESTS("cuda", gpus<CudaAttention::kBest>())

TEST_CASE("cuda, plain: attention forward") { conform_attention_forward(gpus<CudaAttention::kPlain>()); }
TEST_CASE("cuda, plain: attention backward") { conform_attention_backward(gpus<CudaAttention::kPlain>()); }

}  // namespace spipe::test
