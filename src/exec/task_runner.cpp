#include "task_runner.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "spipe/base/error.h"

namespace spipe::exec {

using plan::Task;
using plan::TaskKind;

TaskRunner::TaskRunner(const plan::Plan& plan, const Machine& machine, const PlanArea& area)
    : plan_(plan), machine_(machine), area_(area), bound_(plan, machine, area.mailboxes), updates_(plan, machine) {
  for (const Task& task : plan.tasks) {
    sends_norm_ = sends_norm_ ||
                  (task.kind == TaskKind::push && task.rank == rank_of(machine) && !bound_.task(task.id).norm_items.empty());
  }
}

void TaskRunner::run(const Task& task, Step& step, StreamHandle* handle) {
  BoundTask& bound = bound_.task(task.id);
  switch (task.kind) {
    case TaskKind::input:
      std::memcpy(bound.destination, bound_.input(task.micro_batch, step.run), bound.copy_bytes);
      break;
    case TaskKind::park:
    case TaskKind::unpark:
    case TaskKind::send:
    case TaskKind::recv:
      std::memcpy(bound.destination, bound.source, bound.copy_bytes);
      break;
    case TaskKind::result:
      bring_losses(task, bound, step);
      break;
    case TaskKind::fetch:
      fetch(task, bound, step);
      break;
    case TaskKind::forward:
    case TaskKind::loss:
    case TaskKind::backward:
      compute(task, bound, step, handle);
      break;
    case TaskKind::reduce:
      add_partial(task, bound, handle);
      break;
    case TaskKind::offload:
      offload(task, bound, step, handle);
      break;
    case TaskKind::norm:
      decide(bound, step);
      break;
    case TaskKind::load:
      if (prepares(task, step)) updates_.load(task);
      break;
    case TaskKind::optimize:
      if (prepares(task, step)) optimize(task, step);
      break;
    case TaskKind::unload:
      if (prepares(task, step)) updates_.unload(task);
      break;
    case TaskKind::commit:
      commit(task, step);
      break;
    case TaskKind::save:
      if (step.request.save_unit) step.request.save_unit(task.unit);
      break;
    case TaskKind::push:
    case TaskKind::pull:
      SPIPE_CHECK(false, "messages are the executor's");
  }
}

// Updates that the step's parameters have seen. Of a chained step it is decided by the one before; who asks waited for that.
std::uint64_t TaskRunner::version(const Step& step) const {
  if (!step.chained) return step.request.version;
  const Verdict& before = verdict(step.run - 1);
  return before.version_before + (before.updated ? 1 : 0);
}

optim::ScalerState TaskRunner::scaler(const Step& step) const {
  return step.chained ? verdict(step.run - 1).next_scaler : step.request.scaler;
}

optim::SpikeScore TaskRunner::judge(const Verdict& made, const Step& step) const {
  if (!machine_.spikes.on() || !made.counts()) return {};
  optim::SpikeHistory history = step.request.spikes;
  if (step.chained) {
    const Verdict& before = verdict(step.run - 1);
    if (before.counts()) history.add(machine_.spikes, before.loss(), before.norm.norm);
  }
  return history.judge(machine_.spikes, made.loss(), made.norm.norm);
}

void TaskRunner::check_version(const Task& task, int unit, const Step& step) const {
  SPIPE_CHECK(machine_.store->version(unit) == version(step),
              fmt::format("task {} ({}) reads version {} of {}, the step needs {}", task.id, plan::task_kind_name(task.kind),
                          machine_.store->version(unit), store_unit(unit).name, version(step)));
}

void TaskRunner::fetch(const Task& task, BoundTask& bound, const Step& step) {
  if (bound.from_store) {
    check_version(task, task.unit, step);
    bound.source = machine_.store->slab(task.unit, store::Plane::compute).data;
  }
  std::memcpy(bound.destination, bound.source, bound.copy_bytes);
  *bound.parameters[0] = {task.unit, step.run};
}

void TaskRunner::compute(const Task& task, BoundTask& bound, Step& step, StreamHandle* handle) {
  for (const ParameterTag* tag : bound.parameters) {
    SPIPE_CHECK(tag->run == step.run, fmt::format("task {} ({}) uses parameters that were not fetched in this step", task.id,
                                                  plan::task_kind_name(task.kind)));
  }
  for (const int unit : bound.in_place_units) {
    check_version(task, unit, step);
    const auto& units = machine_.shape->units[static_cast<std::size_t>(task.unit)].store_units;
    const auto at = std::find(units.begin(), units.end(), unit) - units.begin();
    bound.memory[static_cast<std::size_t>(at)].parameters = machine_.store->slab(unit, store::Plane::compute).data;
  }
  model::UnitCall& call = bound.call;
  call.stream = handle;
  call.step = step.request.step;
  if (task.kind == TaskKind::loss) {
    // Without targets every row is masked and every gradient zero, whatever the scale; the update is skipped.
    const std::uint64_t targets = step.request.targets;
    const bool evaluate = (task.flags & plan::kEvaluate) != 0;
    call.loss_scale = targets == 0 ? 1.0F : static_cast<float>(loss_scale(step) / static_cast<double>(targets));
    SPIPE_CHECK(evaluate == (call.input_gradient == nullptr), "a training loss without a place for its gradient");
    model::head_loss(*machine_.shape, call);
  } else if (task.kind == TaskKind::forward) {
    model::unit_forward(*machine_.shape, task.unit, call);
  } else {
    model::unit_backward(*machine_.shape, task.unit, call);
  }
  if (step.request.diagnose) step.diagnosis.check_compute(task, call, *machine_.shape);
}

void TaskRunner::add_partial(const Task& task, const BoundTask& bound, StreamHandle* handle) {
  for (const model::Parameter& p : store_unit(task.unit).parameters) {
    AddArgs add;
    add.a = {bound.gradients[0] + p.offset, DType::f32};
    add.b = {bound.gradients[1] + p.offset, DType::f32};
    add.out = {const_cast<float*>(bound.gradients[0]) + p.offset, DType::f32};
    add.elements = static_cast<std::int64_t>(p.elements());
    machine_.device->ops().add(handle, add);
  }
}

void TaskRunner::offload(const Task& task, const BoundTask& bound, Step& step, StreamHandle* handle) {
  const Ptr slab{bound.destination, machine_.store->format().grad};
  const auto& parameters = store_unit(task.unit).parameters;
  std::uint32_t* nonfinite = machine_.norms->nonfinite(task.unit);
  *nonfinite = 0;
  const bool checks = !machine_.checks_every_other || step.request.step % 2 == 0;
  inject_faults(task, bound, step);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const model::Parameter& p = parameters[i];
    if (optim::is_frozen(p, machine_.hyper.groups)) continue;  // its block sums stay zero
    FinishGradientArgs finish;
    finish.a = bound.gradients[0] + p.offset;
    finish.b = bound.gradients.size() > 1 ? bound.gradients[1] + p.offset : nullptr;
    finish.dst = spipe::offset(slab, static_cast<std::int64_t>(p.offset));
    finish.block_sums = checks ? machine_.norms->blocks(task.unit, i) : nullptr;
    finish.nonfinite = nonfinite;
    finish.elements = static_cast<std::int64_t>(p.elements());
    machine_.device->host_ops().finish_gradient(handle, finish);
  }
  if (step.request.diagnose && *nonfinite != 0) {
    step.diagnosis.report(task, fmt::format("the summed gradient of {}", store_unit(task.unit).name));
  }
}

