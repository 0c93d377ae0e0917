#include <cstring>
#include <set>

#include "checkpoint_files.h"
#include "json_guard.h"
#include "spipe/base/error.h"
#include "spipe/io/checkpoint.h"
#include "tensor_set.h"

namespace spipe::io {
namespace {

TensorSet open_kind(const CheckpointInfo& checkpoint, const Manifest& manifest, const std::string& kind) {
  TensorSet set;
  for (const std::string& name : files_of_kind(manifest, kind)) set.add_all(set.open(checkpoint.path / name));
  return set;
}

// Both directions: nothing of the model is missing, nothing in the files is of another model.
void check_names(const TensorSet& set, const std::set<std::string>& wanted, const std::string& where) {
  std::vector<std::string> missing, stray;
  for (const std::string& name : wanted) {
    if (set.find(name) == nullptr) missing.push_back(name);
  }
  for (const auto& [name, source] : set.sources()) {
    if (!wanted.contains(name)) stray.push_back(name);
  }
  const char* hint = "the checkpoint belongs to another model";
  if (!missing.empty()) throw Error("tensors of the model are missing: " + name_list(missing), where, hint);
  if (!stray.empty()) throw Error("tensors that the model does not have: " + name_list(stray), where, hint);
}

void fill(const TensorSource& source, std::byte* to, DType dtype, std::uint64_t bytes) {
  if (source.tensor->dtype == dtype) {
    std::memcpy(to, source.data().data(), bytes);
    return;
  }
  if (dtype != DType::f32) {
    throw Error("tensor " + quote_name(source.tensor->name) + " is " + std::string(dtype_name(source.tensor->dtype)) +
                    ", expected " + std::string(dtype_name(dtype)),
                source.where());
  }
  source.read_f32(reinterpret_cast<float*>(to));
}

}  // namespace

std::string load_checkpoint(const CheckpointInfo& checkpoint, const model::ModelShape& shape, store::Store& store) {
  const std::string where = checkpoint.path.string();
  const Manifest manifest = read_manifest(checkpoint.path);
  const TensorSet weights = open_kind(checkpoint, manifest, "model");
  const TensorSet state = open_kind(checkpoint, manifest, "optimizer");

  // The checkpoint may be of another precision than the run (when the run permits that): its own masters decide.
  const bool own_masters = std::any_of(state.sources().begin(), state.sources().end(),
                                       [](const auto& entry) { return entry.first.ends_with(".master"); });
  std::set<std::string> names, state_names;
  for (const model::StoreUnit& unit : shape.store_units) {
    for (const model::Parameter& p : unit.parameters) {
      names.insert(p.name);
      if (own_masters) state_names.insert(p.name + ".master");
      state_names.insert({p.name + ".exp_avg", p.name + ".exp_avg_sq"});
    }
  }
  check_names(weights, names, where);
  check_names(state, state_names, where);
  weights.check_shapes(shape);
  for (const char* suffix : {".exp_avg", ".exp_avg_sq"}) state.check_shapes(shape, suffix);
  if (own_masters) state.check_shapes(shape, ".master");

  for_each_parameter(shape, store, [&](const ParameterPlace& place) {
    const std::string& name = place.parameter->name;
    const TensorSource& weight = *weights.find(name);
    const TensorSource& master = own_masters ? *state.find(name + ".master") : weight;
    master.read_f32(place.master());
    if (weight.tensor->dtype == store.format().compute && store.format().separate_master) {
      std::memcpy(place.data(store::Plane::compute), weight.data().data(), place.bytes(store::Plane::compute));
    } else {
      round_to_compute(place, where);
    }
    for (const auto& [plane, suffix] : {StatePlane{store::Plane::m, ".exp_avg"}, StatePlane{store::Plane::v, ".exp_avg_sq"}}) {
      fill(*state.find(name + suffix), place.data(plane), store.format().dtype(plane), place.bytes(plane));
    }
  });
  return read_text(checkpoint.path / kTrainerFile);
}

}  // namespace spipe::io
