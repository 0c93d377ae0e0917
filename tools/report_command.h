// `spipe report`: runs' folders, or a trace, as one HTML page.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

namespace spipe::tools {

struct ReportFlags {
  std::vector<std::string> runs;     // folders, or trace files
  std::string output;                // empty: beside the first one's files
  std::optional<std::int64_t> step;  // of the trace, from 1; not given: the last
};

CLI::App* add_report_command(CLI::App& app, ReportFlags& flags);
void run_report(const ReportFlags& flags);

}  // namespace spipe::tools
