#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <thread>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/base/log.h"
#include "test_folder.h"

using namespace spipe;

namespace {

// Sends stderr to a file while it lives.
class CapturedStderr {
 public:
  explicit CapturedStderr(const std::filesystem::path& file) : file_(file), saved_(dup(2)) {
    FILE* opened = std::fopen(file.c_str(), "w");
    dup2(fileno(opened), 2);
    std::fclose(opened);
  }
  ~CapturedStderr() {
    dup2(saved_, 2);
    close(saved_);
  }
  [[nodiscard]] std::string text() const { return read_text(file_); }

 private:
  std::filesystem::path file_;
  int saved_;
};

std::atomic<int> hook_calls{0};

}  // namespace

TEST_CASE("stderr gets what is above the level, the file everything with time stamps, and the hook comes first") {
  const TestFolder folder;
  const CapturedStderr captured(folder.path() / "stderr");
  init_logging(LogLevel::info, folder.path() / "log");
  set_log_line_hook([] { ++hook_calls; });
  hook_calls = 0;
  log_debug("fine print");
  CHECK(hook_calls == 0);
  log_info("step {} is not a format");
  log_warning("careful");
  log_error("broken");
  set_log_line_hook(nullptr);
  CHECK(hook_calls == 3);
  init_logging(LogLevel::info);
  CHECK(captured.text() == "step {} is not a format\nwarning: careful\nerror: broken\n");
  const std::string log = read_text(folder.path() / "log");
  CHECK_THAT(log, Catch::Matches("(20[0-9]{2}-[0-9]{2}-[0-9]{2} [0-9:.]{12} [^\n]+\n){4}"));
  CHECK_THAT(log, Catch::Contains("debug: fine print\n"));
}

TEST_CASE("lines of several threads do not mix") {
  const TestFolder folder;
  {
    const CapturedStderr captured(folder.path() / "stderr");
    init_logging(LogLevel::info);
    const auto write = [](const char* line) {
      for (int i = 0; i < 200; ++i) log_info(line);
    };
    std::thread first(write, "aaaaaaaaaaaaaaaaaaaa"), second(write, "bbbbbbbbbbbbbbbbbbbb");
    first.join();
    second.join();
  }
  std::ifstream lines(folder.path() / "stderr");
  int good = 0;
  for (std::string line; std::getline(lines, line);) good += line == std::string(20, line.at(0)) ? 1 : 0;
  CHECK(good == 400);
}

TEST_CASE("a log file that cannot be opened is the user's to know") {
  const TestFolder folder;
  folder.put("file", "x");
  CHECK_THROWS_WITH(init_logging(LogLevel::info, folder.path() / "file" / "log"), Catch::Contains("cannot open the log file"));
}
