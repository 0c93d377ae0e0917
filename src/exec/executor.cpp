#include "spipe/exec/executor.h"

#include <fmt/core.h>

#include <chrono>
#include <cmath>
#include <cstring>

#include "bound_plan.h"
#include "diagnose.h"
#include "spipe/base/error.h"

namespace spipe::exec {

using plan::StreamKind;
using plan::Task;
using plan::TaskKind;

namespace {

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void StreamTimes::on_task(const Task& task, std::int64_t begin_ns, std::int64_t end_ns) {
  const auto stream = static_cast<std::size_t>(task.stream);
  nanoseconds_[stream].fetch_add(end_ns - begin_ns, std::memory_order_relaxed);
  bytes_[stream].fetch_add(task.bytes, std::memory_order_relaxed);
}

double StreamTimes::busy_seconds(StreamKind stream) const {
  return 1e-9 * static_cast<double>(nanoseconds_[static_cast<std::size_t>(stream)].load(std::memory_order_relaxed));
}

std::uint64_t StreamTimes::bytes(StreamKind stream) const {
  return bytes_[static_cast<std::size_t>(stream)].load(std::memory_order_relaxed);
}

void StreamTimes::reset() {
  for (auto& value : nanoseconds_) value.store(0, std::memory_order_relaxed);
  for (auto& value : bytes_) value.store(0, std::memory_order_relaxed);
}

struct Executor::Impl {
  const plan::Plan& plan;
  const Machine& machine;
  BoundPlan bound;
  device::ErrorCollector errors;
  std::vector<Counter> done;             // per task: the last run in which it ended
  std::vector<std::uint8_t> waited_for;  // tasks somebody waits for, and the last of every stream
  std::array<std::unique_ptr<device::Stream>, plan::kStreamCount> streams;
  std::uint64_t run_index = 0;

  // The running step.
  StepRequest request;
  StepResult result;
  optim::UpdateScalars scalars;
  std::uint32_t nonfinite_master = 0;
  Diagnosis diagnosis;

  Impl(const plan::Plan& p, const Machine& m)
      : plan(p), machine(m), bound(p, m), done(p.tasks.size()), waited_for(p.tasks.size(), 0) {
    for (const plan::Wait& wait : plan.waits) waited_for[wait.task] = 1;
    for (const Task& task : plan.tasks) {
      SPIPE_CHECK(task.rank == 0, "a plan of several ranks on one process");
      auto& stream = streams[static_cast<std::size_t>(task.stream)];
      if (!stream) stream = machine.device->make_stream(plan::stream_name(task.stream), errors);
    }
  }

  ~Impl() {
    for (auto& stream : streams) stream.reset();  // streams join before what they use goes
  }

  void enqueue(const Task& task) {
    device::Stream& stream = *streams[static_cast<std::size_t>(task.stream)];
    for (std::uint32_t i = 0; i < task.wait_count; ++i) {
      const plan::Wait& wait = plan.waits[task.first_wait + i];
      // Steps end before the next begins, so a wait for the previous step is already met; its counter says so.
      const std::uint64_t value = wait.previous_step ? run_index - 1 : run_index;
      if (value > 0) stream.wait(&done[wait.task], value);
    }
    stream.run([this, &task](StreamHandle* handle) { execute(task, handle); });
    if (waited_for[task.id] != 0) stream.signal(&done[task.id], run_index);
  }

  void execute(const Task& task, StreamHandle* handle) {
    const std::int64_t begin = now_ns();
    perform(task, handle);
    const std::int64_t end = now_ns();
    for (plan::TaskObserver* observer : machine.observers) observer->on_task(task, begin, end);
  }

