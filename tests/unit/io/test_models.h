// Tiny models for the file tests: the golden models' shapes with stores whose planes hold known values.
#pragma once

#include <cstring>
#include <string>

#include "spipe/model/families.h"
#include "spipe/store/store.h"
#include "src/io/checkpoint_files.h"

namespace spipe::test {

inline model::ModelShape tiny_shape(const std::string& golden_model, DType compute = DType::f32) {
  const model::Architecture architecture = model::architecture_from_hf("tests/golden/data/" + golden_model + "/config.json");
  return model::make_shape(architecture, {.micro = 1, .seq_len = 8, .head_chunk = 8}, compute);
}

// Files of a checkpoint hold so many bytes at most while this lives.
struct ShardLimit {
  explicit ShardLimit(std::uint64_t bytes) : before(io::checkpoint_hooks().shard_bytes) {
    io::checkpoint_hooks().shard_bytes = bytes;
  }
  ~ShardLimit() { io::checkpoint_hooks().shard_bytes = before; }
  ShardLimit(const ShardLimit&) = delete;
  ShardLimit& operator=(const ShardLimit&) = delete;
  std::uint64_t before;
};

struct TinyStore {
  explicit TinyStore(const model::ModelShape& shape) : TinyStore(shape, store::store_format(shape.compute)) {}
  TinyStore(const model::ModelShape& shape, const store::StoreFormat& format)
      : store(shape, store::make_store_layout(shape, format)) {}
  store::Store store;
};

// Every parameter, moment and compute copy gets values that depend on (seed, unit, plane, element); padding stays zero.
inline void fill_store(const model::ModelShape& shape, store::Store& store, std::uint32_t seed) {
  for (int u = 0; u < shape.store_unit_count(); ++u) {
    for (const model::Parameter& p : shape.store_units[static_cast<std::size_t>(u)].parameters) {
      const auto put = [&](store::Plane plane, std::uint64_t i, float value) {
        if (!store.format().has(plane)) return;
        const Ptr slab = store.slab(u, plane);
        if (slab.dtype == DType::f32) static_cast<float*>(slab.data)[p.offset + i] = value;
        if (slab.dtype == DType::bf16) static_cast<std::uint16_t*>(slab.data)[p.offset + i] = bf16_from_f32(value);
      };
      for (std::uint64_t i = 0; i < p.elements(); ++i) {
        const std::uint32_t x =
            (static_cast<std::uint32_t>(i) * 2654435761U) ^ (seed * 40503U + static_cast<std::uint32_t>(u) * 977U);
        const float master = static_cast<float>(x % 20011U) / 10007.0F - 1.0F;
        (void)store.write_master(u, p.offset + i, std::span(&master, 1));
        put(store::Plane::m, i, static_cast<float>(x % 7919U) * 1e-4F);
        put(store::Plane::v, i, static_cast<float>(x % 6101U) * 1e-7F);
      }
    }
  }
}

// Whether all planes that a checkpoint holds have the same bytes, padding included.
inline bool same_state(const store::Store& a, const store::Store& b) {
  for (int u = 0; u < static_cast<int>(a.layout().elements.size()); ++u) {
    for (const store::Plane plane : {store::Plane::compute, store::Plane::master, store::Plane::m, store::Plane::v}) {
      const std::uint64_t bytes = a.layout().slab_bytes(u, plane);
      if (bytes == 0) continue;
      if (std::memcmp(a.slab(u, plane).data, b.slab(u, plane).data, bytes) != 0) return false;
    }
  }
  return true;
}

inline const model::Parameter& parameter_of(const model::ModelShape& shape, const std::string& name, int* unit = nullptr) {
  for (int u = 0; u < shape.store_unit_count(); ++u) {
    for (const model::Parameter& p : shape.store_units[static_cast<std::size_t>(u)].parameters) {
      if (p.name != name) continue;
      if (unit != nullptr) *unit = u;
      return p;
    }
  }
  throw std::runtime_error("no parameter " + name);
}

}  // namespace spipe::test
