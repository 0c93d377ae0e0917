#include "unit_updates.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "bound_plan.h"
#include "spipe/base/checked.h"

namespace spipe::exec {

using plan::BufferKind;
using plan::Placement;
using plan::Task;
using store::Plane;
using store::StoreFormat;

namespace {

constexpr std::uint64_t kAlignment = 256;  // elements, as the plan counts them
constexpr Plane kPlanes[] = {Plane::grad, Plane::compute, Plane::master, Plane::m, Plane::v};

// The master and the moments; where the parameters are the master, they too.
bool is_state(const StoreFormat& format, Plane plane) {
  if (plane == Plane::grad || !format.has(plane)) return false;
  return plane != Plane::compute || !format.separate_master;
}

// Planes of `elements` elements back to back, those that `has` says are there.
template <typename Has>
std::uint64_t offset_of(const StoreFormat& format, std::uint64_t elements, Plane plane, const Has& has) {
  std::uint64_t offset = 0;
  for (const Plane other : kPlanes) {
    if (other == plane) break;
    if (has(other)) offset += round_up(elements, kAlignment) * dtype_size(format.dtype(other));
  }
  return offset;
}

std::byte* at(const Ptr& slab, std::uint64_t element) {
  return static_cast<std::byte*>(slab.data) + element * dtype_size(slab.dtype);
}

const plan::Buffer* buffer_of(const plan::Plan& plan, const Task& task, BufferKind kind) {
  for (std::uint32_t i = 0; i < task.use_count; ++i) {
    const plan::Buffer& buffer = plan.buffers[plan.uses[task.first_use + i].buffer];
    if (buffer.kind == kind) return &buffer;
  }
  return nullptr;
}

std::byte* resident_plane(const Machine& machine, const plan::Buffer& buffer, Plane plane) {
  const StoreFormat& format = machine.store->format();
  const std::uint64_t elements = machine.shape->store_units[static_cast<std::size_t>(buffer.unit)].elements;
  const auto has = [&](Plane other) { return is_state(format, other); };
  return static_cast<std::byte*>(machine.residents->at(buffer.offset, buffer.bytes)) + offset_of(format, elements, plane, has);
}

// Between the store and the places of this rank's residents.
void copy_residents(const plan::Plan& plan, const Machine& machine, bool to_store) {
  const StoreFormat& format = machine.store->format();
  for (const plan::Buffer& buffer : plan.buffers) {
    if (buffer.kind != BufferKind::resident_state || buffer.rank != rank_of(machine)) continue;
    const std::uint64_t elements = machine.shape->store_units[static_cast<std::size_t>(buffer.unit)].elements;
    for (const Plane plane : kPlanes) {
      if (!is_state(format, plane)) continue;
      void* in_store = machine.store->slab(buffer.unit, plane).data;
      void* here = resident_plane(machine, buffer, plane);
      std::memcpy(to_store ? in_store : here, to_store ? here : in_store, elements * dtype_size(format.dtype(plane)));
    }
  }
}

}  // namespace

void fill_residents(const plan::Plan& plan, const Machine& machine) { copy_residents(plan, machine, false); }
void flush_residents(const plan::Plan& plan, const Machine& machine) { copy_residents(plan, machine, true); }

UnitUpdates::UnitUpdates(const plan::Plan& plan, const Machine& machine)
    : plan_(plan), machine_(machine), found_(static_cast<std::size_t>(plan.store_units), 0) {}

UnitUpdates::Range UnitUpdates::range(const Task& task) const {
  const std::uint64_t begin = task.piece * plan_.options.piece_elements;
  return {begin, std::min(begin + plan_.options.piece_elements, unit(task.unit).elements)};
}

std::byte* UnitUpdates::piece(const Task& task) const {
  const plan::Buffer* buffer = buffer_of(plan_, task, BufferKind::state_piece);
  SPIPE_CHECK(buffer != nullptr, "a task of a piece has its buffer");
  return static_cast<std::byte*>(machine_.arena->at(buffer->offset, buffer->bytes));
}

void UnitUpdates::load(const Task& task) const {
  const StoreFormat& format = machine_.store->format();
  const Range r = range(task);
  const bool stays = resident(task.unit);
  // The update writes the compute copy of what it updates; that of frozen parameters goes back as it came.
  const bool keeps = optim::has_frozen(unit(task.unit), machine_.hyper.groups);
  const auto here = [&](Plane plane) {
    return plane == Plane::grad || (!stays && is_state(format, plane)) || (keeps && plane == Plane::compute);
  };
  const auto has = [&](Plane plane) { return plane == Plane::compute || here(plane); };
  for (const Plane plane : kPlanes) {
    if (!here(plane)) continue;
    std::memcpy(piece(task) + offset_of(format, r.end - r.begin, plane, has),
                at(machine_.store->slab(task.unit, plane), r.begin), (r.end - r.begin) * dtype_size(format.dtype(plane)));
  }
}

// Planes of a piece, as pointers to the unit's first element.
optim::UnitPlanes UnitUpdates::planes_on_device(const Task& task) const {
  const StoreFormat& format = machine_.store->format();
  const Range r = range(task);
  const bool stays = resident(task.unit);
  const plan::Buffer* home = buffer_of(plan_, task, BufferKind::resident_state);
  SPIPE_CHECK(stays == (home != nullptr), "resident units have their state on the device");
  const auto has = [&](Plane plane) {
    return plane == Plane::grad || plane == Plane::compute || (!stays && is_state(format, plane));
  };
  const auto plane_at = [&](Plane plane) {
    if (stays && is_state(format, plane)) return resident_plane(machine_, *home, plane);
    return piece(task) + offset_of(format, r.end - r.begin, plane, has) - r.begin * dtype_size(format.dtype(plane));
  };
  const auto typed = [&](Plane plane) { return format.has(plane) ? Ptr{plane_at(plane), format.dtype(plane)} : Ptr{}; };
  optim::UnitPlanes planes;
  planes.grad = typed(Plane::grad);
  planes.compute = typed(Plane::compute);
  planes.master = typed(Plane::master);
  planes.m = typed(Plane::m);
  planes.v = typed(Plane::v);
  return planes;
}

void UnitUpdates::unload(const Task& task) const {
  const StoreFormat& format = machine_.store->format();
  const Range r = range(task);
  const bool stays = resident(task.unit);
  const int slot = machine_.store->slot(task.unit);
  const auto here = [&](Plane plane) { return plane == Plane::compute || (!stays && is_state(format, plane)); };
  const auto has = [&](Plane plane) { return plane == Plane::grad || here(plane); };
  for (const Plane plane : kPlanes) {
    if (!here(plane)) continue;
    std::memcpy(at(machine_.store->slab(task.unit, plane, stays ? slot : 1 - slot), r.begin),
                piece(task) + offset_of(format, r.end - r.begin, plane, has),
                (r.end - r.begin) * dtype_size(format.dtype(plane)));
  }
}

void UnitUpdates::optimize(const Task& task, const optim::UpdateScalars& scalars, std::uint32_t* nonfinite_master) {
  const bool speculates = (task.flags & plan::kSpeculate) != 0;
  std::uint32_t* flag = speculates ? found(task.unit) : nonfinite_master;
  // The CPU device has a pool of low priority for updates, wherever their memory is; compute must not wait for them.
  Ops& ops = machine_.device->info().host_accessible ? machine_.device->host_ops() : machine_.device->ops();
  if (task.stream == plan::StreamKind::update) {
    if (speculates && task.piece == 0) *flag = 0;
    const Range r = range(task);
    const optim::UnitPlanes planes = planes_on_device(task);
    optim::update_elements(ops, unit(task.unit), planes, planes, r.begin, r.end, machine_.hyper, scalars, flag);
    if (resident(task.unit) && !machine_.store->format().separate_master) {
      const plan::Buffer* home = buffer_of(plan_, task, BufferKind::resident_state);
      const std::size_t size = dtype_size(machine_.store->format().compute);
      const auto has = [](Plane plane) { return plane == Plane::grad || plane == Plane::compute; };
      std::memcpy(piece(task) + offset_of(machine_.store->format(), r.end - r.begin, Plane::compute, has),
                  resident_plane(machine_, *home, Plane::compute) + r.begin * size, (r.end - r.begin) * size);
    }
    return;
  }
  if (speculates) *flag = 0;
  const int slot = machine_.store->slot(task.unit);
  const int target = plan_.options.way(task.unit).slots() == 2 ? 1 - slot : slot;
  const optim::UnitPlanes from = optim::planes_of(*machine_.store, task.unit, slot);
  const optim::UnitPlanes to = optim::planes_of(*machine_.store, task.unit, target);
  optim::update_elements(machine_.device->host_ops(), unit(task.unit), from, to, 0, unit(task.unit).elements, machine_.hyper,
                         scalars, flag);
}

void UnitUpdates::commit(const Task& task, const optim::UpdateScalars& scalars, std::uint64_t version, bool redo,
                         std::uint32_t* nonfinite_master) {
  store::Store& store = *machine_.store;
  if (plan_.options.way(task.unit).slots() == 1) {
    store.set_version(task.unit, version);
    return;
  }
  const int slot = store.slot(task.unit);
  if (redo) {
    const optim::UnitPlanes from = optim::planes_of(store, task.unit, slot), to = optim::planes_of(store, task.unit, 1 - slot);
    optim::update_elements(machine_.device->host_ops(), unit(task.unit), from, to, 0, unit(task.unit).elements, machine_.hyper,
                           scalars, nonfinite_master);
  } else if (*found(task.unit) != 0) {
    std::atomic_ref(*nonfinite_master).store(1, std::memory_order_relaxed);
  }
  store.commit_other_slot(task.unit, version);
}

}  // namespace spipe::exec
