// The CUDA kernels on the emulated device, under the conformance suite: right results, and no fault of the emulator's list.
// The ops that take longer there: test_emulated_rows.cpp.
#include <catch2/catch.hpp>

#include "tests/emulator/emulated_backend.h"

SPIPE_CONFORMANCE_ELEMENT_TESTS("emulated", spipe::test::emulated_cuda<spipe::CudaAttention::kBest>())
SPIPE_UPDATE_TESTS("emulated", spipe::test::emulated_cuda<spipe::CudaAttention::kBest>())