// Whoever asks for faults gives them to every rank, so it is known where the sums lie: in memory of this rank's, or in a
// mailbox that nobody reads after this.
void TaskRunner::inject_faults(const Task& task, const BoundTask& bound, const Step& step) const {
  for (const GradientFault& fault : machine_.gradient_faults) {
    if (fault.step != step.request.step || fault.unit != task.unit) continue;
    for (const float* gradient : bound.gradients) {
      for (const model::Parameter& p : store_unit(task.unit).parameters) {
        float* values = const_cast<float*>(gradient) + p.offset;
        for (std::uint64_t i = 0; i < p.elements(); ++i) values[i] *= fault.factor;
      }
    }
  }
}

void TaskRunner::bring_losses(const Task& task, const BoundTask& bound, Step& step) {
  std::memcpy(bound.destination, bound.source, bound.copy_bytes);
  const auto* losses = static_cast<const float*>(bound.destination);
  double sum = 0;
  for (std::int64_t i = 0; i < machine_.shape->tokens_per_micro(); ++i) sum += static_cast<double>(losses[i]);
  area_.losses[static_cast<std::size_t>(task.micro_batch)] = sum;
  if (!std::isfinite(sum) && step.request.diagnose) step.diagnosis.report_loss(task.micro_batch);
}

// What signals asked of the ranks of this host: the same answer for a run whoever asks first.
std::uint32_t TaskRunner::asked(std::uint64_t run) {
  if (machine_.asked == nullptr) return 0;
  const std::scoped_lock lock(asked_mutex_);
  if (asked_run_ != run) {
    asked_run_ = run;
    asked_bits_ = machine_.asked->exchange(0, std::memory_order_relaxed);
  }
  return asked_bits_;
}

