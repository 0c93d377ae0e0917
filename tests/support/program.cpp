#include "program.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "spipe/base/error.h"
#include "spipe/base/file.h"

namespace spipe::test {

Program::Program(const std::filesystem::path& binary, std::vector<std::string> arguments, const std::filesystem::path& folder)
    : folder_(folder) {
  arguments.insert(arguments.begin(), binary.string());
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  const std::string out = (folder / "stdout").string(), err = (folder / "stderr").string();
  pid_ = fork();
  SPIPE_CHECK(pid_ >= 0, "fork");
  if (pid_ == 0) {
    const int out_fd = open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    const int err_fd = open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    dup2(out_fd, STDOUT_FILENO);
    dup2(err_fd, STDERR_FILENO);
    execv(argv[0], argv.data());
    _exit(127);
  }
}

Program::~Program() {
  if (reaped_) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, &status_, 0);
}

bool Program::running() {
  if (!reaped_ && waitpid(pid_, &status_, WNOHANG) == pid_) reaped_ = true;
  return !reaped_;
}

void Program::signal(int number) const { kill(pid_, number); }

bool Program::wait_for_output(const std::string& text, double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < end) {
    const bool alive = running();
    if (std::filesystem::exists(folder_ / "stdout") && read_text(folder_ / "stdout").find(text) != std::string::npos)
      return true;
    if (!alive) return false;
    sleep_seconds(0.01);
  }
  return false;
}

ProgramResult Program::wait() {
  if (!reaped_) waitpid(pid_, &status_, 0);
  reaped_ = true;
  ProgramResult result;
  result.exit_code = WIFEXITED(status_) ? WEXITSTATUS(status_) : 128 + WTERMSIG(status_);
  result.out = read_text(folder_ / "stdout");
  result.err = read_text(folder_ / "stderr");
  return result;
}

std::vector<std::string> train_arguments(const std::filesystem::path& folder, const std::vector<std::string>& settings,
                                         const std::vector<std::string>& more) {
  std::vector<std::string> list = {(folder / "run.yaml").string()};
  for (const std::string& setting : settings) {
    list.emplace_back("--set");
    list.push_back(setting);
  }
  list.insert(list.end(), more.begin(), more.end());
  return list;
}

ProgramResult run_program(const std::filesystem::path& binary, std::vector<std::string> arguments,
                          const std::filesystem::path& folder) {
  return Program(binary, std::move(arguments), folder).wait();
}

void sleep_seconds(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

}  // namespace spipe::test
