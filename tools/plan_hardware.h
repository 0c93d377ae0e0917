// `spipe plan --hardware`: a config's step on given hardware, simulated. Needs no device and no MPI.
#pragma once

#include <string>
#include <vector>

#include "spipe/config/config.h"

namespace spipe::tools {

struct HardwareFlags {
  std::string hardware;           // YAML file
  std::string schedule = "auto";  // or a name
  int hosts = 0;                  // 0: as the file says
  int replicas = 1;
  int forward_stages = 0, backward_stages = 0;  // totals; 0: tried
  std::string timeline;                         // HTML to write; empty: none
  std::string trace;                            // Chrome JSON to write; empty: none
};

void plan_on_hardware(const config::Config& config, const HardwareFlags& flags);

}  // namespace spipe::tools
