// `spipe status`: how a run is doing, or how it ended.
#pragma once

#include <CLI/CLI.hpp>
#include <filesystem>
#include <string>

namespace spipe::tools {

struct StatusFlags {
  std::string run;
  bool once = false;
  double every = 2;  // seconds
};

enum class RunState : std::uint8_t { running, finished, saved, failed, died };
struct RunStatus {
  RunState state = RunState::running;
  std::string text;  // one line
};
// What a run's folder says now. Error when it is no run's folder.
[[nodiscard]] RunStatus status_of(const std::filesystem::path& run);
// 0: running or finished; 75: stopped and saved; 1: failed or died.
[[nodiscard]] int exit_code_of(RunState state);

CLI::App* add_status_command(CLI::App& app, StatusFlags& flags);
// Prints the status, again when it changes, until the run is over; returns the exit code.
int run_status(const StatusFlags& flags);

}  // namespace spipe::tools
