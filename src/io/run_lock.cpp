// The lock of a run folder: flock on a file in it, so that it ends with the process however that ends.
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "spipe/base/error.h"
#include "spipe/base/log.h"
#include "spipe/io/checkpoint.h"

namespace spipe::io {
namespace {

std::string holder_text() {
  char host[256] = "unknown host";
  (void)gethostname(host, sizeof(host) - 1);
  return "process " + std::to_string(getpid()) + " on " + host;
}

std::string read_holder(int fd) {
  char text[300] = "";
  const ssize_t got = pread(fd, text, sizeof(text) - 1, 0);
  std::string holder(text, got > 0 ? static_cast<std::size_t>(got) : 0);
  holder.erase(holder.find_last_not_of('\n') + 1);
  return holder.empty() ? "another process" : holder;
}

}  // namespace

RunLock::RunLock(const Path& run_folder) {
  const Path path = run_folder / ".lock";
  fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (fd_ < 0)
    throw Error(std::string("cannot create the lock file: ") + std::strerror(errno), path.string(), "set checkpoint.dir");
  int failed = flock(fd_, LOCK_EX | LOCK_NB);
  // Somebody who only looks (run_lock_holder) has it for an instant.
  for (int again = 0; failed != 0 && errno == EWOULDBLOCK && again < 5; ++again) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    failed = flock(fd_, LOCK_EX | LOCK_NB);
  }
  if (failed != 0) {
    const int reason = errno;
    const std::string holder = read_holder(fd_);
    if (reason == EWOULDBLOCK) {
      close(fd_);
      throw Error("another job is using this run folder: " + holder, run_folder.string(),
                  "wait for it to end, or choose another checkpoint.dir");
    }
    // Some network file systems have no locks; the run is not worth less for it.
    log_warning(path.string() + ": this file system has no locks (" + std::strerror(reason) +
                "); make sure that only one job uses the folder");
    return;
  }
  const std::string text = holder_text() + "\n";
  if (ftruncate(fd_, 0) != 0 || pwrite(fd_, text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) {
    const int reason = errno;
    close(fd_);
    throw Error(std::string("cannot write the lock file: ") + std::strerror(reason), path.string());
  }
}

std::optional<std::string> run_lock_holder(const Path& run_folder) {
  const int fd = open((run_folder / ".lock").c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  std::optional<std::string> holder;
  if (flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK) holder = read_holder(fd);
  close(fd);
  return holder;
}

// The file stays: removing it would let two jobs lock two files of one name.
RunLock::~RunLock() { close(fd_); }

}  // namespace spipe::io
