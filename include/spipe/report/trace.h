// Traces of real steps: collected on every rank, brought together, written and read in the format of simulated ones
// (plan/timeline.h, docs/formats.md).
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

// Slices of one or more ranks, times on one clock.
struct Trace {
  Trace() = default;
  Trace(std::vector<plan::TimelineSlice> all, std::uint64_t missing = 0) : slices(std::move(all)), left_out(missing) {}
  std::vector<plan::TimelineSlice> slices;
  std::uint64_t left_out = 0;  // tasks that ran later and are not among them
};

// The steady clock is one for all processes of a machine; `wall_minus_steady` (nanoseconds) relates those of several.
struct MachineClock {
  std::uint64_t machine = 0;
  std::int64_t wall_minus_steady = 0;
};
[[nodiscard]] MachineClock this_machine_clock();

// Collects tasks of running plans, at most `max_tasks`, so that a long run costs bounded memory. Where they do not suffice,
// whole steps are kept: of the step in which they end, and of later ones, nothing; unless that step is the first.
class TraceWriter : public plan::TaskObserver {
 public:
  explicit TraceWriter(std::size_t max_tasks = 200'000) : max_tasks_(max_tasks) {}
  // Steps from 0; the largest number (plan::kNoStep) stands for an evaluation.
  void on_task(const plan::Task& task, std::int64_t begin_ns, std::int64_t end_ns, std::uint64_t step) override;
  // What was collected, for merge_traces on another rank.
  [[nodiscard]] std::vector<std::byte> bytes(const MachineClock& clock = this_machine_clock()) const;

 private:
  void cut_before(std::int64_t step);

  std::size_t max_tasks_;
  mutable std::mutex mutex_;
  std::vector<plan::TimelineSlice> slices_;  // seconds of the steady clock
  std::int64_t limit_ = INT64_MAX;           // steps from here on are not whole
  std::uint64_t left_out_ = 0;
};

// What the ranks collected, on the steady clock of the first one's machine. Where a rank was cut, all are: a step is there for
// every rank or for none. Broken bytes are internal errors.
[[nodiscard]] Trace merge_traces(std::span<const std::vector<std::byte>> ranks);

// One JSON file that chrome://tracing and ui.perfetto.dev open; its time begins with the first slice.
void write_trace(const std::filesystem::path& file, const Trace& trace);
// Reads it back. Errors name the file and what is wrong with it.
[[nodiscard]] Trace read_trace(const std::filesystem::path& file);

}  // namespace spipe::report
