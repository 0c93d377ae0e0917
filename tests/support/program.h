// Runs the real programs as children: exit codes, output, signals.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <string>
#include <vector>

namespace spipe::test {

struct ProgramResult {
  int exit_code = -1;  // 128 + signal when killed by one
  std::string out, err;
};

// A started child; its output goes to files in `folder`.
class Program {
 public:
  Program(const std::filesystem::path& binary, std::vector<std::string> arguments, const std::filesystem::path& folder);
  ~Program();  // kills and reaps
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  [[nodiscard]] pid_t pid() const { return pid_; }
  [[nodiscard]] bool running();
  void signal(int number) const;
  // Waits until the output so far contains `text`, at most `seconds`; returns whether it did.
  bool wait_for_output(const std::string& text, double seconds);
  ProgramResult wait();

 private:
  std::filesystem::path folder_;
  pid_t pid_ = -1;
  int status_ = 0;
  bool reaped_ = false;
};

// Arguments of spipe-train for FOLDER/run.yaml with "key=value" overrides and more words.
[[nodiscard]] std::vector<std::string> train_arguments(const std::filesystem::path& folder,
                                                       const std::vector<std::string>& settings,
                                                       const std::vector<std::string>& more = {});
[[nodiscard]] ProgramResult run_program(const std::filesystem::path& binary, std::vector<std::string> arguments,
                                        const std::filesystem::path& folder);
void sleep_seconds(double seconds);

}  // namespace spipe::test
