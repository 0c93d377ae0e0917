#include "spipe/base/log.h"

#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <mutex>
#include <string>

#include "spipe/base/error.h"

namespace spipe {
namespace {

struct Sinks {
  std::mutex lock;
  LogLevel level = LogLevel::info;
  std::shared_ptr<spdlog::logger> console, file;
  void (*before_line)() = nullptr;
  bool closed = false;  // the last line was written
};

std::shared_ptr<spdlog::logger> make_logger(std::shared_ptr<spdlog::sinks::sink> sink, const char* pattern) {
  auto logger = std::make_shared<spdlog::logger>("spipe", std::move(sink));
  logger->set_level(spdlog::level::debug);
  logger->set_pattern(pattern);
  logger->flush_on(spdlog::level::debug);
  return logger;
}

// Never destroyed: threads that end late may still log.
Sinks& sinks() {
  static Sinks* const sinks = [] {
    auto* made = new Sinks;
    made->console = make_logger(std::make_shared<spdlog::sinks::stderr_sink_mt>(), "%v");
    return made;
  }();
  return *sinks;
}

void log(LogLevel level, std::string_view prefix, std::string_view message, bool last = false) {
  Sinks& to = sinks();
  const std::lock_guard<std::mutex> guard(to.lock);
  if (to.closed) return;
  to.closed = last;
  const std::string line = std::string(prefix) + std::string(message);
  if (level >= to.level) {
    if (to.before_line != nullptr) to.before_line();
    to.console->info(spdlog::string_view_t(line));
  }
  if (to.file) to.file->info(spdlog::string_view_t(line));
}

}  // namespace

void init_logging(LogLevel level, const std::filesystem::path& file) {
  Sinks& to = sinks();
  std::shared_ptr<spdlog::logger> opened;
  if (!file.empty()) {
    try {
      opened = make_logger(std::make_shared<spdlog::sinks::basic_file_sink_mt>(file.string()), "%Y-%m-%d %H:%M:%S.%e %v");
    } catch (const spdlog::spdlog_ex& error) {
      throw Error(std::string("cannot open the log file (") + error.what() + ")", file.string());
    }
  }
  const std::lock_guard<std::mutex> guard(to.lock);
  to.level = level;
  to.file = std::move(opened);
}

void log_debug(std::string_view message) { log(LogLevel::debug, "debug: ", message); }
void log_info(std::string_view message) { log(LogLevel::info, "", message); }
void log_warning(std::string_view message) { log(LogLevel::warning, "warning: ", message); }
void log_error(std::string_view message) { log(LogLevel::error, "error: ", message); }
void log_last_error(std::string_view message) { log(LogLevel::error, "error: ", message, true); }

void close_log() {
  Sinks& to = sinks();
  const std::lock_guard<std::mutex> guard(to.lock);
  to.closed = true;
}

void set_log_line_hook(void (*before_line)()) {
  Sinks& to = sinks();
  const std::lock_guard<std::mutex> guard(to.lock);
  to.before_line = before_line;
}

}  // namespace spipe
