#include "unit_runner.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "spipe/base/error.h"

namespace spipe::test {
namespace {

std::vector<float> widened(const void* data, DType dtype, std::size_t first, std::size_t count) {
  std::vector<float> out(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (dtype == DType::f32) {
      out[i] = static_cast<const float*>(data)[first + i];
    } else {
      const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[first + i];
      out[i] = dtype == DType::bf16 ? f32_from_bf16(bits) : f32_from_f16(bits);
    }
  }
  return out;
}

}  // namespace

UnitRunner::UnitRunner(model::ModelShape shape, Ops& ops, RunnerOptions options)
    : shape_(std::move(shape)),
      ops_(ops),
      options_(options),
      constants_memory_(shape_.constant_bytes),
      gradient_(shape_.boundary_bytes),
      other_gradient_(shape_.boundary_bytes),
      nll_(static_cast<std::size_t>(shape_.tokens_per_micro())) {
  constants_ = model::fill_constants(shape_, constants_memory_.data());
  for (int s = 0; s < shape_.store_unit_count(); ++s) {
    const std::uint64_t elements = shape_.store_units[static_cast<std::size_t>(s)].elements;
    Unit unit{std::vector<float>(elements),
              std::vector<float>(elements),
              std::vector<float>(elements),
              GuardedBuffer(elements * dtype_size(shape_.compute)),
              {}};
    for (const int source : shape_.gradient_sources(s))
      unit.accumulators.emplace(source, GuardedBuffer(elements * sizeof(float)));
    units_.push_back(std::move(unit));
    refresh_compute(s);
  }
  for (const model::ComputeUnit& unit : shape_.units) {
    boundaries_.emplace_back(shape_.boundary_bytes);
    saved_.emplace_back(unit.saved.bytes);
  }
}

UnitRunner::Found UnitRunner::find(const std::string& name) const {
  for (int s = 0; s < shape_.store_unit_count(); ++s) {
    for (const model::Parameter& parameter : shape_.store_units[static_cast<std::size_t>(s)].parameters) {
      if (parameter.name == name) return {s, &parameter};
    }
  }
  SPIPE_CHECK(false, "no parameter " + name);
}

void UnitRunner::set_parameter(const std::string& name, std::span<const float> values) {
  const Found found = find(name);
  SPIPE_CHECK(values.size() == found.parameter->elements(), "wrong size for " + name);
  std::copy(values.begin(), values.end(),
            units_[static_cast<std::size_t>(found.unit)].master.begin() + static_cast<std::ptrdiff_t>(found.parameter->offset));
  refresh_compute(found.unit);
}

std::span<const float> UnitRunner::parameter(const std::string& name) const {
  const Found found = find(name);
  return std::span(units_[static_cast<std::size_t>(found.unit)].master)
      .subspan(found.parameter->offset, found.parameter->elements());
}

void UnitRunner::refresh_compute(int unit) {
  Unit& u = units_[static_cast<std::size_t>(unit)];
  ops_.convert(nullptr, {.src = {u.master.data(), DType::f32},
                         .dst = {u.compute.data(), shape_.compute},
                         .elements = static_cast<std::int64_t>(u.master.size()),
                         .half_up = shape_.compute == DType::bf16});
}

model::UnitCall UnitRunner::call(int unit, bool accumulate, bool gradients) {
  const model::ComputeUnit& compute = shape_.units[static_cast<std::size_t>(unit)];
  memory_.clear();
  for (const int s : compute.store_units) {
    Unit& u = units_[static_cast<std::size_t>(s)];
    const auto accumulator = u.accumulators.find(unit);
    const bool has = gradients && accumulator != u.accumulators.end();
    memory_.push_back({u.master.empty() ? nullptr : u.compute.data(),
                       has ? static_cast<float*>(accumulator->second.data()) : nullptr, accumulate});
  }
  model::UnitCall c;
  c.ops = &ops_;
  c.constants = constants_;
  c.memory = memory_;
  c.tokens = tokens_.data();
  c.targets = targets_.data();
  if (unit > 0) c.input = boundaries_[static_cast<std::size_t>(unit) - 1].data();
  c.output = boundaries_[static_cast<std::size_t>(unit)].data();
  c.nll = nll_.data();
  c.seed = options_.seed;
  c.step = options_.step;
  c.first_sequence = first_sequence_;
  return c;
}

void UnitRunner::forward(int unit, bool save) {
  const model::ComputeUnit& compute = shape_.units[static_cast<std::size_t>(unit)];
  const GuardedBuffer workspace(save ? compute.save_workspace : compute.forward_workspace);
  model::UnitCall c = call(unit, false, false);
  c.workspace = workspace.data();
  GuardedBuffer& saved = saved_[static_cast<std::size_t>(unit)];
  saved.poison();
  if (save) c.saved = saved.data();
  model::unit_forward(shape_, unit, c);
  SPIPE_CHECK(workspace.intact(), "forward of " + compute.name + " left its workspace");
}

void UnitRunner::run_micro_batch(std::span<const std::int32_t> tokens, std::span<const std::int32_t> targets, float loss_scale,
                                 std::uint64_t first_sequence, bool first) {
  tokens_.assign(tokens.begin(), tokens.end());
  targets_.assign(targets.begin(), targets.end());
  first_sequence_ = first_sequence;
  const bool training = loss_scale != 0;
  const int head = shape_.unit_count() - 1;
  for (int unit = 0; unit < head; ++unit) forward(unit, training && !options_.recompute && unit > 0);

  const model::ComputeUnit& head_unit = shape_.units[static_cast<std::size_t>(head)];
  GuardedBuffer* output_gradient = &gradient_;
  GuardedBuffer* input_gradient = options_.alias_gradients ? &gradient_ : &other_gradient_;
  {
    const GuardedBuffer workspace(training ? head_unit.backward_workspace : head_unit.forward_workspace);
    model::UnitCall c = call(head, !first, training);
    c.workspace = workspace.data();
    c.loss_scale = loss_scale;
    if (training) c.input_gradient = output_gradient->data();
    model::head_loss(shape_, c);
    SPIPE_CHECK(workspace.intact(), "the head left its workspace");
  }
  for (int unit = head - 1; training && unit >= 0; --unit) {
    if (options_.recompute && unit > 0) forward(unit, true);
    const model::ComputeUnit& compute = shape_.units[static_cast<std::size_t>(unit)];
    const GuardedBuffer workspace(compute.backward_workspace);
    model::UnitCall c = call(unit, !first, true);
    c.workspace = workspace.data();
    if (unit > 0) c.saved = saved_[static_cast<std::size_t>(unit)].data();
    c.output_gradient = output_gradient->data();
    if (unit > 0) c.input_gradient = input_gradient->data();
    model::unit_backward(shape_, unit, c);
    SPIPE_CHECK(workspace.intact(), "backward of " + compute.name + " left its workspace");
    if (unit > 0) std::swap(output_gradient, input_gradient);
  }
  check_guards();
}

void UnitRunner::check_guards() const {
  bool intact = gradient_.intact() && other_gradient_.intact() && constants_memory_.intact();
  for (const GuardedBuffer& buffer : boundaries_) intact = intact && buffer.intact();
  for (const GuardedBuffer& buffer : saved_) intact = intact && buffer.intact();
  for (const Unit& unit : units_) {
    intact = intact && unit.compute.intact();
    for (const auto& [source, buffer] : unit.accumulators) intact = intact && buffer.intact();
  }
  SPIPE_CHECK(intact, "a unit wrote outside its buffers");
}

std::vector<float> UnitRunner::boundary(int after_unit) const {
  const auto count = static_cast<std::size_t>(shape_.tokens_per_micro() * shape_.architecture.hidden_size);
  return widened(boundaries_[static_cast<std::size_t>(after_unit)].data(), shape_.compute, 0, count);
}

std::vector<float> UnitRunner::final_norm() const {
  const model::Architecture& a = shape_.architecture;
  const auto head = static_cast<std::size_t>(shape_.unit_count() - 1);
  const model::StoreUnit& store = shape_.store_units[head];
  const auto tensor = [&](std::size_t index) {
    return offset(ConstPtr(units_[head].compute.data(), shape_.compute),
                  static_cast<std::int64_t>(store.parameters[index].offset));
  };
  const std::int64_t rows = shape_.tokens_per_micro();
  const ConstPtr x(boundaries_[head - 1].data(), shape_.compute);
  const GuardedBuffer y(shape_.boundary_bytes);
  std::vector<float> mean(static_cast<std::size_t>(rows)), rstd(static_cast<std::size_t>(rows));
  const auto eps = static_cast<float>(a.norm_eps);
  if (a.norm == model::NormKind::layernorm) {
    ops_.layernorm_forward(nullptr, {.x = x,
                                     .weight = tensor(0),
                                     .bias = tensor(1),
                                     .y = {y.data(), shape_.compute},
                                     .mean = mean.data(),
                                     .rstd = rstd.data(),
                                     .rows = rows,
                                     .cols = a.hidden_size,
                                     .eps = eps});
  } else {
    ops_.rmsnorm_forward(nullptr, {.x = x,
                                   .weight = tensor(0),
                                   .y = {y.data(), shape_.compute},
                                   .rstd = rstd.data(),
                                   .outer = rows,
                                   .cols = a.hidden_size,
                                   .eps = eps});
  }
  return widened(y.data(), shape_.compute, 0, static_cast<std::size_t>(rows * a.hidden_size));
}

std::vector<float> UnitRunner::logits(std::int64_t row) {
  const model::Architecture& a = shape_.architecture;
  const int head = shape_.unit_count() - 1;
  const GuardedBuffer workspace(static_cast<std::uint64_t>(a.hidden_size) * 4 + 8 + 64);
  model::UnitCall c = call(head, false, false);
  c.workspace = workspace.data();
  c.input = offset(ConstPtr(c.input, shape_.compute), row * a.hidden_size).data;
  std::vector<float> out(static_cast<std::size_t>(a.vocab_size));
  model::head_logits(shape_, c, 1, out.data());
  SPIPE_CHECK(workspace.intact(), "head_logits left its workspace");
  return out;
}

void UnitRunner::finish_gradients() {
  gradients_.clear();
  double squares = 0;
  std::uint32_t nonfinite = 0;
  for (int s = 0; s < shape_.store_unit_count(); ++s) {
    const std::vector<int> sources = shape_.gradient_sources(s);
    for (const model::Parameter& parameter : shape_.store_units[static_cast<std::size_t>(s)].parameters) {
      const auto accumulated = [&](std::size_t source) {
        return static_cast<const float*>(units_[static_cast<std::size_t>(s)].accumulators.at(sources[source]).data()) +
               parameter.offset;
      };
      std::vector<float> sum(parameter.elements());
      std::vector<double> blocks((sum.size() + kNormBlock - 1) / kNormBlock);
      ops_.finish_gradient(nullptr, {.a = accumulated(0),
                                     .b = sources.size() > 1 ? accumulated(1) : nullptr,
                                     .dst = {sum.data(), DType::f32},
                                     .block_sums = blocks.data(),
                                     .nonfinite = &nonfinite,
                                     .elements = static_cast<std::int64_t>(sum.size())});
      for (const double block : blocks) squares += block;
      gradients_.emplace(parameter.name, std::move(sum));
    }
  }
  SPIPE_CHECK(nonfinite == 0, "a gradient is not finite");
  global_norm_ = std::sqrt(squares);
}

void UnitRunner::update(const AdamW& settings) {
  const double bias1 = 1 - std::pow(settings.beta1, settings.step), bias2 = 1 - std::pow(settings.beta2, settings.step);
  std::uint32_t nonfinite = 0;
  for (int s = 0; s < shape_.store_unit_count(); ++s) {
    Unit& unit = units_[static_cast<std::size_t>(s)];
    for (const model::Parameter& parameter : shape_.store_units[static_cast<std::size_t>(s)].parameters) {
      ops_.adamw(nullptr, {.grad = {gradients_.at(parameter.name).data(), DType::f32},
                           .master = unit.master.data() + parameter.offset,
                           .m = unit.m.data() + parameter.offset,
                           .v = unit.v.data() + parameter.offset,
                           .nonfinite_master = &nonfinite,
                           .elements = static_cast<std::int64_t>(parameter.elements()),
                           .grad_scale = static_cast<float>(settings.clip),
                           .beta1 = static_cast<float>(settings.beta1),
                           .one_minus_beta1 = static_cast<float>(1 - settings.beta1),
                           .beta2 = static_cast<float>(settings.beta2),
                           .one_minus_beta2 = static_cast<float>(1 - settings.beta2),
                           .decay = static_cast<float>(parameter.decay ? 1 - settings.lr * settings.weight_decay : 1),
                           .inv_sqrt_bias2 = static_cast<float>(1 / std::sqrt(bias2)),
                           .eps = static_cast<float>(settings.eps),
                           .step_size = static_cast<float>(settings.lr / bias1)});
    }
    refresh_compute(s);
  }
  SPIPE_CHECK(nonfinite == 0, "a parameter became infinite");
}

}  // namespace spipe::test
