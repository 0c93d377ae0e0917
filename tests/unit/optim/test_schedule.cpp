#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "spipe/base/error.h"
#include "spipe/optim/optim.h"

namespace spipe::optim {
namespace {

using Catch::Contains;

constexpr ScheduleKind kKinds[] = {ScheduleKind::constant,     ScheduleKind::linear,     ScheduleKind::cosine,
                                   ScheduleKind::inverse_sqrt, ScheduleKind::wsd_linear, ScheduleKind::wsd_sqrt};
constexpr ScheduleKind kEndingKinds[] = {ScheduleKind::linear, ScheduleKind::cosine, ScheduleKind::wsd_linear,
                                         ScheduleKind::wsd_sqrt};

LrSchedule schedule(ScheduleKind kind, std::int64_t warmup, std::int64_t total, double final = 0.1) {
  LrSchedule result;
  result.kind = kind;
  result.lr = 1;
  result.final = final;
  result.warmup = warmup;
  result.total = total;
  result.decay = 4;
  return result;
}

void check_table(const LrSchedule& schedule, const std::vector<double>& expected) {
  for (std::size_t s = 0; s < expected.size(); ++s) {
    INFO("after " << s << " updates");
    CHECK(schedule.at(static_cast<std::int64_t>(s)) == Approx(expected[s]).epsilon(1e-14).margin(1e-15));
  }
}

}  // namespace

TEST_CASE("without warm-up the first update has the peak rate") {
  check_table(schedule(ScheduleKind::linear, 0, 10, 0), {1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0, 0, 0});
  for (const ScheduleKind kind : kKinds) {
    CHECK(schedule(kind, 0, 10).at(0) == 1);
  }
}

TEST_CASE("warm-up of one update") {
  check_table(schedule(ScheduleKind::linear, 1, 10, 0),
              {0.5, 1, 8 / 9.0, 7 / 9.0, 6 / 9.0, 5 / 9.0, 4 / 9.0, 3 / 9.0, 2 / 9.0, 1 / 9.0, 0, 0});
}

TEST_CASE("warm-up of all but the last update") {
  check_table(schedule(ScheduleKind::linear, 9, 10, 0), {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 0});
}

TEST_CASE("warm-up as long as the run climbs to the peak and stays there") {
  for (const ScheduleKind kind : {ScheduleKind::linear, ScheduleKind::cosine, ScheduleKind::constant}) {
    check_table(schedule(kind, 10, 10),
                {1 / 11.0, 2 / 11.0, 3 / 11.0, 4 / 11.0, 5 / 11.0, 6 / 11.0, 7 / 11.0, 8 / 11.0, 9 / 11.0, 10 / 11.0, 1, 1});
  }
}

TEST_CASE("the first update's rate is positive with offset one and zero with offset zero") {
  LrSchedule with_offset = schedule(ScheduleKind::cosine, 4, 10);
  CHECK(with_offset.at(0) == 0.2);
  with_offset.warmup_offset = 0;
  CHECK(with_offset.at(0) == 0);
  CHECK(with_offset.at(1) == 0.25);
}

TEST_CASE("a run that ends reaches the final rate exactly and keeps it") {
  for (const ScheduleKind kind : kEndingKinds) {
    for (const double final : {0.0, 0.1, 0.3, 1.0}) {
      LrSchedule ending = schedule(kind, 3, 37, final);
      ending.lr = 3e-4;
      CHECK(ending.at(37) == 3e-4 * final);
      CHECK(ending.at(1000) == 3e-4 * final);
      if (final < 1) {
        CHECK(ending.at(36) > 3e-4 * final);
      }
    }
  }
}

TEST_CASE("no setting gives a rate that is negative, infinite or not a number") {
  for (const ScheduleKind kind : kKinds) {
    for (const std::int64_t total : {0, 1, 2, 10}) {
      for (std::int64_t warmup = 0; warmup <= total + 1; ++warmup) {
        for (std::int64_t decay = 0; decay <= total + 1; ++decay) {
          LrSchedule any = schedule(kind, warmup, total);
          any.decay = decay;
          for (std::int64_t s = 0; s < 15; ++s) {
            const double rate = any.at(s);
            INFO("kind " << static_cast<int>(kind) << " total " << total << " warm-up " << warmup << " decay " << decay << " s "
                         << s);
            REQUIRE((std::isfinite(rate) && rate >= 0 && rate <= 1));
          }
        }
      }
    }
  }
}

TEST_CASE("the stable phase of wsd lasts until the decay, also when the decay has no length") {
  LrSchedule stable = schedule(ScheduleKind::wsd_linear, 2, 10, 0);
  check_table(stable, {1 / 3.0, 2 / 3.0, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0});
  stable.decay = 0;
  check_table(stable, {1 / 3.0, 2 / 3.0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0});
}

TEST_CASE("a resumed run has the rates of one that never stopped") {
  const std::vector<double> table = {0.25,
                                     0.5,
                                     0.75,
                                     1.0,
                                     0.9554359905560885,
                                     0.8305704108364301,
                                     0.6501344202803414,
                                     0.4498655797196586,
                                     0.2694295891635699,
                                     0.1445640094439115};
  const LrSchedule whole = schedule(ScheduleKind::cosine, 3, 10);
  check_table(whole, table);
  for (const std::int64_t resumed_at : {0, 1, 3, 4, 9}) {
    const LrSchedule resumed = schedule(ScheduleKind::cosine, 3, 10);
    for (std::int64_t s = resumed_at; s < 10; ++s) {
      CHECK(resumed.at(s) == whole.at(s));
    }
  }
}

TEST_CASE("an unknown schedule is refused with the nearest name") {
  CHECK(schedule_kind_from_name("cosine") == ScheduleKind::cosine);
  CHECK(schedule_kind_from_name("wsd") == ScheduleKind::wsd_linear);
  CHECK_THROWS_WITH(schedule_kind_from_name("cosin"), Contains("'cosin'") && Contains("did you mean 'cosine'"));
  CHECK_THROWS_WITH(schedule_kind_from_name("zzzzzzzzzzzz"), Contains("inverse_sqrt"));
}

TEST_CASE("clipping scales a large gradient to the bound and leaves a small one alone") {
  CHECK(clip_factor(0.5, 1.0) == 1.0);
  CHECK(clip_factor(4.0, 1.0) == 1.0 / (4.0 + 1e-6));
  CHECK(clip_factor(0.0, 1.0) == 1.0);
  CHECK(clip_factor(1e30, 0.0) == 1.0);
  CHECK(clip_factor(1e30, -1.0) == 1.0);
  CHECK(clip_factor(1.0, 1.0) < 1.0);  // the bound counts the 1e-6
}

}  // namespace spipe::optim
