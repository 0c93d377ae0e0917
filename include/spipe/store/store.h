// The store: the host-memory home of every store unit's parameters, gradients and optimizer state (DESIGN section 6).
// One slab per unit and plane; all planes of a unit use the same element offsets (model::Parameter::offset).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "spipe/model/shape.h"

namespace spipe::store {

enum class Plane : std::uint8_t { compute, master, m, v, grad };
inline constexpr int kPlaneCount = 5;
[[nodiscard]] std::string plane_name(Plane plane);

// Which planes exist and their types. fp32: compute = the parameters themselves, no master plane. bf16 or fp16: compute copy +
// master fp32 (separate_master); or, for bf16, the master split in the compute copy and a master plane of 16 low bits (u16).
struct StoreFormat {
  DType compute = DType::f32;
  bool separate_master = false;
  bool split_master = false;
  bool second_moment = true;  // v
  DType moment = DType::f32;
  DType grad = DType::f32;
  [[nodiscard]] bool has(Plane plane) const {
    if (plane == Plane::master) return separate_master || split_master;
    return plane != Plane::v || second_moment;
  }
  [[nodiscard]] DType dtype(Plane plane) const;
  [[nodiscard]] std::uint64_t state_bytes_per_parameter() const;  // fp32 master (in whatever form), m, v
  [[nodiscard]] std::uint64_t bytes_per_parameter() const;        // of all planes; docs/memory.md
};
[[nodiscard]] StoreFormat store_format(DType compute);  // the standard format of a precision

// Byte offsets of every (unit, plane) slab in one contiguous region; pure, so that the planner can ask before anything exists.
// A unit may have a second slot: its planes but the gradient twice, for updates that go out of place.
struct StoreLayout {
  StoreFormat format;
  std::uint64_t bytes = 0;  // whole region, multiple of the page size
  [[nodiscard]] std::uint64_t offset(int unit, Plane plane, int slot = 0) const;
  [[nodiscard]] std::uint64_t slab_bytes(int unit, Plane plane) const;  // also of units that are elsewhere
  [[nodiscard]] bool has(int unit) const;
  [[nodiscard]] int slots(int unit) const;    // 2 where the unit is here and has a second slot
  std::vector<std::uint64_t> offsets;         // [unit * kPlaneCount + plane], ~0 where absent
  std::vector<std::uint64_t> shadow_offsets;  // of second slots, likewise; empty: no unit has one
  std::vector<std::uint64_t> elements;        // per unit
};
[[nodiscard]] StoreLayout make_store_layout(const model::ModelShape& shape, const StoreFormat& format);
// Of a host that holds some of the units only: the others have no slabs, and their lengths are known all the same.
[[nodiscard]] StoreLayout make_store_layout(const model::ModelShape& shape, const StoreFormat& format,
                                            const std::vector<bool>& here);
// Where second_slots[unit], the unit has a second slot (if it is here).
[[nodiscard]] StoreLayout make_store_layout(const model::ModelShape& shape, const StoreFormat& format,
                                            const std::vector<bool>& here, const std::vector<bool>& second_slots);
// Of a store that is only read: fp32 parameters, no gradients, no optimizer state.
[[nodiscard]] StoreLayout make_weights_layout(const model::ModelShape& shape);
// Bytes of all planes of a unit, each a multiple of 256. For any units: layout.bytes is the sum of this over the units that are
// here, rounded up to 4096.
[[nodiscard]] std::uint64_t unit_state_bytes(const model::StoreUnit& unit, const StoreFormat& format);
// What a second slot of the unit takes beside that.
[[nodiscard]] std::uint64_t unit_shadow_bytes(const model::StoreUnit& unit, const StoreFormat& format);

// Memory that somebody else owns and that outlives the store: a host's region, shared by its ranks. Both start as zeros.
struct StorePlace {
  std::byte* base = nullptr;          // StoreLayout::bytes, page aligned
  std::uint64_t* versions = nullptr;  // one per store unit, 8-byte aligned
  [[nodiscard]] static std::uint64_t version_bytes(const StoreLayout& layout) {
    return layout.elements.size() * sizeof(std::uint64_t);
  }
};

// By itself: one memfd mapped shared (no name in /dev/shm), zero-filled and touched at creation. Throws Error when memory
// cannot be had. In a StorePlace: a view of it, one per rank, all of them the same store.
class Store {
 public:
  Store(const model::ModelShape& shape, StoreLayout layout);
  Store(const model::ModelShape& shape, StoreLayout layout, StorePlace place);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;
  [[nodiscard]] const StoreLayout& layout() const { return layout_; }
  [[nodiscard]] const StoreFormat& format() const { return layout_.format; }
  // Whether the unit's slabs are here (a unit without elements never lacks any).
  [[nodiscard]] bool has(int unit) const { return layout_.has(unit); }
  // The slab of a unit in its current slot, or in a given one; SPIPE_CHECKs that unit, plane and slot are here.
  [[nodiscard]] Ptr slab(int unit, Plane plane) const { return slab(unit, plane, slot(unit)); }
  [[nodiscard]] Ptr slab(int unit, Plane plane, int slot) const;
  // fp32 master of a unit: the master plane, or the compute plane when compute is fp32. Not of a split master.
  [[nodiscard]] float* master(int unit) const;
  // The master in whatever form it is kept: elements [first, first + values.size()) of a unit are read as fp32, or written
  // together with their compute copy. write_master returns how many finite values the copy cannot hold (it is infinite there).
  void read_master(int unit, std::uint64_t first, std::span<float> values) const;
  std::uint64_t write_master(int unit, std::uint64_t first, std::span<const float> values);
  // Committed version of a unit: the number of updates it has seen. Use after a stale or early version is an error at once.
  // Kept of all units. set_version releases and version acquires: who sees a version also sees what was written before it was
  // set. commit sets the version and makes the other slot the current one, at once for all who look.
  [[nodiscard]] std::uint64_t version(int unit) const;
  void set_version(int unit, std::uint64_t version);
  [[nodiscard]] int slot(int unit) const;  // the current one: 0 or 1
  void commit_other_slot(int unit, std::uint64_t version);

 private:
  [[nodiscard]] std::uint64_t& word(int unit) const;
  StoreLayout layout_;
  std::byte* base_ = nullptr;
  bool owns_ = false;
  std::vector<std::uint64_t> own_versions_;
  std::uint64_t* versions_ = nullptr;  // 2 * version + slot
};

}  // namespace spipe::store
