// The CPU backend under the conformance suite: the widest instruction set with 1, 2 and 3 threads, and every other set.
#define CATCH_CONFIG_EXTERNAL_INTERFACES  // listeners
#include <fmt/core.h>

#include <catch2/catch.hpp>
#include <memory>

#include "kernels/cpu/cpu_ops.h"
#include "spipe/base/error.h"
#include "tests/kernels/conformance.h"

namespace spipe::test {
namespace {

struct CpuBackends {
  std::vector<std::unique_ptr<ThreadPool>> pools;
  std::vector<std::unique_ptr<Ops>> ops;
  Backends backends;
  std::vector<std::string> skipped;

  void add(Isa isa, int threads) {
    pools.push_back(std::make_unique<ThreadPool>(threads));
    ops.push_back(make_cpu_ops(*pools.back(), isa));
    backends.push_back({.name = fmt::format("{}, {} threads", isa_name(isa), threads),
                        .matmul_bits = std::string(isa_name(isa)),
                        .ops = ops.back().get(),
                        .memory = &plain_memory()});
  }
};

const CpuBackends& all() {
  static const CpuBackends made = [] {
    CpuBackends result;
    for (const int threads : {1, 2, 3}) result.add(best_isa(), threads);
    for (const Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512}) {
      if (isa == best_isa()) continue;
      if (isa < best_isa()) {
        result.add(isa, 2);
      } else {
        result.skipped.emplace_back(isa_name(isa));
      }
    }
    return result;
  }();
  return made;
}

}  // namespace

// Prints what the tests that ran saw, and what this CPU could not run.
struct Summary : Catch::TestEventListenerBase {
  using TestEventListenerBase::TestEventListenerBase;
  void testRunEnded(const Catch::TestRunStats&) override {
    fmt::print("{}", worst_errors());
    for (const std::string& isa : all().skipped) fmt::print("SKIPPED instruction set: this CPU lacks {}\n", isa);
    fmt::print("{} instruction sets skipped\n", all().skipped.size());
  }
};
CATCH_REGISTER_LISTENER(Summary)

SPIPE_CONFORMANCE_TESTS("cpu", all().backends)
SPIPE_UPDATE_TESTS("cpu", all().backends)

}  // namespace spipe::test
