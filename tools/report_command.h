// `spipe report`: a run's folder, or a trace, as one HTML page.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

namespace spipe::tools {

struct ReportFlags {
  std::string run;                   // folder, or trace file
  std::string output;                // empty: beside the trace
  std::optional<std::int64_t> step;  // from 1; not given: the last
};

CLI::App* add_report_command(CLI::App& app, ReportFlags& flags);
void run_report(const ReportFlags& flags);

}  // namespace spipe::tools
