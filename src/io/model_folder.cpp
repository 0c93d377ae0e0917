// Loading a Hugging Face folder. Nothing is skipped silently: every parameter of the model must be in the files, every tensor
// of the files must be a parameter, the other name of a tied one, or a buffer that models/families knows.
#include <algorithm>
#include <cstring>
#include <set>

#include "json_guard.h"
#include "spipe/base/error.h"
#include "spipe/io/checkpoint.h"
#include "tensor_set.h"

namespace spipe::io {
namespace {

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr const char* kHeadName = "lm_head.weight";

bool is_plain_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

// weight_map: tensor name -> file name.
std::map<std::string, std::string> read_index(const Path& path) {
  const nlohmann::json index = parse_json(read_text(path), path.string());
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (!index.is_object() || map == index.end() || !map->is_object()) throw Error("no 'weight_map' object", path.string());
  std::map<std::string, std::string> result;
  for (const auto& [tensor, file] : map->items()) {
    if (!file.is_string()) throw Error("weight_map of " + quote_name(tensor) + " is not a file name", path.string());
    const auto name = file.get<std::string>();
    if (!is_plain_name(name)) {
      throw Error("weight_map of " + quote_name(tensor) + " names " + quote_name(name) + ", which is not a file of this folder",
                  path.string(), "shards must lie beside the index");
    }
    result.emplace(tensor, name);
  }
  if (result.empty()) throw Error("the weight_map is empty", path.string());
  return result;
}

// All files of the folder, each tensor as (file, name in file).
struct ModelFiles {
  TensorSet files;
  std::vector<TensorSource> tensors;
};

void add_file(ModelFiles& model, const Path& path) {
  const SafetensorsFile& file = model.files.open(path);
  for (const TensorInfo& tensor : file.tensors()) model.tensors.push_back({&file, &tensor});
}

void open_shards(ModelFiles& model, const Path& folder) {
  const Path index_path = folder / kIndexFile;
  const std::map<std::string, std::string> index = read_index(index_path);
  std::set<std::string> shards;
  for (const auto& [tensor, file] : index) shards.insert(file);
  std::vector<std::string> missing;
  for (const std::string& shard : shards) {
    if (!std::filesystem::exists(folder / shard)) missing.push_back(shard);
  }
  if (!missing.empty()) {
    throw Error(
        std::to_string(missing.size()) + " of " + std::to_string(shards.size()) + " shards are missing: " + name_list(missing),
        index_path.string(), "download them again");
  }
  for (const std::string& shard : shards) add_file(model, folder / shard);

  std::set<std::string> present;
  for (const TensorSource& source : model.tensors) {
    const std::string& name = source.tensor->name;
    const auto entry = index.find(name);
    if (entry == index.end()) throw Error("tensor " + quote_name(name) + " is not in the index", source.where());
    if (source.file->path().filename() != entry->second) {
      throw Error("tensor " + quote_name(name) + " lies here, but the index puts it into " + quote_name(entry->second),
                  source.where(), "index and shards belong to different downloads");
    }
    present.insert(name);
  }
  std::vector<std::string> absent;
  for (const auto& [tensor, file] : index) {
    if (!present.contains(tensor)) absent.push_back(tensor);
  }
  if (!absent.empty()) {
    throw Error("tensors of the index that are not in their shards: " + name_list(absent), index_path.string(),
                "index and shards belong to different downloads");
  }
}

ModelFiles open_folder(const Path& folder) {
  ModelFiles model;
  const bool single = std::filesystem::exists(folder / kSingleFile);
  const bool index = std::filesystem::exists(folder / kIndexFile);
  if (single && index) {
    throw Error(std::string("has both ") + kSingleFile + " and " + kIndexFile + ", and they may differ", folder.string(),
                "remove the one that is out of date");
  }
  if (!single && !index) {
    throw Error(std::string("no ") + kSingleFile + " and no " + kIndexFile, folder.string(),
                "only the safetensors format is read; convert other weights first");
  }
  if (single)
    add_file(model, folder / kSingleFile);
  else
    open_shards(model, folder);
  return model;
}

// The head of a tied model may be stored as well (some exporters do); then it must be the embedding.
void check_tied_head(const TensorSet& set, const model::ModelShape& shape, const store::Store& store) {
  if (shape.tied_unit < 0 || set.find(kHeadName) == nullptr) return;
  const model::Parameter& table = shape.store_units[static_cast<std::size_t>(shape.tied_unit)].parameters.front();
  const TensorSource& head = set.require(kHeadName, table.shape);
  const TensorSource& embedding = set.require(table.name, table.shape);
  if (!store.has(shape.tied_unit)) return;  // a host that has it compares the values
  std::vector<float> a(table.elements()), b(table.elements());
  head.file->read_f32(*head.tensor, a.data());
  embedding.file->read_f32(*embedding.tensor, b.data());
  // As bits: a NaN equals itself.
  if (std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) != 0) {
    throw Error("config.json says tie_word_embeddings, but " + quote_name(head.tensor->name) + " differs from " +
                    quote_name(embedding.tensor->name),
                head.where(), "set \"tie_word_embeddings\": false in config.json, or remove the head from the file");
  }
}

void check_complete(const TensorSet& set, const model::ModelShape& shape, const Path& folder) {
  std::vector<std::string> missing;
  std::set<std::string> known;
  for (const model::StoreUnit& unit : shape.store_units) {
    for (const model::Parameter& parameter : unit.parameters) {
      known.insert(parameter.name);
      if (set.find(parameter.name) == nullptr) missing.push_back(parameter.name);
    }
  }
  if (missing.size() == 1 && missing[0] == kHeadName) {
    throw Error("tensor 'lm_head.weight' is missing and config.json does not tie it to the embedding", folder.string(),
                "if it is tied, set \"tie_word_embeddings\": true in config.json");
  }
  if (!missing.empty()) {
    throw Error(std::to_string(missing.size()) + " tensors of the model are missing: " + name_list(missing), folder.string(),
                "config.json and the weights belong to different models");
  }
  std::vector<std::string> stray;
  for (const auto& [name, source] : set.sources()) {
    const bool tied_head = shape.tied_unit >= 0 && name == kHeadName;
    if (!known.contains(name) && !tied_head) stray.push_back(source.tensor->name);
  }
  if (!stray.empty()) {
    throw Error(std::to_string(stray.size()) + " tensors that the model of config.json does not have: " + name_list(stray),
                folder.string(), "config.json must announce them (e.g. attention_bias), or they must be removed");
  }
}

}  // namespace

void load_model(const Path& folder, const model::ModelShape& shape, store::Store& store) {
  const ModelFiles model = open_folder(folder);
  TensorSet set;  // by the model's own names
  for (const TensorSource& source : model.tensors) {
    const std::string name = model::canonical_tensor_name(shape.architecture, source.tensor->name);
    if (!name.empty()) set.add(name, source);
  }
  check_complete(set, shape, folder);
  check_tied_head(set, shape, store);
  set.check_shapes(shape);  // before the first value is written
  for_each_parameter(shape, store, [&](const ParameterPlace& place) { fill_master(place, *set.find(place.parameter->name)); });
}

}  // namespace spipe::io
