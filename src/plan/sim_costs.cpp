// What tasks cost on given hardware.
#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/plan/simulator.h"

namespace spipe::plan {

namespace {

// Passes of element-wise work over a boundary-sized tensor that a layer's forward makes (norms, residuals, activations, rope
// and the like, read and written); its backward makes twice as many.
constexpr double kForwardPasses = 10;

class Costs {
 public:
  Costs(const Plan& plan, const model::ModelShape& shape, const Hardware& hardware)
      : plan_(plan), shape_(shape), hardware_(hardware) {
    SPIPE_CHECK(plan.compute_units == shape.unit_count() && plan.store_units == shape.store_unit_count(),
                "a plan is costed with its model");
    SPIPE_CHECK(hardware.unit_times.empty() || hardware.unit_times.size() == shape.units.size(),
                "measured times are given for every unit or for none");
  }

  [[nodiscard]] TaskCost of(const Task& task) const {
    switch (task.kind) {
      case TaskKind::forward:
        return {.seconds = forward(task)};
      case TaskKind::loss:
        return {.seconds = (task.flags & kEvaluate) != 0 ? forward(task) : forward(task) + backward(task)};
      case TaskKind::backward:
        return {.seconds = backward(task)};
      case TaskKind::reduce:
        return {.seconds = device_memory(3 * 4 * elements(task.unit))};
      case TaskKind::input:
      case TaskKind::fetch:
      case TaskKind::unpark:
        return copy(task, SharedBy::link_in);
      case TaskKind::recv:
        return message(task, SharedBy::link_in);
      case TaskKind::park:
      case TaskKind::offload:
      case TaskKind::result:
        return copy(task, SharedBy::link_out);
      case TaskKind::send:
        return message(task, SharedBy::link_out);
      case TaskKind::push:
        return {.seconds = hardware_.network_latency_s, .amount = bytes(task), .shared = SharedBy::network};
      case TaskKind::pull:
      case TaskKind::norm:
      case TaskKind::commit:
        return {};
      case TaskKind::load:
        return copy(task, SharedBy::link_in);
      case TaskKind::unload:
        return copy(task, SharedBy::link_out);
      case TaskKind::optimize:
        // The bytes of the task count what is read and what is written. On the device they are taken from whatever computes.
        if (task.stream == StreamKind::update) {
          return {.seconds = device_memory(bytes(task)), .device_tax = device_memory(bytes(task))};
        }
        return {.amount = elements(task.unit), .shared = SharedBy::update, .dram_bytes = bytes(task)};
      case TaskKind::save:
        return {.amount = bytes(task), .shared = SharedBy::storage, .dram_bytes = bytes(task)};
    }
    return {};
  }

 private:
  static double bytes(const Task& task) { return static_cast<double>(task.bytes); }
  [[nodiscard]] double elements(int store_unit) const {
    return static_cast<double>(shape_.store_units[static_cast<std::size_t>(store_unit)].elements);
  }
  [[nodiscard]] const model::ComputeUnit& unit(const Task& task) const {
    return shape_.units[static_cast<std::size_t>(task.unit)];
  }
  [[nodiscard]] double device_memory(double bytes) const {
    return hardware_.memory_bytes_per_s > 0 ? bytes / hardware_.memory_bytes_per_s : 0;
  }
  [[nodiscard]] double matmuls(double flops) const { return hardware_.matmul_flops > 0 ? flops / hardware_.matmul_flops : 0; }

  // Bytes of the parameters that a unit computes with. An embedding looks up rows, as many bytes as a boundary has.
  [[nodiscard]] double parameter_bytes(const model::ComputeUnit& unit) const {
    if (unit.kind == model::UnitKind::embedding) return 0;
    double total = 0;
    for (const int s : unit.store_units) total += elements(s);
    return total * static_cast<double>(dtype_size(shape_.compute));
  }
  [[nodiscard]] double passes(const model::ComputeUnit& unit) const {
    const double boundary = static_cast<double>(shape_.boundary_bytes);
    return unit.kind == model::UnitKind::layer ? kForwardPasses * boundary : boundary;
  }
  [[nodiscard]] double forward(const Task& task) const {
    if (!hardware_.unit_times.empty()) return hardware_.unit_times[static_cast<std::size_t>(task.unit)].forward_s;
    const model::ComputeUnit& u = unit(task);
    return matmuls(u.forward_flops) + device_memory(parameter_bytes(u) + passes(u));
  }
  // Parameters are read once more; gradients are formed, read, added to and written.
  [[nodiscard]] double backward(const Task& task) const {
    if (!hardware_.unit_times.empty()) return hardware_.unit_times[static_cast<std::size_t>(task.unit)].backward_s;
    const model::ComputeUnit& u = unit(task);
    return matmuls(u.backward_flops) + device_memory(4 * parameter_bytes(u) + 2 * passes(u));
  }
  [[nodiscard]] TaskCost copy(const Task& task, SharedBy link) const {
    return {.seconds = hardware_.link_latency_s, .amount = bytes(task), .shared = link, .dram_bytes = bytes(task)};
  }
  [[nodiscard]] TaskCost message(const Task& task, SharedBy link) const {
    TaskCost cost = copy(task, link);
    if (hardware_.message_kernel_bytes_per_s > 0) cost.device_tax = bytes(task) / hardware_.message_kernel_bytes_per_s;
    return cost;
  }

  const Plan& plan_;
  const model::ModelShape& shape_;
  const Hardware& hardware_;
};

}  // namespace

std::vector<TaskCost> task_costs(const Plan& plan, const model::ModelShape& shape, const Hardware& hardware) {
  const Costs costs(plan, shape, hardware);
  std::vector<TaskCost> result;
  result.reserve(plan.tasks.size());
  for (const Task& task : plan.tasks) result.push_back(costs.of(task));
  return result;
}

}  // namespace spipe::plan
