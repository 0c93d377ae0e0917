#include "tensor_set.h"

#include <algorithm>

#include "json_guard.h"
#include "spipe/base/error.h"

namespace spipe::io {

std::string name_list(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 4;
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < kShown; ++i) text += (i > 0 ? ", " : "") + quote_name(names[i]);
  if (names.size() > kShown) text += " and " + std::to_string(names.size() - kShown) + " more";
  return text;
}

namespace {

std::string shape_text(const std::vector<std::uint64_t>& dims) {
  std::string text = "[";
  for (std::size_t i = 0; i < dims.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

bool same_shape(const std::vector<std::uint64_t>& dims, const Shape& shape) {
  if (dims.size() != static_cast<std::size_t>(shape.rank())) return false;
  for (int i = 0; i < shape.rank(); ++i) {
    if (dims[static_cast<std::size_t>(i)] != static_cast<std::uint64_t>(shape[i])) return false;
  }
  return true;
}

}  // namespace

const SafetensorsFile& TensorSet::open(const Path& path) {
  files_.push_back(std::make_unique<SafetensorsFile>(path));
  return *files_.back();
}

void TensorSet::add(const std::string& name, TensorSource source) {
  const auto [at, inserted] = sources_.emplace(name, source);
  if (!inserted) {
    throw Error("tensor " + quote_name(source.tensor->name) + " is there twice: also as " +
                    quote_name(at->second.tensor->name) + " in " + at->second.file->path().filename().string(),
                source.where());
  }
}

void TensorSet::add_all(const SafetensorsFile& file) {
  for (const TensorInfo& tensor : file.tensors()) add(tensor.name, {&file, &tensor});
}

const TensorSource* TensorSet::find(const std::string& name) const {
  const auto at = sources_.find(name);
  return at == sources_.end() ? nullptr : &at->second;
}

const TensorSource& TensorSet::require(const std::string& name, const Shape& shape) const {
  const TensorSource* source = find(name);
  SPIPE_CHECK(source != nullptr, "absent tensors are reported before");
  if (!same_shape(source->tensor->shape, shape)) {
    throw Error("tensor " + quote_name(source->tensor->name) + " has shape " + shape_text(source->tensor->shape) +
                    ", the model needs " + shape.text(),
                source->where(), "config.json and the weights belong to different models");
  }
  return *source;
}

void TensorSet::check_shapes(const model::ModelShape& shape, const std::string& suffix) const {
  for (const model::StoreUnit& unit : shape.store_units) {
    for (const model::Parameter& parameter : unit.parameters) (void)require(parameter.name + suffix, parameter.shape);
  }
}

std::byte* ParameterPlace::data(store::Plane plane) const {
  const Ptr slab = store->slab(unit, plane);
  return static_cast<std::byte*>(slab.data) + parameter->offset * dtype_size(slab.dtype);
}

std::uint64_t ParameterPlace::bytes(store::Plane plane) const {
  return parameter->elements() * dtype_size(store->format().dtype(plane));
}

void fill_master(const ParameterPlace& place, const TensorSource& source) {
  constexpr std::uint64_t kAtATime = 1 << 18;
  const std::uint64_t count = place.parameter->elements();
  std::vector<float> values(std::min(count, kAtATime));
  std::uint64_t overflows = 0;
  for (std::uint64_t first = 0; first < count; first += kAtATime) {
    const std::span<float> part = std::span(values).first(std::min(kAtATime, count - first));
    source.file->read_f32(*source.tensor, first, part.size(), part.data());
    overflows += place.store->write_master(place.unit, place.parameter->offset + first, part);
  }
  if (overflows > 0) {
    throw Error("tensor " + quote_name(place.parameter->name) + ": " + std::to_string(overflows) +
                    " values are too large for " + std::string(dtype_name(place.store->format().compute)),
                source.where(), "train with precision fp32");
  }
}

}  // namespace spipe::io
