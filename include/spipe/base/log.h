// Logging: one process-wide sink set up by the tools; plain functions so that callers need no logging header.
// Format with fmt (<fmt/core.h>) at the call site.
#pragma once

#include <filesystem>
#include <string_view>

namespace spipe {

enum class LogLevel { debug, info, warning, error };

// Everything >= `level` goes to stderr; `file` (may be empty) receives everything, with time stamps. Thread safe.
void init_logging(LogLevel level, const std::filesystem::path& file = {});
void log_debug(std::string_view message);
void log_info(std::string_view message);
void log_warning(std::string_view message);
void log_error(std::string_view message);
// As log_error, and nothing is logged after it: the process is about to end.
void log_last_error(std::string_view message);
void close_log();  // nothing is logged after it
// Hook for a live progress line: called before a log line is written, so that the line can be cleared (may be null).
void set_log_line_hook(void (*before_line)());

}  // namespace spipe
