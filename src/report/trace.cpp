#include "spipe/report/trace.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <string>
#include <type_traits>

#include "spipe/base/error.h"
#include "spipe/base/file.h"

namespace spipe::report {

namespace {

using plan::TimelineSlice;

// Before the slices that a rank ships.
struct Header {
  MachineClock clock;
  std::int64_t limit = INT64_MAX;
  std::uint64_t left_out = 0;
};
static_assert(std::is_trivially_copyable_v<TimelineSlice> && std::is_trivially_copyable_v<Header>);

struct Part {
  Header header;
  std::vector<TimelineSlice> slices;
};

Part part_of(std::span<const std::byte> bytes) {
  SPIPE_CHECK(bytes.size() >= sizeof(Header) && (bytes.size() - sizeof(Header)) % sizeof(TimelineSlice) == 0,
              "a rank's trace is a header and slices");
  Part part;
  std::memcpy(&part.header, bytes.data(), sizeof(Header));
  bytes = bytes.subspan(sizeof(Header));
  part.slices.resize(bytes.size() / sizeof(TimelineSlice));
  if (!part.slices.empty()) std::memcpy(part.slices.data(), bytes.data(), bytes.size());
  return part;
}

void shift(std::vector<TimelineSlice>& slices, double seconds) {
  for (TimelineSlice& slice : slices) {
    slice.begin += seconds;
    slice.end += seconds;
  }
}

bool has_step_before(const std::vector<TimelineSlice>& slices, std::int64_t limit) {
  return std::any_of(slices.begin(), slices.end(),
                     [&](const TimelineSlice& slice) { return slice.step != plan::kNoStep && slice.step < limit; });
}

std::uint64_t machine_id() {
  std::array<char, 256> host{};
  (void)::gethostname(host.data(), host.size() - 1);
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id") >> std::ws, boot);
  const std::string name = boot.empty() ? host.data() : boot;
  return hash64(std::as_bytes(std::span(name)));
}

}  // namespace

MachineClock this_machine_clock() {
  using std::chrono::nanoseconds;
  const auto ns = [](auto time) { return std::chrono::duration_cast<nanoseconds>(time.time_since_epoch()).count(); };
  MachineClock clock{.machine = machine_id()};
  // The closest of a few readings: between two of one reading the process may have had to wait.
  std::int64_t closest = std::numeric_limits<std::int64_t>::max();
  for (int i = 0; i < 10; ++i) {
    const std::int64_t before = ns(std::chrono::steady_clock::now());
    const std::int64_t wall = ns(std::chrono::system_clock::now());
    const std::int64_t after = ns(std::chrono::steady_clock::now());
    if (after - before >= closest) continue;
    closest = after - before;
    clock.wall_minus_steady = wall - before - closest / 2;
  }
  return clock;
}

void TraceWriter::on_task(const plan::Task& task, std::int64_t begin_ns, std::int64_t end_ns, std::uint64_t step) {
  const auto number = static_cast<std::int64_t>(step);
  const std::scoped_lock lock(mutex_);
  if (slices_.size() >= max_tasks_ && number < limit_) cut_before(number);
  // Steps overlap: after the cut there may still come tasks of steps before it, but no evaluation that belongs to them.
  if (number >= limit_ || (number == plan::kNoStep && limit_ != INT64_MAX)) {
    ++left_out_;
    return;
  }
  slices_.push_back(plan::slice_of(task, 1e-9 * static_cast<double>(begin_ns), 1e-9 * static_cast<double>(end_ns), number));
}

// Room is out at a task of `step`.
void TraceWriter::cut_before(std::int64_t step) {
  limit_ = step;
  if (step == plan::kNoStep) {
    limit_ = 0;
    for (const TimelineSlice& slice : slices_) limit_ = std::max(limit_, slice.step + 1);
  }
  if (!has_step_before(slices_, limit_)) return;
  left_out_ += std::erase_if(slices_, [&](const TimelineSlice& slice) { return slice.step >= limit_; });
}

std::vector<std::byte> TraceWriter::bytes(const MachineClock& clock) const {
  const std::scoped_lock lock(mutex_);
  const Header header{.clock = clock, .limit = limit_, .left_out = left_out_};
  std::vector<std::byte> bytes(sizeof(Header) + slices_.size() * sizeof(TimelineSlice));
  std::memcpy(bytes.data(), &header, sizeof(Header));
  if (!slices_.empty()) std::memcpy(bytes.data() + sizeof(Header), slices_.data(), bytes.size() - sizeof(Header));
  return bytes;
}

Trace merge_traces(std::span<const std::vector<std::byte>> ranks) {
  Trace trace;
  std::int64_t limit = INT64_MAX;
  std::map<std::uint64_t, std::int64_t> wall_minus_steady;  // a machine's first: its ranks read one clock
  std::int64_t first = 0;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    Part part = part_of(ranks[rank]);
    const MachineClock& clock = part.header.clock;
    const std::int64_t offset = wall_minus_steady.try_emplace(clock.machine, clock.wall_minus_steady).first->second;
    if (rank == 0) first = offset;
    shift(part.slices, 1e-9 * static_cast<double>(offset - first));
    trace.slices.insert(trace.slices.end(), part.slices.begin(), part.slices.end());
    trace.left_out += part.header.left_out;
    limit = std::min(limit, part.header.limit);
  }
  if (limit != INT64_MAX && has_step_before(trace.slices, limit)) {
    trace.left_out += std::erase_if(trace.slices, [&](const TimelineSlice& slice) { return slice.step >= limit; });
  }
  return trace;
}

void write_trace(const std::filesystem::path& file, const Trace& trace) {
  write_text_atomic(file, plan::chrome_trace(trace.slices, trace.left_out));
}

}  // namespace spipe::report
