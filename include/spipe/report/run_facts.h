// run.json of a run's folder: what the run was started with and on, and how it ended. Written by rank 0 when a run starts (anew
// when it is resumed) and when it ends; a run that was killed has no end in it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace spipe::report {

using TextRows = std::vector<std::pair<std::string, std::string>>;

struct MemoryPart {
  std::string name;
  std::uint64_t bytes = 0;
};
struct RunEnd {
  std::string how;   // finished | saved (stopped by a signal, can be resumed) | failed
  std::string text;  // failed: the message
  std::string at;    // "2026-12-07 11:25:43 UTC"
  std::uint64_t step = 0;
  double seconds = 0;  // since the start
};
struct RunFacts {
  std::string started;  // as RunEnd::at
  std::uint64_t first_step = 0, total_steps = 0;
  TextRows environment, model;
  std::string plan;                                // its summary, a line or several
  std::vector<MemoryPart> device, host;            // parts of the peaks
  std::uint64_t device_limit = 0, host_limit = 0;  // 0: none
  std::optional<RunEnd> end;
};
void write_run_facts(const std::filesystem::path& file, const RunFacts& facts);
// Error naming the file when it is no such file.
[[nodiscard]] RunFacts read_run_facts(const std::filesystem::path& file);
[[nodiscard]] std::string time_now_text();  // UTC, as in RunEnd::at

}  // namespace spipe::report
