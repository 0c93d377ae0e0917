// Learning-rate schedules: pure functions of the number of updates done, so that resuming needs no schedule state.
#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <string_view>
#include <utility>

#include "spipe/base/error.h"
#include "spipe/base/units.h"
#include "spipe/optim/optim.h"

namespace spipe::optim {
namespace {

using Named = std::pair<std::string_view, ScheduleKind>;
constexpr std::array<Named, 7> kNames = {
    Named{"constant", ScheduleKind::constant}, Named{"linear", ScheduleKind::linear},
    Named{"cosine", ScheduleKind::cosine},     Named{"inverse_sqrt", ScheduleKind::inverse_sqrt},
    Named{"wsd", ScheduleKind::wsd_linear},    Named{"wsd_linear", ScheduleKind::wsd_linear},
    Named{"wsd_sqrt", ScheduleKind::wsd_sqrt}};

// (done - begin) / (end - begin) limited to 0..1. An empty interval lies in the past once `done` has passed its end.
double progress(std::int64_t done, std::int64_t begin, std::int64_t end) {
  if (done >= end) {
    return 1;
  }
  return done <= begin ? 0 : static_cast<double>(done - begin) / static_cast<double>(end - begin);
}

}  // namespace

ScheduleKind schedule_kind_from_name(const std::string& name) {
  std::array<std::string_view, kNames.size()> names;
  std::string all;
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    names[i] = kNames[i].first;
    all += (i == 0 ? "" : ", ") + std::string(names[i]);
    if (name == names[i]) {
      return kNames[i].second;
    }
  }
  const std::string nearest = nearest_word(name, names);
  throw Error("unknown learning-rate schedule '" + name + "'", "optimizer.schedule.type",
              nearest.empty() ? "use one of " + all : "did you mean '" + nearest + "'?");
}

double LrSchedule::at(std::int64_t updates_done) const {
  SPIPE_CHECK(updates_done >= 0 && warmup >= 0 && decay >= 0, "a schedule counts updates from zero");
  const auto done = static_cast<double>(updates_done);
  if (updates_done < warmup) {
    return lr * (done + warmup_offset) / (static_cast<double>(warmup) + warmup_offset);
  }
  // A run that is all warm-up has nothing left to decay in: it stays at the peak.
  const double x = total > warmup ? progress(updates_done, warmup, total) : 0;
  switch (kind) {
    case ScheduleKind::constant:
      return lr;
    case ScheduleKind::linear:
      return lr * (final + (1 - final) * (1 - x));
    case ScheduleKind::cosine:
      return lr * (final + (1 - final) * (1 + std::cos(std::numbers::pi * x)) / 2);
    case ScheduleKind::inverse_sqrt:
      return lr * std::sqrt(static_cast<double>(std::max<std::int64_t>(warmup, 1)) / std::max(done, 1.0));
    case ScheduleKind::wsd_linear:
      return lr * (final + (1 - final) * (1 - progress(updates_done, total - decay, total)));
    case ScheduleKind::wsd_sqrt:
      return lr * (final + (1 - final) * (1 - std::sqrt(progress(updates_done, total - decay, total))));
  }
  SPIPE_CHECK(false, "no such schedule");
  return lr;
}

double clip_factor(double norm, double max_norm) { return max_norm > 0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0; }

}  // namespace spipe::optim