  void perform(const Task& task, StreamHandle* handle) {
    BoundTask& b = bound.task(task.id);
    switch (task.kind) {
      case TaskKind::input:
      case TaskKind::park:
      case TaskKind::unpark:
      case TaskKind::result:
        std::memcpy(b.destination, b.source, b.copy_bytes);
        break;
      case TaskKind::fetch:
        check_version(task, task.unit);
        std::memcpy(b.destination, b.source, b.copy_bytes);
        *b.parameters[0] = {task.unit, request.version};
        break;
      case TaskKind::forward:
      case TaskKind::loss:
      case TaskKind::backward:
        compute(task, b, handle);
        break;
      case TaskKind::reduce:
        add_partial(task, b, handle);
        break;
      case TaskKind::offload:
        offload(task, b, handle);
        break;
      case TaskKind::norm:
        decide();
        break;
      case TaskKind::optimize:
        if (result.updated) {
          optim::update_unit(machine.device->host_ops(), store_unit(task.unit), *machine.store, task.unit, machine.hyper,
                             scalars, &nonfinite_master);
        }
        break;
      case TaskKind::commit:
        if (result.updated) machine.store->set_version(task.unit, request.version + 1);
        break;
      case TaskKind::save:
        if (request.save_unit) request.save_unit(task.unit);
        break;
      case TaskKind::send:
      case TaskKind::recv:
      case TaskKind::push:
      case TaskKind::pull:
        SPIPE_CHECK(false, "binding refuses plans of several ranks");
    }
  }

  [[nodiscard]] const model::StoreUnit& store_unit(int unit) const {
    return machine.shape->store_units[static_cast<std::size_t>(unit)];
  }

  void check_version(const Task& task, int unit) const {
    SPIPE_CHECK(machine.store->version(unit) == request.version,
                fmt::format("task {} ({}) reads version {} of {}, the step needs {}", task.id, plan::task_kind_name(task.kind),
                            machine.store->version(unit), store_unit(unit).name, request.version));
  }

  void compute(const Task& task, BoundTask& b, StreamHandle* handle) {
    for (const ParameterTag* tag : b.parameters) {
      SPIPE_CHECK(tag->version == request.version,
                  fmt::format("task {} ({}) uses parameters that were not fetched in this step", task.id,
                              plan::task_kind_name(task.kind)));
    }
    for (const int unit : b.in_place_units) check_version(task, unit);
    model::UnitCall& call = b.call;
    call.stream = handle;
    call.step = request.step;
    if (task.kind == TaskKind::loss) {
      // Without targets every row is masked and every gradient zero, whatever the scale; the update is skipped.
      const bool evaluate = (task.flags & plan::kEvaluate) != 0;
      call.loss_scale = request.targets == 0 ? 1.0F : static_cast<float>(1.0 / static_cast<double>(request.targets));
      SPIPE_CHECK(evaluate == (call.input_gradient == nullptr), "a training loss without a place for its gradient");
      model::head_loss(*machine.shape, call);
    } else if (task.kind == TaskKind::forward) {
      model::unit_forward(*machine.shape, task.unit, call);
    } else {
      model::unit_backward(*machine.shape, task.unit, call);
    }
    if (request.diagnose) diagnosis.check_compute(task, call, *machine.shape);
  }

  void add_partial(const Task& task, const BoundTask& b, StreamHandle* handle) {
    for (const model::Parameter& p : store_unit(task.unit).parameters) {
      AddArgs add;
      add.a = {b.gradients[0] + p.offset, DType::f32};
      add.b = {b.gradients[1] + p.offset, DType::f32};
      add.out = {const_cast<float*>(b.gradients[0]) + p.offset, DType::f32};
      add.elements = static_cast<std::int64_t>(p.elements());
      machine.device->ops().add(handle, add);
    }
  }

