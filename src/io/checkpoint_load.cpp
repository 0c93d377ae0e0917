#include <algorithm>
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

// Moments of another type are rounded to nearest: a change that the run permits.
void fill_moment(const TensorSource& source, std::byte* to, DType dtype, std::uint64_t count) {
  if (source.tensor->dtype == dtype) {
    std::memcpy(to, source.data().data(), count * dtype_size(dtype));
    return;
  }
  SPIPE_CHECK(dtype == DType::f32 || dtype == DType::bf16, "moments are fp32 or bf16");
  constexpr std::uint64_t kAtATime = 1 << 18;
  std::vector<float> values(std::min(count, kAtATime));
  for (std::uint64_t first = 0; first < count; first += kAtATime) {
    const std::uint64_t some = std::min(kAtATime, count - first);
    source.file->read_f32(*source.tensor, first, some, values.data());
    for (std::uint64_t i = 0; i < some; ++i) {
      if (dtype == DType::f32) {
        std::memcpy(to + (first + i) * sizeof(float), &values[i], sizeof(float));
      } else {
        const std::uint16_t rounded = bf16_from_f32(values[i]);
        std::memcpy(to + (first + i) * sizeof(rounded), &rounded, sizeof(rounded));
      }
    }
  }
}

}  // namespace

std::string load_checkpoint(const CheckpointInfo& checkpoint, const model::ModelShape& shape, store::Store& store) {
  const std::string where = checkpoint.path.string();
  const Manifest manifest = read_manifest(checkpoint.path);
  const TensorSet weights = open_kind(checkpoint, manifest, "model");
  const TensorSet state = open_kind(checkpoint, manifest, "optimizer");

  // The checkpoint may be of another precision than the run, or of another update rule (where the run permits that): its own
  // masters decide, and moments that the run's rule does not have are left out.
  const auto holds = [&state](std::string_view suffix) {
    return std::ranges::any_of(state.sources(), [&](const auto& entry) { return entry.first.ends_with(suffix); });
  };
  const bool own_masters = holds(".master"), own_second_moments = holds(".exp_avg_sq");
  if (store.format().second_moment && !own_second_moments) {
    throw Error("the checkpoint has no second moments (NAME.exp_avg_sq), which this run's update rule needs", where,
                "go on with its own optimizer.type, or begin a new run from its weights with model.hf");
  }
  std::set<std::string> names, state_names;
  for (const model::StoreUnit& unit : shape.store_units) {
    for (const model::Parameter& p : unit.parameters) {
      names.insert(p.name);
      if (own_masters) state_names.insert(p.name + ".master");
      state_names.insert(p.name + ".exp_avg");
      if (own_second_moments) state_names.insert(p.name + ".exp_avg_sq");
    }
  }
  check_names(weights, names, where);
  check_names(state, state_names, where);
  weights.check_shapes(shape);
  state.check_shapes(shape, ".exp_avg");
  if (own_second_moments) state.check_shapes(shape, ".exp_avg_sq");
  if (own_masters) state.check_shapes(shape, ".master");

  for_each_parameter(shape, store, [&](const ParameterPlace& place) {
    const std::string& name = place.parameter->name;
    fill_master(place, own_masters ? *state.find(name + ".master") : *weights.find(name));
    for (const StatePlane& plane : state_planes(store.format())) {
      if (plane.plane == store::Plane::master) continue;
      fill_moment(*state.find(name + plane.suffix), place.data(plane.plane), plane.dtype, place.parameter->elements());
    }
  });
  return read_text(checkpoint.path / kTrainerFile);
}

}  // namespace spipe::io
