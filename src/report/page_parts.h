// Sections of the report. Internal to report/.
#pragma once

#include <string>
#include <vector>

#include "spipe/report/page.h"

namespace spipe::report {

[[nodiscard]] std::string html_table(const std::vector<std::vector<std::string>>& rows);
// How far each run came, in a table: what is not known is left empty.
[[nodiscard]] std::string overview_table(const std::vector<ReportedRun>& runs);
// Peaks of device and host, part by part, as bars and as a table. Empty when no run says.
[[nodiscard]] std::string memory_section(const std::vector<ReportedRun>& runs);
// What the models made of prompts, the newest first.
[[nodiscard]] std::string samples_section(const std::vector<ReportedRun>& runs);
// Of several runs: what differs, then all of it.
[[nodiscard]] std::string config_section(const std::vector<ReportedRun>& runs);
[[nodiscard]] std::string environment_section(const std::vector<ReportedRun>& runs);

}  // namespace spipe::report
