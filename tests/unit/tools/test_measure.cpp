// `spipe measure`.
#include <unistd.h>

#include <catch2/catch.hpp>
#include <filesystem>
#include <string>

#include "spipe/base/error.h"
#include "spipe/base/host.h"
#include "spipe/plan/hardware.h"
#include "tests/support/tiny_run.h"
#include "tools/measure_command.h"

using namespace spipe;
using tools::MeasureFlags;

TEST_CASE("what spipe measure writes is a complete hardware file") {
  const test::TempFolder folder;
  const auto file = folder.path() / "my box.yaml";
  tools::run_measure({.output = file.string(), .threads = 1, .storage_size = "5 MiB"});
  const plan::Hardware h = plan::load_hardware(file);
  CHECK(h.name == "my-box");
  CHECK(h.hosts == 1);
  CHECK(h.ranks_per_host == usable_cpus());
  for (const double rate : {h.matmul_flops, h.memory_bytes_per_s, h.h2d_bytes_per_s, h.d2h_bytes_per_s, h.update_params_per_s,
                            h.update_params_per_s_rank, h.dram_bytes_per_s, h.storage_bytes_per_s}) {
    CHECK(rate > 0);
  }
  const HostMemory memory = host_memory();
  CHECK(h.memory_bytes > 0);
  CHECK(h.host_bytes > 0);
  CHECK(h.memory_bytes * static_cast<std::uint64_t>(h.ranks()) + h.host_bytes <= memory.total);
  CHECK_FALSE(std::filesystem::exists("spipe-measure.tmp-" + std::to_string(::getpid())));
}

TEST_CASE("spipe measure refuses what it cannot measure before it measures") {
  CHECK_THROWS_AS(tools::run_measure({.threads = usable_cpus() + 1}), Error);
  CHECK_THROWS_AS(tools::run_measure({.storage_size = "0"}), Error);
  CHECK_THROWS_AS(tools::run_measure({.storage_size = "lots"}), Error);
  CHECK_THROWS_AS(tools::run_measure({.output = "no/such/folder/box.yaml"}), Error);
}
