// Chrome/Perfetto traces of real steps, in the format of simulated ones (plan/timeline.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <mutex>
#include <span>
#include <vector>

#include "spipe/plan/observer.h"
#include "spipe/plan/timeline.h"

namespace spipe::report {

// Collects tasks of running plans. Keeps the first `max_tasks` tasks, so a long run costs bounded memory.
class TraceWriter : public plan::TaskObserver {
 public:
  explicit TraceWriter(std::size_t max_tasks = 200'000) : max_tasks_(max_tasks) {}
  void on_task(const plan::Task& task, std::int64_t begin_ns, std::int64_t end_ns, std::uint64_t step) override;
  // What was collected, for other ranks: times on the wall clock, which ranks of several machines share.
  [[nodiscard]] std::vector<std::byte> bytes() const;

 private:
  std::size_t max_tasks_;
  mutable std::mutex mutex_;
  std::vector<plan::TimelineSlice> slices_;  // seconds of the steady clock
};

[[nodiscard]] std::vector<plan::TimelineSlice> slices_from_bytes(std::span<const std::byte> bytes);
// Slices of all ranks as one JSON file that chrome://tracing and ui.perfetto.dev open; its time begins with the first slice.
void write_trace(const std::filesystem::path& file, std::vector<plan::TimelineSlice> slices);

}  // namespace spipe::report
