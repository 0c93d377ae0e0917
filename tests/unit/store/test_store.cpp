#include <bit>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "spipe/base/error.h"
#include "spipe/store/store.h"

namespace spipe::store {
namespace {

using Catch::Contains;

constexpr Plane kPlanes[] = {Plane::compute, Plane::master, Plane::m, Plane::v, Plane::grad};

// Units of the given slab lengths (elements); only those matter to a store.
model::ModelShape shape_of(const std::vector<std::uint64_t>& elements) {
  model::ModelShape shape;
  for (const std::uint64_t count : elements) {
    model::StoreUnit unit;
    unit.name = "unit " + std::to_string(shape.store_units.size());
    unit.elements = count;
    shape.store_units.push_back(unit);
  }
  return shape;
}

Store make_store(const model::ModelShape& shape, DType compute) {
  return Store(shape, make_store_layout(shape, store_format(compute)));
}

}  // namespace

TEST_CASE("bytes per parameter are those of docs/memory.md") {
  struct Row {
    DType compute;
    bool split, second;
    DType moment;
    std::uint64_t bytes, state;
  };
  const DType f32 = DType::f32, bf16 = DType::bf16, f16 = DType::f16;
  for (const Row& row :
       {Row{f32, false, true, f32, 16, 12}, Row{f32, false, true, bf16, 12, 8}, Row{f32, false, false, f32, 12, 8},
        Row{f32, false, false, bf16, 10, 6}, Row{bf16, false, true, f32, 16, 12}, Row{bf16, false, true, bf16, 12, 8},
        Row{bf16, false, false, f32, 12, 8}, Row{bf16, false, false, bf16, 10, 6}, Row{bf16, true, true, f32, 14, 12},
        Row{bf16, true, true, bf16, 10, 8}, Row{bf16, true, false, f32, 10, 8}, Row{bf16, true, false, bf16, 8, 6},
        Row{f16, false, true, f32, 16, 12}, Row{f16, false, true, bf16, 12, 8}, Row{f16, false, false, f32, 12, 8},
        Row{f16, false, false, bf16, 10, 6}}) {
    StoreFormat format = store_format(row.compute);
    format.split_master = row.split;
    format.separate_master = format.separate_master && !row.split;
    format.second_moment = row.second;
    format.moment = row.moment;
    INFO(dtype_name(row.compute) << (row.split ? " split" : "") << (row.second ? " two " : " one ") << dtype_name(row.moment));
    CHECK(format.bytes_per_parameter() == row.bytes);
    CHECK(format.state_bytes_per_parameter() == row.state);
    const model::ModelShape shape = shape_of({4096});
    CHECK(unit_state_bytes(shape.store_units[0], format) == 4096 * row.bytes);
    CHECK(unit_shadow_bytes(shape.store_units[0], format) == 4096 * (row.bytes - dtype_size(format.grad)));
    CHECK(make_store_layout(shape, format).bytes == 4096 * row.bytes);
  }
}

TEST_CASE("a master is read and written in every form, to the bit") {
  std::vector<float> values = {0.0F,        -0.0F,  1.0F,    -1.00390625F, 3.14159265F,
                               -2.7182818F, 1e-40F, -1e-45F, 65504.0F,     0x1.fep127F};
  for (std::uint32_t i = 0; i < 1000; ++i) {
    values.push_back(std::bit_cast<float>((i * 2654435761U) & 0xbf7fffffU));  // any sign and magnitude below 2^127
  }
  const model::ModelShape shape = shape_of({2048});
  StoreFormat split = store_format(DType::bf16);
  split.split_master = true;
  split.separate_master = false;
  for (const StoreFormat& format : {store_format(DType::f32), store_format(DType::bf16), split}) {
    Store store(shape, make_store_layout(shape, format));
    CHECK(store.write_master(0, 100, values) == 0);
    std::vector<float> read(values.size());
    store.read_master(0, 100, read);
    CHECK(std::memcmp(read.data(), values.data(), values.size() * sizeof(float)) == 0);
    if (format.compute == DType::f32) continue;
    const auto* copy = static_cast<const std::uint16_t*>(store.slab(0, Plane::compute).data) + 100;
    for (std::size_t i = 0; i < values.size(); ++i) REQUIRE(copy[i] == bf16_from_f32_half_up(values[i]));
    const float large[] = {std::numeric_limits<float>::max(), std::numeric_limits<float>::infinity()};
    CHECK(store.write_master(0, 0, large) == 1);
    float back[2];
    store.read_master(0, 0, back);
    CHECK((back[0] == large[0] && back[1] == large[1]));
  }
  Store halves(shape, make_store_layout(shape, split));
  CHECK_THROWS_AS(halves.master(0), InternalError);
}

TEST_CASE("fp32 has no master plane, halves have an fp32 master and half gradients") {
  const StoreFormat full = store_format(DType::f32);
  CHECK_FALSE(full.has(Plane::master));
  CHECK(full.dtype(Plane::grad) == DType::f32);
  const StoreFormat half = store_format(DType::bf16);
  CHECK(half.has(Plane::master));
  CHECK(half.dtype(Plane::compute) == DType::bf16);
  CHECK(half.dtype(Plane::master) == DType::f32);
  CHECK(half.dtype(Plane::m) == DType::f32);
  CHECK(half.dtype(Plane::grad) == DType::bf16);
  CHECK_THROWS_AS(store_format(DType::i32), InternalError);
}

TEST_CASE("plane names are distinct") {
  std::set<std::string> names;
  for (const Plane plane : kPlanes) {
    names.insert(plane_name(plane));
  }
  CHECK(names.size() == kPlaneCount);
}

TEST_CASE("slabs are aligned, ascending, disjoint and inside the region") {
  const model::ModelShape shape = shape_of({128, 640, 0, 12800, 384});
  for (const DType compute : {DType::f32, DType::bf16}) {
    const StoreLayout layout = make_store_layout(shape, store_format(compute));
    std::uint64_t end = 0;
    for (int unit = 0; unit < shape.store_unit_count(); ++unit) {
      for (const Plane plane : kPlanes) {
        if (!layout.format.has(plane)) {
          CHECK(layout.slab_bytes(unit, plane) == 0);
          CHECK_THROWS_AS(layout.offset(unit, plane), InternalError);
          continue;
        }
        CHECK(layout.offset(unit, plane) >= end);
        CHECK(layout.offset(unit, plane) % 256 == 0);
        CHECK(layout.slab_bytes(unit, plane) == shape.store_units[unit].elements * dtype_size(layout.format.dtype(plane)));
        end = layout.offset(unit, plane) + layout.slab_bytes(unit, plane);
      }
    }
    CHECK(layout.bytes >= end);
    CHECK(layout.bytes % 4096 == 0);
    CHECK(layout.bytes < end + 4096);
  }
}

TEST_CASE("slabs whose length is no multiple of the alignment do not overlap") {
  const model::ModelShape shape = shape_of({1, 3});
  const StoreLayout layout = make_store_layout(shape, store_format(DType::bf16));
  CHECK(layout.offset(0, Plane::compute) == 0);
  CHECK(layout.offset(0, Plane::master) == 256);
  CHECK(layout.offset(1, Plane::compute) == 256 * kPlaneCount);
}

TEST_CASE("a host's layout has slabs for the units that are there, and lengths of all") {
  const model::ModelShape shape = shape_of({128, 641, 0, 12801, 0});
  for (const DType compute : {DType::f32, DType::bf16}) {
    const StoreFormat format = store_format(compute);
    const StoreLayout whole = make_store_layout(shape, format);
    const StoreLayout part = make_store_layout(shape, format, {false, true, false, false, true});
    CHECK(part.elements == whole.elements);
    CHECK(make_store_layout(shape, format, std::vector<bool>(5, true)).offsets == whole.offsets);
    // Units without elements never lack anything.
    const std::vector<bool> expected{false, true, true, false, true};
    for (int unit = 0; unit < shape.store_unit_count(); ++unit) {
      CHECK(whole.has(unit));
      CHECK(part.has(unit) == expected[static_cast<std::size_t>(unit)]);
      for (const Plane plane : kPlanes) CHECK(part.slab_bytes(unit, plane) == whole.slab_bytes(unit, plane));
    }
    CHECK(part.offset(1, Plane::compute) == 0);
    CHECK_THROWS_WITH(part.offset(3, Plane::m), Contains("store unit 3 is not on this host"));
    CHECK_THROWS_AS(part.has(5), InternalError);
    CHECK_THROWS_AS(make_store_layout(shape, format, {true}), InternalError);
  }
}

TEST_CASE("a layout takes the bytes of its units, rounded up to a page") {
  const model::ModelShape shape = shape_of({1, 641, 0, 12801, 99});
  for (const DType compute : {DType::f32, DType::bf16}) {
    const StoreFormat format = store_format(compute);
    CHECK(unit_state_bytes(shape.store_units[0], format) == 256 * (format.separate_master ? 5 : 4));
    CHECK(unit_state_bytes(shape.store_units[2], format) == 0);
    for (unsigned set = 0; set < 32; ++set) {
      std::vector<bool> here;
      std::uint64_t bytes = 0;
      for (unsigned unit = 0; unit < 5; ++unit) {
        here.push_back((set >> unit & 1U) != 0);
        if (here.back()) bytes += unit_state_bytes(shape.store_units[unit], format);
      }
      CHECK(make_store_layout(shape, format, here).bytes == (bytes + 4095) / 4096 * 4096);
    }
  }
  CHECK_THROWS_AS(unit_state_bytes(shape_of({std::uint64_t{1} << 62}).store_units[0], store_format(DType::f32)), Error);
}

TEST_CASE("a store of some units has their slabs, and the versions of all") {
  const model::ModelShape shape = shape_of({128, 640, 0});
  for (const DType compute : {DType::f32, DType::bf16}) {
    Store store(shape, make_store_layout(shape, store_format(compute), {false, true, false}));
    CHECK_FALSE(store.has(0));
    CHECK(store.has(1));
    CHECK(store.has(2));
    CHECK_THROWS_AS(store.has(3), InternalError);
    store.master(1)[639] = 1.5F;
    CHECK(store.master(1)[639] == 1.5F);
    CHECK_THROWS_WITH(store.slab(0, Plane::grad), Contains("store unit 0 is not on this host"));
    CHECK_THROWS_WITH(store.master(0), Contains("store unit 0 is not on this host"));
    store.set_version(0, 3);
    CHECK(store.version(0) == 3);
  }
  // A host without units has a store without memory.
  const Store none(shape, make_store_layout(shape, store_format(DType::f32), {false, false, false}));
  CHECK(none.layout().bytes == 0);
  CHECK_FALSE(none.has(1));
}

TEST_CASE("a layout too large for 64 bits is refused") {
  CHECK_THROWS_AS(make_store_layout(shape_of({std::uint64_t{1} << 62}), store_format(DType::f32)), Error);
  CHECK_THROWS_AS(make_store_layout(shape_of({std::uint64_t{1} << 60, std::uint64_t{1} << 60}), store_format(DType::f32)),
                  Error);
  CHECK_THROWS_AS(make_store_layout(shape_of({(std::uint64_t{1} << 60) - 1}), store_format(DType::f32)), Error);
}

TEST_CASE("a store begins with zeros and keeps every byte apart") {
  const model::ModelShape shape = shape_of({256, 1280});
  Store store = make_store(shape, DType::bf16);
  for (int unit = 0; unit < 2; ++unit) {
    for (const Plane plane : kPlanes) {
      const auto* bytes = static_cast<const unsigned char*>(store.slab(unit, plane).data);
      const std::uint64_t count = store.layout().slab_bytes(unit, plane);
      CHECK(std::vector<unsigned char>(bytes, bytes + count) == std::vector<unsigned char>(count, 0));
      std::memset(store.slab(unit, plane).data, 16 * unit + static_cast<int>(plane) + 1, count);
    }
  }
  for (int unit = 0; unit < 2; ++unit) {
    for (const Plane plane : kPlanes) {
      const auto* bytes = static_cast<const unsigned char*>(store.slab(unit, plane).data);
      const std::uint64_t count = store.layout().slab_bytes(unit, plane);
      const auto mark = static_cast<unsigned char>(16 * unit + static_cast<int>(plane) + 1);
      CHECK(std::vector<unsigned char>(bytes, bytes + count) == std::vector<unsigned char>(count, mark));
    }
  }
}

TEST_CASE("the master is the compute plane in fp32 and a plane of its own otherwise") {
  const model::ModelShape shape = shape_of({256});
  const Store full = make_store(shape, DType::f32);
  CHECK(full.master(0) == full.slab(0, Plane::compute).data);
  CHECK_THROWS_AS(full.slab(0, Plane::master), InternalError);
  const Store half = make_store(shape, DType::bf16);
  CHECK(half.master(0) == half.slab(0, Plane::master).data);
  CHECK(half.slab(0, Plane::compute).dtype == DType::bf16);
}

TEST_CASE("versions start at zero and belong to one unit each") {
  const model::ModelShape shape = shape_of({128, 128});
  Store store = make_store(shape, DType::f32);
  store.set_version(1, 7);
  CHECK(store.version(0) == 0);
  CHECK(store.version(1) == 7);
  CHECK_THROWS_AS(store.version(2), InternalError);
  CHECK_THROWS_AS(store.set_version(-1, 1), InternalError);
}

TEST_CASE("a store of empty units needs no memory") {
  const model::ModelShape shape = shape_of({0, 0});
  const Store store = make_store(shape, DType::f32);
  CHECK(store.layout().bytes == 0);
  CHECK(store.layout().slab_bytes(1, Plane::grad) == 0);
}

TEST_CASE("the store is all present after construction and leaves no name behind") {
  const model::ModelShape shape = shape_of({std::uint64_t{1} << 20});
  const Store store = make_store(shape, DType::f32);
  // The mapping is the line of smaps that names the memfd; every page of it must be resident.
  std::ifstream smaps("/proc/self/smaps");
  bool inside = false;
  std::uint64_t resident_kib = 0;
  for (std::string line; std::getline(smaps, line);) {
    if (line.find('-') != std::string::npos && line.find("spipe-store") != std::string::npos) {
      CHECK_THAT(line, Contains("memfd:"));
      inside = true;
    } else if (inside && line.starts_with("Rss:")) {
      resident_kib += std::stoull(line.substr(4));
      inside = false;
    }
  }
  CHECK(resident_kib * 1024 == store.layout().bytes);
}

TEST_CASE("a store larger than the host is refused in one line that names the bytes") {
  const model::ModelShape shape = shape_of({std::uint64_t{1} << 48});
  const StoreLayout layout = make_store_layout(shape, store_format(DType::f32));
  try {
    const Store store(shape, layout);
    FAIL("a store of 4 PiB was made");
  } catch (const Error& error) {
    CHECK_THAT(error.what(), Contains(std::to_string(layout.bytes) + " bytes"));
    CHECK(std::string(error.what()).find('\n') == std::string::npos);
    CHECK_FALSE(error.hint().empty());
    CHECK(error.code() == ExitCode::kUser);
  }
}

TEST_CASE("stores in one place are one store, and leave it when they end") {
  const model::ModelShape shape = shape_of({128, 300});
  const StoreLayout layout = make_store_layout(shape, store_format(DType::bf16));
  std::vector<std::uint64_t> versions(2);
  CHECK(StorePlace::version_bytes(layout) == 16);
  auto* const base = static_cast<std::byte*>(std::aligned_alloc(4096, layout.bytes));
  std::memset(base, 0, layout.bytes);
  const StorePlace place{.base = base, .versions = versions.data()};
  {
    Store writer(shape, layout, place);
    const Store reader(shape, layout, place);
    writer.master(1)[299] = 2.5F;
    writer.set_version(1, 4);
    CHECK(reader.master(1)[299] == 2.5F);
    CHECK(reader.version(1) == 4);
    CHECK(reader.version(0) == 0);
    CHECK(reader.slab(1, Plane::grad).data == base + layout.offset(1, Plane::grad));
  }
  CHECK(versions[1] == 8);                // twice the version, and the slot
  base[layout.bytes - 1] = std::byte{1};  // still mapped
  CHECK_THROWS_AS(Store(shape, layout, {.base = base + 256, .versions = versions.data()}), InternalError);
  CHECK_THROWS_AS(Store(shape, layout, {}), InternalError);
  CHECK_THROWS_AS(Store(shape_of({128}), layout, place), InternalError);
  std::free(base);
}

TEST_CASE("a layout of another model is refused") {
  const StoreLayout layout = make_store_layout(shape_of({128}), store_format(DType::f32));
  CHECK_THROWS_AS(Store(shape_of({256}), layout), InternalError);
  CHECK_THROWS_AS(Store(shape_of({128, 128}), layout), InternalError);
}

}  // namespace spipe::store
