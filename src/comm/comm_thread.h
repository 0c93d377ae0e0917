// The thread that makes every MPI call of a rank.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "transport.h"

namespace spipe::comm {

class CommThread {
 public:
  // `failed` is called on the comm thread with what went wrong in MPI, once; the thread does nothing after it.
  CommThread(Transport::AbortHandler on_abort, std::function<void(const std::string&)> failed);
  ~CommThread();
  CommThread(const CommThread&) = delete;
  CommThread& operator=(const CommThread&) = delete;

  // Returns whether MPI is up within `patience`.
  [[nodiscard]] bool wait_until_up(std::chrono::milliseconds patience);
  // Runs `work` on the comm thread and waits for it.
  void call(const std::function<void(Transport&)>& work);
  void finalize();  // collective: all messages done, MPI_Finalize
  [[nodiscard]] Transport& transport() { return transport_; }

 private:
  void run();
  void loop();

  Transport transport_;
  std::function<void(const std::string&)> failed_;
  std::mutex lock_;
  std::condition_variable changed_;
  bool up_ = false, leaving_ = false, finalized_ = false;
  struct Call {
    const std::function<void(Transport&)>* work;
    bool done = false;
  };
  std::deque<Call*> calls_;
  std::thread thread_;
};

}  // namespace spipe::comm
