#include "spipe/report/trace.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <type_traits>

#include "spipe/base/error.h"
#include "spipe/base/file.h"

namespace spipe::report {

namespace {

using plan::TimelineSlice;
static_assert(std::is_trivially_copyable_v<TimelineSlice>);

double wall_minus_steady() {
  const auto steady = std::chrono::steady_clock::now().time_since_epoch();
  const auto wall = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(wall).count() - std::chrono::duration<double>(steady).count();
}

}  // namespace

void TraceWriter::on_task(const plan::Task& task, std::int64_t begin_ns, std::int64_t end_ns, std::uint64_t step) {
  const std::scoped_lock lock(mutex_);
  if (slices_.size() >= max_tasks_) return;
  slices_.push_back(plan::slice_of(task, 1e-9 * static_cast<double>(begin_ns), 1e-9 * static_cast<double>(end_ns),
                                   static_cast<std::int64_t>(step)));
}

std::vector<std::byte> TraceWriter::bytes() const {
  const double shift = wall_minus_steady();
  const std::scoped_lock lock(mutex_);
  std::vector<TimelineSlice> shifted = slices_;
  for (TimelineSlice& slice : shifted) {
    slice.begin += shift;
    slice.end += shift;
  }
  const auto own = std::as_bytes(std::span(shifted));
  return {own.begin(), own.end()};
}

std::vector<TimelineSlice> slices_from_bytes(std::span<const std::byte> bytes) {
  SPIPE_CHECK(bytes.size() % sizeof(TimelineSlice) == 0, "a trace is made of slices");
  std::vector<TimelineSlice> slices(bytes.size() / sizeof(TimelineSlice));
  if (!slices.empty()) std::memcpy(slices.data(), bytes.data(), bytes.size());
  return slices;
}

void write_trace(const std::filesystem::path& file, std::vector<TimelineSlice> slices) {
  std::sort(slices.begin(), slices.end(), [](const TimelineSlice& a, const TimelineSlice& b) { return a.begin < b.begin; });
  const double origin = slices.empty() ? 0 : slices.front().begin;
  for (TimelineSlice& slice : slices) {
    slice.begin -= origin;
    slice.end -= origin;
  }
  write_text_atomic(file, plan::chrome_trace(slices));
}

}  // namespace spipe::report
