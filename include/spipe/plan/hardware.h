// What a machine can do, as the cost model sees it: achieved rates, not those of data sheets. From YAML files
// (configs/hardware/*.yaml) or from measurements.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace spipe::plan {

// Measured times of one compute unit; they replace what the rates below would say.
struct UnitTime {
  double forward_s = 0, backward_s = 0;
};

// Rates of 0 mean "takes no time" (or, for caps and shared pools, "no limit").
struct Hardware {
  std::string name = "ideal";
  int hosts = 1, ranks_per_host = 1;

  // Device.
  double matmul_flops = 0;        // FLOP/s of large matrix products
  double memory_bytes_per_s = 0;  // device memory: parameters and gradients of a unit, and its element-wise passes, each time
  std::uint64_t memory_bytes = 0;

  // Link between host and device, each direction by itself.
  double h2d_bytes_per_s = 0, d2h_bytes_per_s = 0;
  int ranks_per_link = 1;  // so many neighbouring ranks of a host share one link
  double link_latency_s = 0;
  // Messages that kernels copy (no copy engine between peers) take the sender's and the receiver's device this long per byte.
  double message_kernel_bytes_per_s = 0;

  // Network, per host and direction.
  double network_bytes_per_s = 0;
  double network_latency_s = 0;

  // Host.
  double update_params_per_s = 0;       // all ranks of a host together
  double update_params_per_s_rank = 0;  // what one rank's threads manage
  double dram_bytes_per_s = 0;          // shared by copies and updates of a host
  std::uint64_t host_bytes = 0;
  double storage_bytes_per_s = 0;  // checkpoints, per host

  std::vector<UnitTime> unit_times;  // empty, or one per compute unit

  [[nodiscard]] int ranks() const { return hosts * ranks_per_host; }
  // Rates are AdamW's with fp32 state; an update that moves fewer bytes is `factor` times as fast.
  void scale_updates(double factor) {
    update_params_per_s *= factor;
    update_params_per_s_rank *= factor;
  }
};

// Throws Error naming file, line and key for what is unknown, missing or no positive number.
[[nodiscard]] Hardware load_hardware(const std::filesystem::path& file);
[[nodiscard]] Hardware parse_hardware(std::string_view text, const std::string& name_in_errors);
[[nodiscard]] std::string hardware_text(const Hardware& hardware);  // YAML that parses to the same rates

}  // namespace spipe::plan