std::span<std::byte> TaskRunner::pack_norm(const Task& push, const Step& step) {
  const BoundTask& bound = bound_.task(push.id);
  const std::span<std::byte> parts = bound.message.subspan(step.run % 2 * push.bytes, push.bytes);
  const std::uint64_t bits = asked(step.run);
  std::byte* at = parts.data();
  const auto put = [&at](const void* data, std::size_t bytes) {
    std::memcpy(at, data, bytes);
    at += bytes;
  };
  put(&bits, sizeof(bits));
  for (const NormItem& item : bound.norm_items) {
    if (item.unit >= 0) {
      const auto part = machine_.norms->part(item.unit);
      put(part.data(), part.size());
    } else {
      put(&area_.losses[static_cast<std::size_t>(item.micro_batch)], sizeof(double));
    }
  }
  return parts;
}

void TaskRunner::take_parts(const NormParts& parts, std::uint32_t& asked) {
  const std::byte* at = parts.data;
  const auto take = [&at](void* data, std::size_t bytes) {
    std::memcpy(data, at, bytes);
    at += bytes;
  };
  std::uint64_t bits = 0;
  take(&bits, sizeof(bits));
  asked |= static_cast<std::uint32_t>(bits);
  for (const NormItem& item : parts.items) {
    if (item.unit >= 0) {
      const auto part = machine_.norms->part(item.unit);
      take(part.data(), part.size());
    } else {
      take(&area_.losses[static_cast<std::size_t>(item.micro_batch)], sizeof(double));
    }
  }
}

void TaskRunner::wait_for_readers(std::uint64_t run) const {
  if (run <= kVerdicts) return;
  for (const Counter& seen : area_.seen) {
    (void)seen.wait(run - kVerdicts, machine_.world == nullptr ? nullptr : machine_.world->stop());
  }
}

// The norm task of a host: it runs when all token losses and all gradient blocks are there (the plan orders it so). All hosts
// add up the same numbers in the same order, so all come to the same verdict.
void TaskRunner::decide(const BoundTask& bound, Step& step) {
  wait_for_readers(step.run);
  Verdict made;
  // A host whose share does not travel cannot make others heed its signals.
  if (plan_.hosts() == 1 || sends_norm_) made.asked = asked(step.run);
  for (const NormParts& parts : bound.norm_parts) take_parts(parts, made.asked);
  for (const double loss : area_.losses) made.loss_sum += loss;
  const std::span<double> unit_norms = area_.unit_norms_of(step.run);
  made.norm = machine_.norms->combine(unit_norms);
  made.scaler = scaler(step);
  made.norm.norm /= made.scaler.scale;  // exact: a power of two
  for (double& norm : unit_norms) norm /= made.scaler.scale;
  made.version_before = version(step);
  const bool halted_before = step.chained && verdict(step.run - 1).halted;
  const bool avoidable = made.overflow() && !optim::at_minimum(machine_.loss_scaling, made.scaler);
  made.halted = halted_before || (step.request.stop_on_nonfinite && !made.finite() && !avoidable);
  made.targets = step.request.targets;
  made.spike = judge(made, step);
  made.updated = made.counts() && !made.spike.spike() && !step.request.diagnose;
  if (made.updated) made.clip = optim::clip_factor(made.norm.norm, machine_.grad_clip);
  const bool tells = step.request.targets > 0 && std::isfinite(made.loss_sum) && !halted_before;
  made.next_scaler = tells ? optim::after_step(machine_.loss_scaling, made.scaler, made.overflow()) : made.scaler;
  verdict(step.run) = made;
}

// Speculation does not ask for the verdict.
bool TaskRunner::prepares(const Task& task, const Step& step) const {
  if ((task.flags & plan::kSpeculate) != 0) return !step.request.diagnose;
  return verdict(step.run).updated;
}

optim::UpdateScalars TaskRunner::scalars(const Step& step, double clip) const {
  const std::uint64_t before = version(step);
  return {.lr = step.request.lr(before), .grad_scale = clip / loss_scale(step), .t = static_cast<std::int64_t>(before) + 1};
}

void TaskRunner::optimize(const Task& task, Step& step) {
  const bool speculates = (task.flags & plan::kSpeculate) != 0;
  updates_.optimize(task, scalars(step, speculates ? 1.0 : verdict(step.run).clip), &step.nonfinite_master);
}

// What was made as if nothing were clipped or skipped stands only if nothing is. Otherwise the old slot stands: for good, or
// for the right update to be made from it.
void TaskRunner::commit(const Task& task, Step& step) {
  const Verdict& made = verdict(step.run);
  const bool speculated = (task.flags & plan::kSpeculate) != 0 && !step.request.diagnose;
  const bool clipped = made.updated && made.clip != 1;
  if (speculated && (clipped || !made.updated)) ++step.taken_back;
  if (!made.updated) return;
  const bool keeps = machine_.keeps_speculation && *machine_.keeps_speculation == step.request.step;
  updates_.commit(task, scalars(step, made.clip), made.version_before + 1, speculated && clipped && !keeps,
                  &step.nonfinite_master);
}

}  // namespace spipe::exec
