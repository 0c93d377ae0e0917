// A store that is spread over hosts, all of them in this process: one store and one checkpoint writer each.
#pragma once

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "spipe/io/checkpoint.h"
#include "spipe/model/families.h"
#include "spipe/store/store.h"

namespace spipe::test {

inline constexpr store::Plane kSavedPlanes[] = {store::Plane::compute, store::Plane::master, store::Plane::m, store::Plane::v};

// Units with tensors go to the hosts in turn.
inline std::vector<int> alternating_hosts(const model::ModelShape& shape, int hosts) {
  std::vector<int> host_of_unit;
  int next = 0;
  for (const model::StoreUnit& unit : shape.store_units) host_of_unit.push_back(unit.elements == 0 ? -1 : next++ % hosts);
  return host_of_unit;
}

// Calls f(a's bytes, b's bytes, count) for every saved plane of a unit.
template <typename F>
void for_each_slab(const store::Store& a, const store::Store& b, int unit, const F& f) {
  for (const store::Plane plane : kSavedPlanes) {
    const std::uint64_t bytes = a.layout().slab_bytes(unit, plane);
    if (bytes > 0) f(a.slab(unit, plane).data, b.slab(unit, plane).data, bytes);
  }
}

struct Parts {
  model::ModelShape shape;
  std::vector<int> hosts;  // of every unit
  std::vector<std::unique_ptr<store::Store>> stores;

  // Stores of zeros.
  Parts(const model::ModelShape& of, std::vector<int> host_of_unit, int count) : shape(of), hosts(std::move(host_of_unit)) {
    for (int host = 0; host < count; ++host) {
      std::vector<bool> here;
      for (const int of_unit : hosts) here.push_back(of_unit == host);
      const store::StoreFormat format = store::store_format(shape.compute);
      stores.push_back(std::make_unique<store::Store>(shape, store::make_store_layout(shape, format, here)));
    }
  }
  Parts(const model::ModelShape& of, int count) : Parts(of, alternating_hosts(of, count), count) {}
  // With the values of a whole store.
  Parts(const store::Store& whole, const model::ModelShape& of, std::vector<int> host_of_unit, int count)
      : Parts(of, std::move(host_of_unit), count) {
    for (int u = 0; u < shape.store_unit_count(); ++u) {
      if (host(u) < 0) continue;
      for_each_slab(whole, store_of(host(u)), u,
                    [](const void* from, void* to, std::uint64_t bytes) { std::memcpy(to, from, bytes); });
    }
  }
  Parts(const store::Store& whole, const model::ModelShape& of, int count)
      : Parts(whole, of, alternating_hosts(of, count), count) {}

  [[nodiscard]] int count() const { return static_cast<int>(stores.size()); }
  [[nodiscard]] int host(int unit) const { return hosts[static_cast<std::size_t>(unit)]; }
  [[nodiscard]] store::Store& store_of(int host) const { return *stores[static_cast<std::size_t>(host)]; }

  // Whether all stores together hold the bytes of a whole one.
  [[nodiscard]] bool same_as(const store::Store& whole) const {
    bool same = true;
    for (int u = 0; u < shape.store_unit_count(); ++u) {
      if (host(u) < 0) continue;
      for_each_slab(whole, store_of(host(u)), u,
                    [&](const void* a, const void* b, std::uint64_t bytes) { same = same && std::memcmp(a, b, bytes) == 0; });
    }
    return same;
  }

  [[nodiscard]] std::unique_ptr<io::CheckpointWriter> writer(const std::filesystem::path& run, std::uint64_t step,
                                                             int of_host) const {
    return std::make_unique<io::CheckpointWriter>(run, step, shape, store_of(of_host), "{}\n",
                                                  model::hf_config_text(shape.architecture, "float32"),
                                                  io::CheckpointPart{hosts, of_host, of_host == 0});
  }
  // The units of a host in [first, last).
  void write_units(io::CheckpointWriter& writer, int of_host, int first = 0, int last = 1 << 30) const {
    for (int u = first; u < std::min(last, shape.store_unit_count()); ++u) {
      if (host(u) == of_host) writer.unit(u);
    }
  }
  // All hosts at once: unit after unit, each by its host, as a step does. With `reversed`, the leader hears the last host
  // first.
  io::CheckpointInfo save(const std::filesystem::path& run, std::uint64_t step, bool reversed = false) const {
    std::vector<std::unique_ptr<io::CheckpointWriter>> writers;
    for (int of_host = 0; of_host < count(); ++of_host) writers.push_back(writer(run, step, of_host));
    for (int u = 0; u < shape.store_unit_count(); ++u) {
      if (host(u) >= 0) writers[static_cast<std::size_t>(host(u))]->unit(u);
    }
    std::vector<std::string> texts;
    for (std::size_t other = 1; other < writers.size(); ++other) texts.push_back(writers[other]->part_manifest());
    if (reversed) std::reverse(texts.begin(), texts.end());
    return writers[0]->finish(texts);
  }
};

}  // namespace spipe::test
