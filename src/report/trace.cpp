#include "spipe/report/trace.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "spipe/base/file.h"

namespace spipe::report {

void TraceWriter::on_task(const plan::Task& task, std::int64_t begin_ns, std::int64_t end_ns) {
  const std::scoped_lock lock(mutex_);
  if (slices_.size() < max_tasks_) slices_.push_back({task, begin_ns, end_ns});
}

void TraceWriter::write(const std::filesystem::path& file) const {
  const std::scoped_lock lock(mutex_);
  std::int64_t origin = slices_.empty() ? 0 : slices_.front().begin_ns;
  for (const Slice& slice : slices_) origin = std::min(origin, slice.begin_ns);
  nlohmann::json events = nlohmann::json::array();
  for (int stream = 0; stream < plan::kStreamCount; ++stream) {
    events.push_back({{"ph", "M"},
                      {"name", "thread_name"},
                      {"pid", 0},
                      {"tid", stream},
                      {"args", {{"name", plan::stream_name(static_cast<plan::StreamKind>(stream))}}}});
  }
  for (const Slice& slice : slices_) {
    const plan::Task& task = slice.task;
    std::string name = plan::task_kind_name(task.kind);
    if (task.unit >= 0) name += fmt::format(" u{}", task.unit);
    if (task.micro_batch >= 0) name += fmt::format(" m{}", task.micro_batch);
    events.push_back({{"ph", "X"},
                      {"name", name},
                      {"cat", plan::task_kind_name(task.kind)},
                      {"pid", task.rank},
                      {"tid", static_cast<int>(task.stream)},
                      {"ts", 1e-3 * static_cast<double>(slice.begin_ns - origin)},
                      {"dur", 1e-3 * static_cast<double>(slice.end_ns - slice.begin_ns)},
                      {"args", {{"task", task.id}, {"bytes", task.bytes}, {"stage", task.stage}}}});
  }
  write_text_atomic(file, nlohmann::json{{"traceEvents", events}, {"displayTimeUnit", "ms"}}.dump() + "\n");
}

}  // namespace spipe::report
