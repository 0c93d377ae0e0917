// A stream of the CPU device: one thread that takes commands from a queue in order and sleeps when there are none.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <variant>

#include "spipe/device/device.h"

namespace spipe {

// What a CPU op gets for a stream: it runs on the calling thread and only needs to know whose thread that is.
struct StreamHandle {
  std::string name;
};

}  // namespace spipe

namespace spipe::device {

class CpuStream final : public Stream {
 public:
  CpuStream(std::string name, ErrorCollector& errors);
  // Drops what has not begun, ends waits, joins.
  ~CpuStream() override;
  CpuStream(const CpuStream&) = delete;
  CpuStream& operator=(const CpuStream&) = delete;

  void run(std::function<void(StreamHandle*)> work) override;
  void wait(const Counter* counter, std::uint64_t value) override;
  void signal(Counter* counter, std::uint64_t value) override;
  void copy(void* destination, const void* source, std::uint64_t bytes) override;
  void drain() override;

 private:
  struct Run {
    std::function<void(StreamHandle*)> work;
  };
  struct Wait {
    const Counter* counter;
    std::uint64_t value;
  };
  struct Signal {
    Counter* counter;
    std::uint64_t value;
  };
  struct Copy {
    void* destination;
    const void* source;
    std::uint64_t bytes;
  };
  using Command = std::variant<Run, Wait, Signal, Copy>;

  void enqueue(Command command);
  void loop();
  void execute(Command& command);
  [[nodiscard]] bool stopping() const { return closing_.load(std::memory_order_acquire) || errors_.failed(); }
  void wait_or_stop(const Wait& wait) const;
  void copy_or_stop(const Copy& copy) const;

  StreamHandle handle_;
  ErrorCollector& errors_;
  std::mutex mutex_;
  std::condition_variable work_arrived_, idle_;
  std::deque<Command> queue_;
  bool busy_ = false;  // a command is being executed
  std::atomic<bool> closing_{false};
  std::thread thread_;
};

}  // namespace spipe::device
