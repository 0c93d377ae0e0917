#include "spipe/io/end_ids.h"

#include <limits>
#include <set>

#include "json_guard.h"

namespace spipe::io {

std::vector<std::int32_t> end_ids_of(const Path& folder) {
  std::set<std::int32_t> ids;
  for (const char* name : {"config.json", "generation_config.json"}) {
    const Path path = folder / name;
    if (!std::filesystem::exists(path)) continue;
    const nlohmann::json json = parse_json(read_text(path), path.string());
    const auto found = json.is_object() ? json.find("eos_token_id") : json.end();
    if (!json.is_object() || found == json.end() || found->is_null()) continue;
    for (const nlohmann::json& id : found->is_array() ? *found : nlohmann::json::array({*found})) {
      if (!id.is_number_unsigned() || id.get<std::uint64_t>() > std::numeric_limits<std::int32_t>::max()) {
        throw Error("eos_token_id is no token id, and no list of them", path.string());
      }
      ids.insert(id.get<std::int32_t>());
    }
  }
  return {ids.begin(), ids.end()};
}

}  // namespace spipe::io
