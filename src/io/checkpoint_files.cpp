#include "checkpoint_files.h"

#include <algorithm>
#include <cstdio>
#include <map>

#include "json_guard.h"
#include "spipe/base/error.h"

namespace spipe::io {
namespace {

constexpr int kManifestFormat = 1;
constexpr std::string_view kStepPrefix = "step-";

bool is_plain_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos;
}

}  // namespace

std::string step_name(std::uint64_t step) {
  std::string digits = std::to_string(step);
  if (digits.size() < 8) digits.insert(0, 8 - digits.size(), '0');
  return std::string(kStepPrefix) + digits;
}

bool is_step_name(const std::string& name) {
  return name.starts_with(kStepPrefix) && name.size() > kStepPrefix.size() &&
         name.find_first_not_of("0123456789", kStepPrefix.size()) == std::string::npos;
}

std::string manifest_text(const Manifest& manifest) {
  nlohmann::ordered_json json;
  json["format"] = kManifestFormat;
  json["step"] = manifest.step;
  nlohmann::ordered_json files = nlohmann::ordered_json::object();
  for (const auto& [name, entry] : manifest.files) files[name] = {{"bytes", entry.bytes}, {"xxh3", hash_text(entry.hash)}};
  json["files"] = files;
  return json.dump(1) + "\n";
}

Manifest read_manifest(const Path& folder) {
  const Path path = folder / kManifestFile;
  const std::string where = folder.filename().string();
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) throw Error("MANIFEST.json missing", where);
  const nlohmann::json json = parse_json(read_text(path), (Path(where) / kManifestFile).string());
  Manifest manifest;
  try {
    if (const auto format = json.at("format").get<std::int64_t>(); format != kManifestFormat) {
      throw Error(
          "MANIFEST.json of format " + std::to_string(format) + ", this program reads " + std::to_string(kManifestFormat),
          where);
    }
    manifest.step = json.at("step").get<std::uint64_t>();
    for (const auto& [name, entry] : json.at("files").items()) {
      if (!is_plain_name(name)) throw Error("MANIFEST.json names " + quote_name(name) + ", outside the folder", where);
      const auto hash = entry.at("xxh3").get<std::string>();
      if (hash.size() != 16 || hash.find_first_not_of("0123456789abcdef") != std::string::npos) {
        throw Error("MANIFEST.json: hash of " + quote_name(name) + " is not 16 hex digits", where);
      }
      manifest.files[name] = {entry.at("bytes").get<std::uint64_t>(), std::stoull(hash, nullptr, 16)};
    }
  } catch (const nlohmann::json::exception&) {
    throw Error("MANIFEST.json lacks a field or has one of a wrong type", where);
  }
  for (const char* name : {kConfigFile, kTrainerFile}) {
    if (!manifest.files.contains(name)) throw Error("MANIFEST.json does not list " + std::string(name), where);
  }
  for (const char* kind : {"model", "optimizer"}) {
    if (files_of_kind(manifest, kind).empty()) throw Error("MANIFEST.json lists no " + std::string(kind) + " file", where);
  }
  return manifest;
}

std::vector<std::string> files_of_kind(const Manifest& manifest, const std::string& kind) {
  std::vector<std::string> names;
  for (const auto& [name, entry] : manifest.files) {
    if (name.ends_with(".safetensors") && (name.starts_with(kind + "-") || name == kind + ".safetensors"))
      names.push_back(name);
  }
  return names;
}

std::vector<Shard> cut_shards(const std::string& kind, const std::vector<std::uint64_t>& unit_bytes,
                              const std::vector<int>& host_of_unit, std::uint64_t limit) {
  SPIPE_CHECK(host_of_unit.empty() || host_of_unit.size() == unit_bytes.size(), "every unit has a host");
  std::map<int, std::vector<std::size_t>> units_of_host;
  for (std::size_t u = 0; u < unit_bytes.size(); ++u) {
    if (unit_bytes[u] == 0) continue;
    const int host = host_of_unit.empty() ? 0 : host_of_unit[u];
    SPIPE_CHECK(host >= 0, "unit " + std::to_string(u) + " has tensors and no host");
    units_of_host[host].push_back(u);
  }
  std::vector<Shard> shards;
  for (const auto& [host, units] : units_of_host) {
    std::uint64_t bytes = 0;
    for (const std::size_t u : units) {
      if (bytes == 0 || bytes + unit_bytes[u] > limit) {
        shards.push_back({host, {}, {}});
        bytes = 0;
      }
      shards.back().units.push_back(static_cast<int>(u));
      bytes += unit_bytes[u];
    }
  }
  for (std::size_t i = 0; i < shards.size(); ++i) {
    char number[32] = "";
    if (shards.size() > 1) std::snprintf(number, sizeof(number), "-%05zu-of-%05zu", i + 1, shards.size());
    shards[i].name = kind + number + ".safetensors";
  }
  return shards;
}

std::vector<StatePlane> state_planes(const store::StoreFormat& format) {
  std::vector<StatePlane> planes;
  if (format.has(store::Plane::master)) planes.push_back({store::Plane::master, ".master", DType::f32});
  planes.push_back({store::Plane::m, ".exp_avg", format.moment});
  if (format.second_moment) planes.push_back({store::Plane::v, ".exp_avg_sq", format.moment});
  return planes;
}

CheckpointHooks& checkpoint_hooks() {
  static CheckpointHooks hooks;
  return hooks;
}

}  // namespace spipe::io
