// Learning rates against tests/golden/data/schedules.json, to 1e-12.
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "spipe/base/file.h"
#include "spipe/optim/optim.h"

namespace spipe::optim {
namespace {

nlohmann::json golden_schedules() {
  return nlohmann::json::parse(read_text("tests/golden/data/schedules.json")).at("schedules");
}

LrSchedule schedule_of(const nlohmann::json& entry) {
  const nlohmann::json& params = entry.at("params");
  LrSchedule schedule;
  schedule.kind = schedule_kind_from_name(entry.at("kind").get<std::string>());
  schedule.lr = params.at("lr").get<double>();
  schedule.final = params.at("final").get<double>();
  schedule.warmup = params.at("warmup").get<std::int64_t>();
  schedule.total = params.at("total").get<std::int64_t>();
  schedule.decay = params.value("decay", std::int64_t{0});
  schedule.warmup_offset = params.at("warmup_offset").get<double>();
  return schedule;
}

// The largest difference from the golden values, relative to the peak rate.
double worst_difference(const LrSchedule& schedule, const nlohmann::json& values) {
  double worst = 0;
  for (std::size_t s = 0; s < values.size(); ++s) {
    const double difference = std::abs(schedule.at(static_cast<std::int64_t>(s)) - values[s].get<double>()) / schedule.lr;
    worst = std::max(worst, difference);
  }
  return worst;
}

}  // namespace

TEST_CASE("every golden schedule is reproduced, and every kind occurs") {
  std::set<std::string> kinds;
  for (const nlohmann::json& entry : golden_schedules()) {
    INFO(entry.at("kind") << " " << entry.at("params"));
    kinds.insert(entry.at("kind").get<std::string>());
    CHECK(entry.at("values").size() > 40);
    CHECK(worst_difference(schedule_of(entry), entry.at("values")) < 1e-12);
  }
  CHECK(kinds == std::set<std::string>{"constant", "cosine", "inverse_sqrt", "linear", "wsd_linear", "wsd_sqrt"});
}

TEST_CASE("a schedule one update late is far from the golden values") {
  for (const nlohmann::json& entry : golden_schedules()) {
    LrSchedule late = schedule_of(entry);
    late.warmup += 1;
    INFO(entry.at("kind") << " " << entry.at("params"));
    CHECK(worst_difference(late, entry.at("values")) > 1e-3);
  }
}

}  // namespace spipe::optim
