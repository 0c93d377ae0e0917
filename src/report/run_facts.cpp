#include "spipe/report/run_facts.h"

#include <ctime>
#include <nlohmann/json.hpp>

#include "spipe/base/error.h"
#include "spipe/base/file.h"

namespace spipe::report {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kFormat = 1;

Json parts_json(const std::vector<MemoryPart>& parts) {
  Json json = Json::array();
  for (const MemoryPart& part : parts) json.push_back({part.name, part.bytes});
  return json;
}

std::vector<MemoryPart> parts_from(const Json& json) {
  std::vector<MemoryPart> parts;
  for (const Json& part : json) parts.push_back({part.at(0).get<std::string>(), part.at(1).get<std::uint64_t>()});
  return parts;
}

Json rows_json(const TextRows& rows) {
  Json json = Json::array();
  for (const auto& [name, text] : rows) json.push_back({name, text});
  return json;
}

TextRows rows_from(const Json& json) {
  TextRows rows;
  for (const Json& row : json) rows.emplace_back(row.at(0).get<std::string>(), row.at(1).get<std::string>());
  return rows;
}

}  // namespace

std::string time_now_text() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[40];
  return {text, std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S UTC", &utc)};
}

void write_run_facts(const std::filesystem::path& file, const RunFacts& facts) {
  Json json;
  json["format"] = kFormat;
  json["started"] = facts.started;
  json["first_step"] = facts.first_step;
  json["total_steps"] = facts.total_steps;
  json["environment"] = rows_json(facts.environment);
  json["model"] = rows_json(facts.model);
  json["plan"] = facts.plan;
  json["device_memory"] = parts_json(facts.device);
  json["device_limit"] = facts.device_limit;
  json["host_memory"] = parts_json(facts.host);
  json["host_limit"] = facts.host_limit;
  if (facts.end) {
    json["end"] = {{"how", facts.end->how},
                   {"text", facts.end->text},
                   {"at", facts.end->at},
                   {"step", facts.end->step},
                   {"seconds", facts.end->seconds}};
  }
  write_text_atomic(file, json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
}

RunFacts read_run_facts(const std::filesystem::path& file) {
  try {
    const Json json = Json::parse(read_text(file));
    if (json.at("format").get<int>() != kFormat) throw std::runtime_error("another format");
    RunFacts facts;
    facts.started = json.at("started").get<std::string>();
    facts.first_step = json.at("first_step").get<std::uint64_t>();
    facts.total_steps = json.at("total_steps").get<std::uint64_t>();
    facts.environment = rows_from(json.at("environment"));
    facts.model = rows_from(json.at("model"));
    facts.plan = json.at("plan").get<std::string>();
    facts.device = parts_from(json.at("device_memory"));
    facts.device_limit = json.at("device_limit").get<std::uint64_t>();
    facts.host = parts_from(json.at("host_memory"));
    facts.host_limit = json.at("host_limit").get<std::uint64_t>();
    if (const auto end = json.find("end"); end != json.end()) {
      facts.end =
          RunEnd{end->at("how").get<std::string>(), end->at("text").get<std::string>(), end->at("at").get<std::string>(),
                 end->at("step").get<std::uint64_t>(), end->at("seconds").get<double>()};
    }
    return facts;
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw Error(std::string("is not what this version writes about a run (") + error.what() + ")", file.string(),
                "remove it, or use the version of spipe that wrote it");
  }
}

}  // namespace spipe::report
