// Matmul, norms and attention by the CUDA kernels on the emulated device; see test_conformance_emulated.cpp.
#define CATCH_CONFIG_EXTERNAL_INTERFACES  // listeners
#include <catch2/catch.hpp>
#include <cstdio>

#include "tests/emulator/emulated_backend.h"

// Prints the worst errors that the tests that ran saw.
struct WorstErrors : Catch::TestEventListenerBase {
  using TestEventListenerBase::TestEventListenerBase;
  void testRunEnded(const Catch::TestRunStats&) override { std::printf("%s", spipe::test::worst_errors().c_str()); }
};
CATCH_REGISTER_LISTENER(WorstErrors)

SPIPE_CONFORMANCE_ROW_TESTS("emulated", spipe::test::emulated_cuda<spipe::CudaAttention::kPlain>())

TEST_CASE("emulated tensor cores: attention forward") {
  spipe::test::conform_attention_forward(spipe::test::emulated_cuda<spipe::CudaAttention::kBest>());
}
TEST_CASE("emulated tensor cores: attention backward") {
  spipe::test::conform_attention_backward(spipe::test::emulated_cuda<spipe::CudaAttention::kBest>());
}
