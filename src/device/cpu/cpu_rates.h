// Measured rates of a CPU device, for the planner and for "% of peak".
#pragma once

#include "spipe/device/device.h"

namespace spipe::device {

[[nodiscard]] DeviceRates measure_cpu_rates(Ops& ops, Ops& host_ops);

}  // namespace spipe::device
