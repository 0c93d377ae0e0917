// The tables a run begins with, shared by spipe-train, --dry-run and `spipe plan`.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "spipe/device/device.h"
#include "spipe/exec/run_setup.h"

namespace spipe::tools {

[[nodiscard]] std::string model_table(const exec::RunSetup& setup);
[[nodiscard]] std::string memory_table(const exec::RunSetup& setup);
// The best of those that fit, one a line: the choice and so many runners-up.
inline constexpr std::size_t kRunnersUp = 7;
[[nodiscard]] std::string trial_table(const std::vector<plan::Trial>& trials);
[[nodiscard]] std::string plan_text(const exec::RunSetup& setup);
// Ranks, hosts and threads of a job of several ranks, as one line; else nothing.
[[nodiscard]] std::string ranks_text(const exec::RunSetup& setup);
[[nodiscard]] std::string device_text(const device::DeviceInfo& info, const device::DeviceRates& rates);

// What to do after CLI11's exception: prints help or version for those, else one line on stderr; returns the exit code.
int parse_failure(const CLI::App& app, const CLI::ParseError& error);

// Runs `body`; prints an Error or InternalError as one line on stderr and returns the exit code.
int guarded(int (*body)(int, char**), int argc, char** argv);

}  // namespace spipe::tools
