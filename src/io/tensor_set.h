// The tensors of one or several safetensors files under the names a model knows them by. Internal to io/.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "spipe/io/safetensors.h"
#include "spipe/model/shape.h"
#include "spipe/store/store.h"

namespace spipe::io {

// "'a', 'b' and 3 more": names for a one-line message.
[[nodiscard]] std::string name_list(const std::vector<std::string>& names);

struct TensorSource {
  const SafetensorsFile* file = nullptr;
  const TensorInfo* tensor = nullptr;
  [[nodiscard]] std::string where() const { return file->path().string(); }
  [[nodiscard]] std::span<const std::byte> data() const { return file->data(*tensor); }
};

class TensorSet {
 public:
  const SafetensorsFile& open(const Path& path);
  // Error when two tensors get the same name.
  void add(const std::string& name, TensorSource source);
  void add_all(const SafetensorsFile& file);
  [[nodiscard]] const TensorSource* find(const std::string& name) const;
  [[nodiscard]] const std::map<std::string, TensorSource>& sources() const { return sources_; }
  // The named tensor, which must have the given shape; Error otherwise.
  [[nodiscard]] const TensorSource& require(const std::string& name, const Shape& shape) const;
  // The same for every parameter of the model, under its name plus `suffix`.
  void check_shapes(const model::ModelShape& shape, const std::string& suffix = {}) const;

 private:
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, TensorSource> sources_;
};

// A parameter and its place in the store.
struct ParameterPlace {
  store::Store* store = nullptr;
  int unit = 0;
  const model::Parameter* parameter = nullptr;
  [[nodiscard]] std::byte* data(store::Plane plane) const;
  [[nodiscard]] std::uint64_t bytes(store::Plane plane) const;
};
// Calls f(ParameterPlace) for every parameter that the store holds, units ascending.
template <typename F>
void for_each_parameter(const model::ModelShape& shape, store::Store& store, const F& f) {
  for (int u = 0; u < shape.store_unit_count(); ++u) {
    if (!store.has(u)) continue;
    for (const model::Parameter& parameter : shape.store_units[static_cast<std::size_t>(u)].parameters) {
      f(ParameterPlace{&store, u, &parameter});
    }
  }
}
// Fills master and compute copy of a parameter from a tensor of its shape and any floating-point type. Error when finite values
// become infinite in the copy.
void fill_master(const ParameterPlace& place, const TensorSource& source);

}  // namespace spipe::io
