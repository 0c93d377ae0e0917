#include "bound_plan.h"

#include <fmt/core.h>

#include <algorithm>

#include "spipe/base/checked.h"

namespace spipe::exec {

using plan::Access;
using plan::BufferKind;
using plan::Place;
using plan::TaskKind;

int rank_of(const Machine& machine) { return machine.world == nullptr ? 0 : machine.world->rank(); }

BoundPlan::BoundPlan(const plan::Plan& plan, const Machine& machine, std::span<std::byte> mailboxes)
    : plan_(plan),
      machine_(machine),
      mailboxes_(mailboxes),
      tags_(plan.buffers.size()),
      index_(plan.tasks.size(), UINT32_MAX),
      reads_input_(static_cast<std::size_t>(plan.options.micro_batches), false) {
  const auto tokens = static_cast<std::uint64_t>(machine.shape->tokens_per_micro());
  const auto micro_batches = static_cast<std::uint64_t>(plan.options.micro_batches);
  staging_.inputs.resize(checked_mul(micro_batches, 2 * 2 * tokens));
  staging_.losses.resize(checked_mul(micro_batches, tokens));
  SPIPE_CHECK(plan.parking_bytes <= machine.parking.size(), "the parking area is smaller than the plan's");
  std::uint32_t own = 0;
  for (const plan::Task& task : plan.tasks) {
    if (task.rank == rank_of(machine)) index_[task.id] = own++;
  }
  tasks_.resize(own);
  for (const plan::Task& task : plan.tasks) {
    if (task.rank == rank_of(machine)) bind(task, this->task(task.id));
  }
}

void BoundPlan::bind(const plan::Task& task, BoundTask& bound) {
  switch (task.kind) {
    case TaskKind::forward:
    case TaskKind::loss:
    case TaskKind::backward:
      bind_compute(task, bound);
      break;
    case TaskKind::input:
      reads_input_[static_cast<std::size_t>(task.micro_batch)] = true;
      [[fallthrough]];
    case TaskKind::fetch:
    case TaskKind::park:
    case TaskKind::unpark:
    case TaskKind::result:
    case TaskKind::send:
    case TaskKind::recv:
      bind_copy(task, bound);
      break;
    case TaskKind::offload:
    case TaskKind::reduce:
      bind_gradient(task, bound);
      break;
    case TaskKind::push:
    case TaskKind::pull:
      bind_message(task, bound);
      break;
    case TaskKind::norm:
      bind_norm(task, bound);
      break;
    case TaskKind::load:
    case TaskKind::optimize:
    case TaskKind::unload:
    case TaskKind::commit:
    case TaskKind::save:
      break;  // UnitUpdates, and the store, find what they need
  }
}

const std::int32_t* BoundPlan::input(int micro_batch, std::uint64_t run) const {
  const auto stride = 2 * static_cast<std::size_t>(machine_.shape->tokens_per_micro());
  const auto micro_batches = static_cast<std::size_t>(plan_.options.micro_batches);
  return staging_.inputs.data() + (run % 2 * micro_batches + static_cast<std::size_t>(micro_batch)) * stride;
}

std::span<const plan::Use> BoundPlan::uses(const plan::Task& task) const {
  return std::span(plan_.uses).subspan(task.first_use, task.use_count);
}

void* BoundPlan::address(const plan::Buffer& buffer) const {
  const std::uint64_t tokens = static_cast<std::uint64_t>(machine_.shape->tokens_per_micro());
  const auto m = static_cast<std::uint64_t>(buffer.micro_batch);
  switch (buffer.kind) {
    case BufferKind::store_compute:
      return machine_.store->slab(buffer.unit, store::Plane::compute).data;
    case BufferKind::store_grad:
      return machine_.store->slab(buffer.unit, store::Plane::grad).data;
    case BufferKind::host_input:
      return const_cast<std::int32_t*>(input(buffer.micro_batch, 0));  // of even runs
    case BufferKind::host_result:
      return const_cast<float*>(staging_.losses.data()) + m * tokens;
    case BufferKind::parked:
      SPIPE_CHECK(buffer.offset + buffer.bytes <= machine_.parking.size(), "a parked buffer leaves the parking area");
      return machine_.parking.data() + buffer.offset;
    case BufferKind::mailbox:
    case BufferKind::norm_parts:
      SPIPE_CHECK(buffer.offset + buffer.bytes <= mailboxes_.size(), "a mailbox leaves the host's mailboxes");
      return mailboxes_.data() + buffer.offset;
    case BufferKind::constants:
      return nullptr;  // loaded once, addressed through Machine::constants
    case BufferKind::store_state:
    case BufferKind::store_shadow:
    case BufferKind::norm_value:
    case BufferKind::checkpoint_file:
      return nullptr;  // names for ordering only
    default:
      break;
  }
  if (buffer.place == Place::store) {
    SPIPE_CHECK(buffer.kind == BufferKind::gradient, "only gradients accumulate in the store");
    return machine_.store->slab(buffer.unit, store::Plane::grad).data;
  }
  SPIPE_CHECK(buffer.place == Place::device, "unknown place of a buffer");
  return machine_.arena->at(buffer.offset, buffer.bytes);
}

namespace {

void set_once(const void*& field, const void* value, const char* name) {
  SPIPE_CHECK(field == nullptr, fmt::format("a task has two buffers for its {}", name));
  field = value;
}
void set_once(void*& field, void* value, const char* name) {
  SPIPE_CHECK(field == nullptr, fmt::format("a task has two buffers for its {}", name));
  field = value;
}

}  // namespace

void BoundPlan::bind_compute(const plan::Task& task, BoundTask& bound) {
  const model::ComputeUnit& unit = machine_.shape->units[static_cast<std::size_t>(task.unit)];
  bound.memory.resize(unit.store_units.size());
  const auto memory_of = [&](int store_unit) -> model::UnitMemory& {
    for (std::size_t i = 0; i < unit.store_units.size(); ++i) {
      if (unit.store_units[i] == store_unit) return bound.memory[i];
    }
    fail_check("store unit", fmt::format("task {} touches store unit {} that {} does not use", task.id, store_unit, unit.name),
               __FILE__, __LINE__);
  };
  model::UnitCall& call = bound.call;
  for (const plan::Use& use : uses(task)) {
    const plan::Buffer& buffer = plan_.buffers[use.buffer];
    void* memory = address(buffer);
    switch (buffer.kind) {
      case BufferKind::parameters:
        memory_of(buffer.unit).parameters = memory;
        bound.parameters.push_back(&tags_[use.buffer]);
        break;
      case BufferKind::store_compute:
        memory_of(buffer.unit).parameters = memory;
        bound.in_place_units.push_back(buffer.unit);
        break;
      case BufferKind::gradient:
      case BufferKind::gradient_partial:
        memory_of(buffer.unit).gradient = static_cast<float*>(memory);
        memory_of(buffer.unit).accumulate = (task.flags & plan::kAccumulate) != 0;
        break;
      case BufferKind::boundary:
        if (use.access == Access::read) {
          set_once(call.input, memory, "input boundary");
        } else {
          set_once(call.output, memory, "output boundary");
        }
        break;
      case BufferKind::boundary_gradient:
        if (use.access != Access::write) set_once(call.output_gradient, memory, "output gradient");
        if (use.access != Access::read) set_once(call.input_gradient, memory, "input gradient");
        break;
      case BufferKind::saved:
        set_once(call.saved, memory, "saved activations");
        break;
      case BufferKind::workspace:
        set_once(call.workspace, memory, "workspace");
        break;
      case BufferKind::input:
        call.tokens = static_cast<const std::int32_t*>(memory);
        call.targets = call.tokens + machine_.shape->tokens_per_micro();
        break;
      case BufferKind::token_loss:
        call.nll = static_cast<float*>(memory);
        break;
      case BufferKind::constants:
        break;
      default:
        fail_check("buffer kind", fmt::format("task {} uses a {} buffer", task.id, plan::buffer_kind_name(buffer.kind)),
                   __FILE__, __LINE__);
    }
  }
  call.ops = &machine_.device->ops();
  call.constants = machine_.constants;
  call.memory = bound.memory;
  call.seed = machine_.seed;
  call.first_sequence = static_cast<std::uint64_t>(task.micro_batch) * static_cast<std::uint64_t>(machine_.shape->batch.micro);
}

void BoundPlan::bind_copy(const plan::Task& task, BoundTask& bound) {
  for (const plan::Use& use : uses(task)) {
    const plan::Buffer& buffer = plan_.buffers[use.buffer];
    if (use.access == Access::read) {
      set_once(bound.source, address(buffer), "source");
    } else {
      set_once(bound.destination, address(buffer), "destination");
      if (task.kind == TaskKind::fetch) bound.parameters.push_back(&tags_[use.buffer]);
    }
    if (buffer.kind == BufferKind::store_compute) bound.from_store = true;
  }
  SPIPE_CHECK(bound.source != nullptr && bound.destination != nullptr, fmt::format("copy task {} lacks an end", task.id));
  const std::uint64_t tokens = static_cast<std::uint64_t>(machine_.shape->tokens_per_micro());
  switch (task.kind) {
    case TaskKind::input:
      bound.copy_bytes = 2 * tokens * sizeof(std::int32_t);
      break;
    case TaskKind::result:
      bound.copy_bytes = tokens * sizeof(float);
      break;
    case TaskKind::fetch:
      bound.copy_bytes = checked_mul(machine_.shape->store_units[static_cast<std::size_t>(task.unit)].elements,
                                     dtype_size(machine_.store->format().compute));
      break;
    default: {  // between device and host: the smaller of the two buffers (both hold the same boundary or gradient)
      std::uint64_t bytes = ~std::uint64_t{0};
      for (const plan::Use& use : uses(task)) bytes = std::min(bytes, plan_.buffers[use.buffer].bytes);
      bound.copy_bytes = bytes;
    }
  }
}

void BoundPlan::bind_gradient(const plan::Task& task, BoundTask& bound) {
  const float* total = nullptr;
  for (const plan::Use& use : uses(task)) {
    const plan::Buffer& buffer = plan_.buffers[use.buffer];
    if (buffer.kind == BufferKind::gradient && task.kind == TaskKind::reduce) {
      total = static_cast<const float*>(address(buffer));
    } else if (buffer.kind == BufferKind::gradient || buffer.kind == BufferKind::gradient_partial) {
      bound.gradients.push_back(static_cast<const float*>(address(buffer)));
    }
  }
  if (total != nullptr) bound.gradients.insert(bound.gradients.begin(), total);
  SPIPE_CHECK(!bound.gradients.empty() && bound.gradients.size() <= 2, fmt::format("task {} sums no gradient", task.id));
  if (task.kind == TaskKind::offload) bound.destination = machine_.store->slab(task.unit, store::Plane::grad).data;
}

void BoundPlan::bind_message(const plan::Task& task, BoundTask& bound) {
  const plan::Access own = task.kind == TaskKind::push ? Access::read : Access::write;
  for (const plan::Use& use : uses(task)) {
    const plan::Buffer& buffer = plan_.buffers[use.buffer];
    if (use.access != own || buffer.kind == BufferKind::wire) continue;
    // A host's share of the norm is put together when it is sent.
    if (buffer.kind == BufferKind::store_grad || buffer.kind == BufferKind::host_result) continue;
    SPIPE_CHECK(bound.message.empty(), fmt::format("message task {} moves two buffers", task.id));
    bound.message = {static_cast<std::byte*>(address(buffer)), task.bytes};
    if (buffer.kind == BufferKind::store_compute) bound.message_unit = buffer.unit;
  }
  if (!bound.message.empty()) return;
  SPIPE_CHECK(task.kind == TaskKind::push, fmt::format("message task {} moves nothing", task.id));
  bound.norm_items = norm_items(task);
  staging_.norm_parts.emplace_back(checked_mul(task.bytes, 2));
  bound.message = staging_.norm_parts.back();  // of both runs
}

std::vector<NormItem> BoundPlan::norm_items(const plan::Task& push) const {
  std::vector<NormItem> items;
  std::uint64_t bytes = sizeof(std::uint64_t);  // what was asked
  for (const plan::Use& use : uses(push)) {
    const plan::Buffer& buffer = plan_.buffers[use.buffer];
    if (buffer.kind == BufferKind::store_grad) {
      items.push_back({.unit = buffer.unit});
      bytes += machine_.norms->part(buffer.unit).size();
    } else if (buffer.kind == BufferKind::host_result) {
      items.push_back({.micro_batch = buffer.micro_batch});
      bytes += sizeof(double);
    }
  }
  SPIPE_CHECK(bytes <= push.bytes, fmt::format("the norm parts of task {} need {} bytes", push.id, bytes));
  return items;
}

void BoundPlan::bind_norm(const plan::Task& task, BoundTask& bound) {
  for (const plan::Use& use : uses(task)) {
    const plan::Buffer& buffer = plan_.buffers[use.buffer];
    if (buffer.kind != BufferKind::norm_parts) continue;
    // What it holds is what its push was told to read.
    for (const plan::Task& pull : plan_.tasks) {
      if (pull.kind != TaskKind::pull) continue;
      const auto pulled = uses(pull);
      const bool fills = std::any_of(pulled.begin(), pulled.end(), [&](const plan::Use& u) { return u.buffer == use.buffer; });
      if (fills)
        bound.norm_parts.push_back({static_cast<const std::byte*>(address(buffer)), norm_items(plan_.tasks[pull.peer])});
    }
  }
}

}  // namespace spipe::exec