  void offload(const Task& task, const BoundTask& b, StreamHandle* handle) {
    const Ptr slab{b.destination, machine.store->format().grad};
    const auto& parameters = store_unit(task.unit).parameters;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const model::Parameter& p = parameters[i];
      FinishGradientArgs finish;
      finish.a = b.gradients[0] + p.offset;
      finish.b = b.gradients.size() > 1 ? b.gradients[1] + p.offset : nullptr;
      finish.dst = spipe::offset(slab, static_cast<std::int64_t>(p.offset));
      finish.block_sums = machine.norms->blocks(task.unit, i);
      finish.nonfinite = machine.norms->nonfinite(task.unit);
      finish.elements = static_cast<std::int64_t>(p.elements());
      machine.device->host_ops().finish_gradient(handle, finish);
    }
    if (request.diagnose && *machine.norms->nonfinite(task.unit) != 0) {
      diagnosis.report(task, fmt::format("the summed gradient of {}", store_unit(task.unit).name));
    }
  }

  // The norm task reads every token loss and every gradient block (the plan orders it so): the step's verdict is made here.
  void decide() {
    sum_losses();
    result.norm = machine.norms->combine();
    const bool finite = result.norm.finite && std::isfinite(result.loss_sum);
    result.updated = finite && request.targets > 0 && !request.diagnose;
    if (!result.updated) return;
    result.clip = optim::clip_factor(result.norm.norm, machine.grad_clip);
    scalars.lr = request.lr;
    scalars.grad_scale = result.clip;
    scalars.t = static_cast<std::int64_t>(request.version) + 1;
  }

  void sum_losses() {
    result.loss_sum = 0;
    const auto tokens = static_cast<std::size_t>(machine.shape->tokens_per_micro());
    const HostStaging& staging = bound.staging();
    for (std::size_t m = 0; m < static_cast<std::size_t>(plan.options.micro_batches); ++m) {
      double sum = 0;
      for (std::size_t i = 0; i < tokens; ++i) sum += static_cast<double>(staging.losses[m * tokens + i]);
      result.loss_sum += sum;
      if (!std::isfinite(sum) && request.diagnose) diagnosis.report_loss(static_cast<int>(m));
    }
  }
};

Executor::Executor(const plan::Plan& plan, const Machine& machine) : impl_(std::make_unique<Impl>(plan, machine)) {}
Executor::~Executor() = default;

std::int32_t* Executor::tokens(int micro_batch) {
  const auto tokens = static_cast<std::size_t>(impl_->machine.shape->tokens_per_micro());
  return impl_->bound.staging().inputs.data() + static_cast<std::size_t>(micro_batch) * 2 * tokens;
}

std::int32_t* Executor::targets(int micro_batch) { return tokens(micro_batch) + impl_->machine.shape->tokens_per_micro(); }

const float* Executor::token_losses(int micro_batch) const {
  const auto tokens = static_cast<std::size_t>(impl_->machine.shape->tokens_per_micro());
  return impl_->bound.staging().losses.data() + static_cast<std::size_t>(micro_batch) * tokens;
}

StepResult Executor::run(const StepRequest& request) {
  Impl& impl = *impl_;
  impl.request = request;
  impl.result = {};
  impl.diagnosis = {};
  impl.nonfinite_master = 0;
  ++impl.run_index;
  impl.bound.forget_parameters();
  impl.machine.norms->clear();
  for (const Task& task : impl.plan.tasks) impl.enqueue(task);
  for (auto& stream : impl.streams) {
    if (stream) stream->drain();
  }
  impl.errors.rethrow();
  if (impl.plan.options.evaluate) impl.sum_losses();
  impl.result.nonfinite_master = impl.nonfinite_master != 0;
  impl.result.first_nonfinite = impl.diagnosis.text();
  return impl.result;
}

std::uint64_t executor_host_bytes(const plan::Plan& plan, const model::ModelShape& shape) {
  const auto tokens = static_cast<std::uint64_t>(shape.tokens_per_micro());
  const auto micro_batches = static_cast<std::uint64_t>(plan.options.micro_batches);
  return micro_batches * tokens * (2 * sizeof(std::int32_t) + sizeof(float)) +
         plan.tasks.size() * (sizeof(Counter) + sizeof(BoundTask));
}

}  // namespace spipe::exec
