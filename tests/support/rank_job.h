// A training job of several ranks under mpirun, as a child.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "tests/support/program.h"

namespace spipe::test {

struct RankShape {
  int hosts = 1, ranks = 1;  // hosts are pretended
};

// The text of /proc/PID/NAME; empty where the process is gone.
[[nodiscard]] std::string file_of_process(pid_t pid, const char* name);
// Processes whose command line names the folder: the launcher and the ranks of jobs in it.
[[nodiscard]] std::vector<pid_t> processes_of(const std::filesystem::path& folder);
// Whether the condition came true within so many seconds.
[[nodiscard]] bool wait_until(double seconds, const std::function<bool()>& condition);

// Whatever of the job is left when the object ends is killed.
class RankJob {
 public:
  // `arguments` of the binary name the folder (train_arguments).
  RankJob(const std::filesystem::path& binary, const std::filesystem::path& folder, const RankShape& shape,
          std::vector<std::string> arguments);
  ~RankJob();
  RankJob(const RankJob&) = delete;
  RankJob& operator=(const RankJob&) = delete;

  // Waits until the step is in the metrics of FOLDER/run; false where that took too long or the job ended before.
  [[nodiscard]] bool await_step(int step, double seconds);
  // Throws where there is none.
  [[nodiscard]] pid_t pid_of(int rank) const;
  // All processes end by themselves within so many seconds, or this throws with what they printed.
  ProgramResult wait(double seconds);

 private:
  std::filesystem::path folder_;
  Program program_;
};

}  // namespace spipe::test
