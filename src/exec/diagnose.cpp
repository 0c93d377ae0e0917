#include "diagnose.h"

#include <fmt/core.h>

#include <cstring>

#include "spipe/base/error.h"

namespace spipe::exec {

bool has_nonfinite(const void* data, DType dtype, std::uint64_t elements) {
  if (dtype == DType::f32) {
    const auto* values = static_cast<const std::uint32_t*>(data);
    for (std::uint64_t i = 0; i < elements; ++i) {
      if ((values[i] & 0x7f800000U) == 0x7f800000U) return true;
    }
    return false;
  }
  SPIPE_CHECK(dtype == DType::bf16 || dtype == DType::f16, "no such activation type");
  const std::uint16_t exponent = dtype == DType::bf16 ? 0x7f80 : 0x7c00;
  const auto* values = static_cast<const std::uint16_t*>(data);
  for (std::uint64_t i = 0; i < elements; ++i) {
    if ((values[i] & exponent) == exponent) return true;
  }
  return false;
}

Diagnosis& Diagnosis::operator=(const Diagnosis&) {
  first_task_ = ~0U;
  text_.clear();
  return *this;
}

void Diagnosis::report(const plan::Task& task, const std::string& text) {
  const std::scoped_lock lock(mutex_);
  if (task.id >= first_task_) return;
  first_task_ = task.id;
  text_ = text;
}

void Diagnosis::report_loss(int micro_batch) {
  const std::scoped_lock lock(mutex_);
  if (text_.empty()) text_ = fmt::format("the loss of micro-batch {}", micro_batch);
}

std::string Diagnosis::text() const {
  const std::scoped_lock lock(mutex_);
  return text_;
}

std::uint32_t Diagnosis::first_task() const {
  const std::scoped_lock lock(mutex_);
  return first_task_;
}

void Diagnosis::check_compute(const plan::Task& task, const model::UnitCall& call, const model::ModelShape& shape) {
  const std::uint64_t elements = shape.boundary_bytes / dtype_size(shape.compute);
  const char* pass = task.kind == plan::TaskKind::backward ? "backward" : "forward";
  if (call.nll != nullptr && has_nonfinite(call.nll, DType::f32, static_cast<std::uint64_t>(shape.tokens_per_micro()))) {
    report(task, fmt::format("the loss of micro-batch {}", task.micro_batch));
  }
  const void* outputs[] = {task.kind == plan::TaskKind::forward ? call.output : nullptr, call.input_gradient};
  for (const void* output : outputs) {
    if (output == nullptr || !has_nonfinite(output, shape.compute, elements)) continue;
    report(task, fmt::format("{} of {}, micro-batch {}", task.kind == plan::TaskKind::loss ? "backward" : pass,
                             shape.units[static_cast<std::size_t>(task.unit)].name, task.micro_batch));
    return;
  }
  const auto& units = shape.units[static_cast<std::size_t>(task.unit)].store_units;
  for (std::size_t i = 0; i < call.memory.size(); ++i) {
    if (call.memory[i].gradient == nullptr) continue;
    for (const model::Parameter& p : shape.store_units[static_cast<std::size_t>(units[i])].parameters) {
      if (!has_nonfinite(call.memory[i].gradient + p.offset, DType::f32, p.elements())) continue;
      report(task, fmt::format("the gradient of {}, micro-batch {}", p.name, task.micro_batch));
      return;
    }
  }
}

}  // namespace spipe::exec
