// The watch thread of a rank: sleeps on the processes of the machine's ranks and on the launcher, looks at the stop word, and
// ends this process when the job has failed. It never waits for MPI, a lock of the engine, or another thread of this process.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "control.h"

namespace spipe::comm {

class Watch {
 public:
  struct Settings {
    int rank = 0;
    int launcher_pid = 0;         // 0: nobody to watch
    std::string launcher_folder;  // removed when the launcher died without doing so; may be empty
  };
  explicit Watch(Settings settings);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // From now on the control block is the machine's; `relay` tells other machines of the cause and returns when that is done or
  // was tried long enough.
  void join(ControlBlock* control, std::function<void(const std::string& cause, int code)> relay);
  void add_peer(int rank, int pid);
  [[nodiscard]] ControlBlock& control() { return *control_.load(std::memory_order_acquire); }
  // Another machine has named the cause (and prints it): this rank ends.
  void heed_remote(const std::string& cause, int code);
  // Claims the first cause (if nobody has) and never returns: the watch thread ends the process.
  [[noreturn]] void fail(const std::string& cause, int code);

 private:
  struct Process {
    int rank = -1;  // -1: the launcher
    int pid = 0;
    int fd = -1;  // -1: this kernel or container has no pidfds; asked by kill(pid, 0)
    bool gone = false;
  };
  void run();
  void wake();
  bool look();  // at every process; returns whether nothing has happened
  void heed_termination();
  void wait_for_event();
  void on_death(const Process& process);
  void end_process();
  void print_last(const std::string& cause);
  void outlive_peers();
  std::vector<Process> peers();
  static bool has_ended(const Process& process);
  static Process open_process(int rank, int pid);

  const Settings settings_;
  ControlBlock own_;  // until the machine's block is known
  std::atomic<ControlBlock*> control_;
  std::function<void(const std::string&, int)> relay_;
  std::mutex lock_;  // of processes_
  std::vector<Process> processes_;
  int wake_ = -1;  // eventfd
  std::atomic<bool> leaving_{false};
  std::chrono::steady_clock::time_point terminated_at_{};  // when SIGTERM was first seen
  std::thread thread_;
};

// Makes SIGTERM a word to the watch instead of the end, unless somebody handles it already: launchers send it to the survivors
// of a failure, whose cause has yet to be told.
void catch_termination();

// How a process that is not our child ended ("was killed by signal 9", "ended with code 1"); "died" where nobody knows.
// `pidfd` may be -1.
[[nodiscard]] std::string how_it_ended(int pid, int pidfd);

}  // namespace spipe::comm
