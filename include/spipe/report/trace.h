// Chrome/Perfetto traces of real steps: one row a stream, one slice a task.
#pragma once

#include <cstdint>
#include <filesystem>
#include <mutex>
#include <vector>

#include "spipe/plan/observer.h"

namespace spipe::report {

// Collects tasks of running plans; write() makes a JSON file that chrome://tracing and ui.perfetto.dev open. Keeps the first
// `max_tasks` tasks, so a long run costs bounded memory.
class TraceWriter : public plan::TaskObserver {
 public:
  explicit TraceWriter(std::size_t max_tasks = 200'000) : max_tasks_(max_tasks) {}
  void on_task(const plan::Task& task, std::int64_t begin_ns, std::int64_t end_ns) override;
  void write(const std::filesystem::path& file) const;

 private:
  struct Slice {
    plan::Task task;
    std::int64_t begin_ns, end_ns;
  };
  std::size_t max_tasks_;
  mutable std::mutex mutex_;
  std::vector<Slice> slices_;
};

}  // namespace spipe::report
