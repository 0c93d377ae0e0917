#include "resume.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/base/log.h"
#include "spipe/base/units.h"
#include "spipe/base/version.h"

namespace spipe::exec {

namespace {

constexpr int kTrainerFormat = 1;
constexpr const char* kAbsent = "(absent)";  // settings that only some runs have
constexpr const char* kWarnedOnly[] = {"instruction_set", "libraries"};

}  // namespace

std::string trainer_json(const TrainerState& state, const RunSetup& setup) {
  nlohmann::ordered_json json;
  json["format"] = kTrainerFormat;
  json["step"] = state.step;
  json["tokens"] = state.tokens;
  json["updates"] = state.updates;
  json["skipped_steps"] = state.skipped;
  json["skips_in_a_row"] = state.skips_in_a_row;
  if (setup.loss_scaling.dynamic) {
    json["loss_scaler"] = {{"scale", state.scaler.scale},
                           {"good_steps", state.scaler.good_steps},
                           {"hysteresis_left", state.scaler.hysteresis_left}};
  }
  if (setup.spikes.on()) json["spike_history"] = {{"losses", state.spikes.losses()}, {"norms", state.spikes.norms()}};
  json["data_cursor"] = {{"next_step", state.step}, {"fingerprint", hash_text(state.data_fingerprint)}};
  nlohmann::ordered_json numerics = nlohmann::ordered_json::object();
  for (const auto& [key, value] : setup.numerics.values) numerics[key] = value;
  json["numerics"] = numerics;
  json["numerics_hash"] = setup.numerics.hash();
  json["permitted_changes"] = state.changes;
  json["config"] = config::resolved_text(setup.config);
  json["versions"] = {{"spipe-train", version()}, {"commit", git_commit()}, {"build", build_text()}};
  return json.dump(1) + "\n";
}

TrainerState parse_trainer_json(const std::string& text, const std::string& where) {
  try {
    const auto json = nlohmann::json::parse(text);
    if (json.at("format").get<int>() != kTrainerFormat) {
      throw Error(
          fmt::format("trainer.json has format {}, this version reads {}", json.at("format").get<int>(), kTrainerFormat), where,
          "use the version of spipe-train that wrote it");
    }
    TrainerState state;
    state.step = json.at("step").get<std::uint64_t>();
    state.tokens = json.at("tokens").get<std::uint64_t>();
    state.updates = json.at("updates").get<std::uint64_t>();
    state.skipped = json.at("skipped_steps").get<std::uint64_t>();
    state.skips_in_a_row = json.value("skips_in_a_row", std::uint64_t{0});
    if (json.contains("loss_scaler")) {
      const auto& scaler = json.at("loss_scaler");
      state.scaler = {scaler.at("scale").get<double>(), scaler.at("good_steps").get<std::int64_t>(),
                      scaler.at("hysteresis_left").get<std::int64_t>()};
      if (!optim::is_loss_scale(state.scaler.scale)) throw std::range_error("the loss scale is not a power of two");
      state.has_scaler = true;
    }
    if (json.contains("spike_history")) {
      const auto& history = json.at("spike_history");
      state.spikes = {history.at("losses").get<std::vector<double>>(), history.at("norms").get<std::vector<double>>()};
    }
    state.data_fingerprint = std::stoull(json.at("data_cursor").at("fingerprint").get<std::string>(), nullptr, 16);
    state.numerics = json.at("numerics").get<std::map<std::string, std::string>>();
    state.changes = json.at("permitted_changes").get<std::vector<std::string>>();
    return state;
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw Error(fmt::format("trainer.json cannot be read ({})", error.what()), where, "resume from an older checkpoint");
  }
}

void check_same_run(TrainerState& state, const RunSetup& setup, std::uint64_t data_fingerprint,
                    const std::vector<std::string>& allow_changes, const std::string& where) {
  std::map<std::string, std::string> now(setup.numerics.values.begin(), setup.numerics.values.end());
  std::map<std::string, std::string> then = state.numerics;
  now["data"] = hash_text(data_fingerprint);
  then["data"] = hash_text(state.data_fingerprint);
  for (const auto& [key, value] : then) now.try_emplace(key, kAbsent);
  for (const std::string& key : allow_changes) {
    if (!now.contains(key)) {
      throw Error(fmt::format("--allow-change {}: no such key of the numerics block", key), {},
                  fmt::format("did you mean '{}'?", nearest_word(key, [&now] {
                                std::vector<std::string> keys;
                                for (const auto& [k, v] : now) keys.push_back(k);
                                return keys;
                              }())));
    }
  }
  std::string refused;
  for (const auto& [key, value] : now) {
    const auto old = then.find(key);
    const std::string before = old == then.end() ? kAbsent : old->second;
    if (before == value) continue;
    const std::string change = fmt::format("{}: {} -> {}", key, before, value);
    if (std::find(std::begin(kWarnedOnly), std::end(kWarnedOnly), key) != std::end(kWarnedOnly)) {
      log_warning(fmt::format("resuming with another {} (the last bits of results may differ)", change));
    } else if (std::find(allow_changes.begin(), allow_changes.end(), key) != allow_changes.end()) {
      log_warning(fmt::format("permitted change {}", change));
      state.changes.push_back(fmt::format("step {}: {}", state.step, change));
    } else {
      refused += (refused.empty() ? "" : ", ") + change;
    }
  }
  if (!refused.empty()) {
    throw Error(fmt::format("this is not the run the checkpoint belongs to: {}", refused), where,
                "restore the old values, or permit each by --allow-change KEY");
  }
}

}  // namespace spipe::exec
