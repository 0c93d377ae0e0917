#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "spipe/base/error.h"
#include "spipe/device/device.h"

namespace spipe::device {

using Catch::Contains;

TEST_CASE("the first error reported is the one thrown, later ones are dropped") {
  ErrorCollector errors;
  CHECK_FALSE(errors.failed());
  errors.rethrow();
  errors.report(std::make_exception_ptr(std::runtime_error("first")));
  errors.report(std::make_exception_ptr(std::runtime_error("second")));
  CHECK(errors.failed());
  CHECK(errors.stop_flag()->load() != 0);
  CHECK_THROWS_WITH(errors.rethrow(), "first");
  CHECK_THROWS_WITH(errors.rethrow(), "first");
}

TEST_CASE("many threads may report at once and one of them wins for good") {
  ErrorCollector errors;
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&errors, i] { errors.report(std::make_exception_ptr(std::runtime_error(std::to_string(i)))); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  std::string winner;
  try {
    errors.rethrow();
  } catch (const std::runtime_error& error) {
    winner = error.what();
  }
  CHECK(winner.size() == 1);
  CHECK_THROWS_WITH(errors.rethrow(), winner);
}

TEST_CASE("an arena has exactly the planned size, zeroed, and hands out checked ranges") {
  const auto device = make_cpu_device({});
  const std::uint64_t bytes = (std::uint64_t{3} << 20) + 4096 + 7;
  const auto arena = device->make_arena(bytes);
  REQUIRE(arena->bytes() == bytes);
  auto* base = static_cast<unsigned char*>(arena->at(0, bytes));
  CHECK(reinterpret_cast<std::uintptr_t>(base) % (std::uintptr_t{2} << 20) == 0);
  CHECK(std::vector<unsigned char>(base, base + bytes) == std::vector<unsigned char>(bytes, 0));
  std::memset(base, 1, bytes);
  CHECK(arena->at(4096, 7) == base + 4096);
  CHECK(arena->at(bytes, 0) == base + bytes);
  CHECK_THROWS_AS(arena->at(0, bytes + 1), InternalError);
  CHECK_THROWS_AS(arena->at(bytes - 1, 2), InternalError);
  CHECK_THROWS_AS(arena->at(bytes + 1, 0), InternalError);
  CHECK_THROWS_AS(arena->at(8, UINT64_MAX), InternalError);
}

TEST_CASE("an arena is present when it is made, so that no step pays for it") {
  const auto device = make_cpu_device({});
  const auto arena = device->make_arena(std::uint64_t{16} << 20);
  std::vector<unsigned char> resident(arena->bytes() / static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)), 0);
  REQUIRE(mincore(arena->at(0, arena->bytes()), arena->bytes(), resident.data()) == 0);
  CHECK(std::all_of(resident.begin(), resident.end(), [](unsigned char page) { return (page & 1) != 0; }));
}

TEST_CASE("an arena of nothing is allowed") {
  const auto device = make_cpu_device({});
  const auto arena = device->make_arena(0);
  CHECK(arena->bytes() == 0);
  CHECK_THROWS_AS(arena->at(0, 1), InternalError);
}

TEST_CASE("an arena the host cannot give is refused in one line that names the bytes") {
  const auto device = make_cpu_device({});
  for (const std::uint64_t bytes : {std::uint64_t{1} << 50, UINT64_MAX}) {
    try {
      const auto arena = device->make_arena(bytes);
      FAIL("an arena of " << bytes << " bytes was made");
    } catch (const Error& error) {
      CHECK_THAT(error.what(), Contains(std::to_string(bytes) + " bytes"));
      CHECK(std::string(error.what()).find('\n') == std::string::npos);
      CHECK_FALSE(error.hint().empty());
    }
  }
}

TEST_CASE("a CPU device says what it is") {
  CpuDeviceOptions options;
  options.threads = 2;
  options.isa = "scalar";
  const auto device = make_cpu_device(options);
  CHECK(device->info().backend == "cpu");
  CHECK(device->info().threads == 2);
  CHECK(device->info().host_accessible);
  CHECK_FALSE(device->info().name.empty());
  CHECK_THAT(device->info().arithmetic, Contains("scalar"));
}

TEST_CASE("impossible device options are refused") {
  CpuDeviceOptions options;
  options.threads = 0;
  CHECK_THROWS_AS(make_cpu_device(options), Error);
  options.threads = 1;
  options.update_threads = -3;
  CHECK_THROWS_AS(make_cpu_device(options), Error);
  options.update_threads = 1;
  options.isa = "sse9";
  CHECK_THROWS_AS(make_cpu_device(options), Error);
}

TEST_CASE("measured rates are finite and of a machine's order of magnitude") {
  CpuDeviceOptions options;
  options.threads = options.update_threads = 2;
  const DeviceRates rates = make_cpu_device(options)->measure_rates();
  for (const double rate : {rates.matmul_flops, rates.h2d_bytes, rates.d2h_bytes, rates.adam_parameters}) {
    CHECK(std::isfinite(rate));
    CHECK(rate > 1e6);
    CHECK(rate < 1e16);
  }
}

}  // namespace spipe::device
