// Matmul, norms and attention by the CUDA kernels on the emulated device; see test_conformance_emulated.cpp.
#include <catch2/catch.hpp>

#include "tests/emulator/emulated_backend.h"

SPIPE_CONFORMANCE_ROW_TESTS("emulated", spipe::test::emulated_cuda())
