// Which planes a precision has, and where every slab lies. Pure arithmetic: the planner asks before anything is allocated.
#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/store/store.h"

namespace spipe::store {
namespace {

constexpr std::uint64_t kAbsent = ~std::uint64_t{0};
constexpr std::uint64_t kSlabAlignment = 256;  // a fetch of a whole slab starts aligned on every device
constexpr std::uint64_t kPage = 4096;          // fixed, so that the layout is the same on every host

constexpr Plane kPlanes[kPlaneCount] = {Plane::compute, Plane::master, Plane::m, Plane::v, Plane::grad};

std::uint64_t checked_round_up(std::uint64_t a, std::uint64_t multiple) { return checked_mul(ceil_div(a, multiple), multiple); }

}  // namespace

std::string plane_name(Plane plane) {
  switch (plane) {
    case Plane::compute:
      return "compute";
    case Plane::master:
      return "master";
    case Plane::m:
      return "m";
    case Plane::v:
      return "v";
    case Plane::grad:
      return "grad";
  }
  return "unknown plane";
}

DType StoreFormat::dtype(Plane plane) const {
  switch (plane) {
    case Plane::compute:
      return compute;
    case Plane::master:
      return split_master ? DType::u16 : DType::f32;
    case Plane::m:
    case Plane::v:
      return moment;
    case Plane::grad:
      return grad;
  }
  SPIPE_CHECK(false, "no such plane");
  return DType::f32;
}

std::uint64_t StoreFormat::state_bytes_per_parameter() const {
  return dtype_size(DType::f32) + (second_moment ? 2 : 1) * dtype_size(moment);
}

std::uint64_t StoreFormat::bytes_per_parameter() const {
  std::uint64_t bytes = 0;
  for (const Plane plane : kPlanes) {
    bytes += has(plane) ? dtype_size(dtype(plane)) : 0;
  }
  return bytes;
}

StoreFormat store_format(DType compute) {
  SPIPE_CHECK(compute == DType::f32 || compute == DType::bf16 || compute == DType::f16,
              "a store computes in fp32, bf16 or fp16");
  StoreFormat format;
  format.compute = compute;
  format.separate_master = compute != DType::f32;
  format.moment = DType::f32;
  format.grad = compute;
  return format;
}

namespace {

std::uint64_t slab_size(std::uint64_t elements, const StoreFormat& format, Plane plane) {
  return checked_round_up(checked_mul(elements, dtype_size(format.dtype(plane))), kSlabAlignment);
}

}  // namespace

std::uint64_t unit_state_bytes(const model::StoreUnit& unit, const StoreFormat& format) {
  std::uint64_t bytes = 0;
  for (const Plane plane : kPlanes) {
    if (format.has(plane)) bytes = checked_add(bytes, slab_size(unit.elements, format, plane));
  }
  return bytes;
}

std::uint64_t unit_shadow_bytes(const model::StoreUnit& unit, const StoreFormat& format) {
  return unit_state_bytes(unit, format) - slab_size(unit.elements, format, Plane::grad);
}

StoreLayout make_store_layout(const model::ModelShape& shape, const StoreFormat& format) {
  return make_store_layout(shape, format, std::vector<bool>(shape.store_units.size(), true));
}

StoreLayout make_store_layout(const model::ModelShape& shape, const StoreFormat& format, const std::vector<bool>& here) {
  return make_store_layout(shape, format, here, std::vector<bool>(shape.store_units.size(), false));
}

StoreLayout make_store_layout(const model::ModelShape& shape, const StoreFormat& format, const std::vector<bool>& here,
                              const std::vector<bool>& second_slots) {
  SPIPE_CHECK(here.size() == shape.store_units.size(), "every unit is here or elsewhere");
  SPIPE_CHECK(second_slots.size() == shape.store_units.size(), "every unit has one slot or two");
  StoreLayout layout;
  layout.format = format;
  layout.offsets.assign(shape.store_units.size() * kPlaneCount, kAbsent);
  std::uint64_t end = 0;
  for (std::size_t unit = 0; unit < shape.store_units.size(); ++unit) {
    const std::uint64_t elements = shape.store_units[unit].elements;
    layout.elements.push_back(elements);
    if (!here[unit] && elements > 0) continue;
    for (const Plane plane : kPlanes) {
      if (!format.has(plane)) continue;
      layout.offsets[unit * kPlaneCount + static_cast<std::size_t>(plane)] = end;
      end = checked_add(end, slab_size(elements, format, plane));
    }
  }
  for (std::size_t unit = 0; unit < shape.store_units.size(); ++unit) {
    const std::uint64_t elements = shape.store_units[unit].elements;
    if (!second_slots[unit] || !here[unit] || elements == 0) continue;
    layout.shadow_offsets.resize(layout.offsets.size(), kAbsent);
    for (const Plane plane : kPlanes) {
      if (!format.has(plane) || plane == Plane::grad) continue;
      layout.shadow_offsets[unit * kPlaneCount + static_cast<std::size_t>(plane)] = end;
      end = checked_add(end, slab_size(elements, format, plane));
    }
  }
  layout.bytes = checked_round_up(end, kPage);
  return layout;
}

StoreLayout make_weights_layout(const model::ModelShape& shape) {
  StoreLayout layout;
  layout.format = store_format(DType::f32);
  layout.offsets.assign(shape.store_units.size() * kPlaneCount, kAbsent);
  std::uint64_t end = 0;
  for (std::size_t unit = 0; unit < shape.store_units.size(); ++unit) {
    layout.elements.push_back(shape.store_units[unit].elements);
    layout.offsets[unit * kPlaneCount + static_cast<std::size_t>(Plane::compute)] = end;
    end = checked_add(end, slab_size(layout.elements[unit], layout.format, Plane::compute));
  }
  layout.bytes = checked_round_up(end, kPage);
  return layout;
}

bool StoreLayout::has(int unit) const {
  SPIPE_CHECK(unit >= 0 && static_cast<std::size_t>(unit) < elements.size(), "no such store unit");
  return offsets[static_cast<std::size_t>(unit) * kPlaneCount + static_cast<std::size_t>(Plane::compute)] != kAbsent;
}

int StoreLayout::slots(int unit) const {
  if (!has(unit) || shadow_offsets.empty()) return 1;
  const std::size_t at = static_cast<std::size_t>(unit) * kPlaneCount + static_cast<std::size_t>(Plane::compute);
  return shadow_offsets[at] == kAbsent ? 1 : 2;
}

std::uint64_t StoreLayout::offset(int unit, Plane plane, int slot) const {
  SPIPE_CHECK(has(unit), "store unit " + std::to_string(unit) + " is not on this host");
  const std::size_t at = static_cast<std::size_t>(unit) * kPlaneCount + static_cast<std::size_t>(plane);
  const bool shadow = slot == 1 && plane != Plane::grad;  // there is one gradient
  SPIPE_CHECK(slot == 0 || slots(unit) == 2, "store unit " + std::to_string(unit) + " has one slot");
  const std::uint64_t offset = shadow ? shadow_offsets[at] : offsets[at];
  SPIPE_CHECK(offset != kAbsent, "this store has no plane '" + plane_name(plane) + "'");
  return offset;
}

std::uint64_t StoreLayout::slab_bytes(int unit, Plane plane) const {
  SPIPE_CHECK(unit >= 0 && static_cast<std::size_t>(unit) < elements.size(), "no such store unit");
  return format.has(plane) ? elements[static_cast<std::size_t>(unit)] * dtype_size(format.dtype(plane)) : 0;
}

}  // namespace spipe::store
