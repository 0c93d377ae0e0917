#include "support.h"

#include <algorithm>
#include <catch2/catch.hpp>

namespace spipe::plan::testing {

model::ModelShape small_shape(const SmallModel& small) {
  model::Architecture a;
  a.vocab_size = small.vocab;
  a.hidden_size = small.hidden;
  a.layers = small.layers;
  a.heads = a.kv_heads = 2;
  a.head_dim = small.hidden / 2;
  a.ffn_size = small.ffn;
  a.tied_embeddings = small.tied;
  if (small.learned_positions) {
    a.family = model::Family::gpt2;
    a.position = model::PositionKind::learned;
    a.max_positions = small.seq_len;
    a.norm = model::NormKind::layernorm;
    a.mlp = model::MlpKind::gelu_tanh;
    a.fused_qkv = a.conv1d = a.qkv_bias = a.out_bias = a.mlp_bias = true;
  }
  return model::make_shape(a, {.micro = small.micro, .seq_len = small.seq_len, .head_chunk = 16}, DType::f32);
}

std::vector<int> every(int step, int end) {
  std::vector<int> cuts;
  for (int u = 0; u < end; u += step) cuts.push_back(u);
  return cuts;
}

ScheduleOptions streamed(const model::ModelShape& shape, int forward_step, int backward_step, int micro_batches,
                         bool recompute) {
  ScheduleOptions options;
  options.residency = Residency::streamed;
  options.forward_cuts = every(forward_step, shape.unit_count());
  options.backward_cuts = every(backward_step, shape.unit_count());
  options.micro_batches = micro_batches;
  options.recompute = recompute;
  return options;
}

ScheduleOptions in_place(int micro_batches, bool recompute) {
  ScheduleOptions options;
  options.micro_batches = micro_batches;
  options.recompute = recompute;
  return options;
}

std::uint32_t find_task(const Plan& plan, const std::function<bool(const Task&)>& matches) {
  const auto found = std::find_if(plan.tasks.begin(), plan.tasks.end(), matches);
  REQUIRE(found != plan.tasks.end());
  return found->id;
}

std::uint32_t find_task(const Plan& plan, TaskKind kind, int unit, int micro_batch) {
  return find_task(plan, [&](const Task& task) {
    return task.kind == kind && task.unit == unit && (micro_batch < 0 || task.micro_batch == micro_batch);
  });
}

std::uint32_t last_task(const Plan& plan, TaskKind kind) {
  const auto found = std::find_if(plan.tasks.rbegin(), plan.tasks.rend(), [&](const Task& t) { return t.kind == kind; });
  REQUIRE(found != plan.tasks.rend());
  return found->id;
}

namespace {

// Rewrites the plan with tasks in the given order (an old id may be left out or come twice; its second copy has no waits).
void reorder(Plan& plan, const std::vector<std::uint32_t>& order, std::uint32_t without_waits) {
  constexpr std::uint32_t kGone = UINT32_MAX;
  std::vector<std::uint32_t> new_id(plan.tasks.size(), kGone);
  for (std::uint32_t i = 0; i < order.size(); ++i) {
    if (i != without_waits || new_id[order[i]] == kGone) new_id[order[i]] = i;
  }
  std::vector<Task> tasks;
  std::vector<Wait> waits;
  for (std::uint32_t i = 0; i < order.size(); ++i) {
    Task task = plan.tasks[order[i]];
    const std::uint32_t first = task.first_wait, count = task.wait_count;
    task.id = i;
    if (task.peer != kNoPeer && new_id[task.peer] != kGone) task.peer = new_id[task.peer];
    task.first_wait = static_cast<std::uint32_t>(waits.size());
    task.wait_count = 0;
    for (std::uint32_t w = 0; w < count && i != without_waits; ++w) {
      Wait wait = plan.waits[first + w];
      if (new_id[wait.task] == kGone) continue;
      wait.task = new_id[wait.task];
      waits.push_back(wait);
      ++task.wait_count;
    }
    tasks.push_back(task);
  }
  plan.tasks = tasks;
  plan.waits = waits;
}

std::vector<std::uint32_t> identity(const Plan& plan) {
  std::vector<std::uint32_t> order;
  for (const Task& task : plan.tasks) order.push_back(task.id);
  return order;
}

}  // namespace

void remove_task(Plan& plan, std::uint32_t id) {
  std::vector<std::uint32_t> order = identity(plan);
  order.erase(order.begin() + id);
  reorder(plan, order, UINT32_MAX);
}

void insert_copy(Plan& plan, std::uint32_t id, std::uint32_t at) {
  std::vector<std::uint32_t> order = identity(plan);
  order.insert(order.begin() + at, id);
  reorder(plan, order, at);
}

void move_task(Plan& plan, std::uint32_t id, std::uint32_t at) {
  std::vector<std::uint32_t> order = identity(plan);
  order.erase(order.begin() + id);
  order.insert(order.begin() + at, id);
  reorder(plan, order, at);
}

void swap_tasks(Plan& plan, std::uint32_t a, std::uint32_t b) {
  std::swap(plan.tasks[a], plan.tasks[b]);
  for (const auto& [here, there] : {std::pair{a, b}, std::pair{b, a}}) plan.tasks[here].id = here;
  std::swap(plan.tasks[a].first_wait, plan.tasks[b].first_wait);
  std::swap(plan.tasks[a].wait_count, plan.tasks[b].wait_count);
}

void drop_wait(Plan& plan, std::uint32_t id, std::uint32_t index) {
  Task& task = plan.tasks[id];
  REQUIRE(index < task.wait_count);
  std::swap(plan.waits[task.first_wait + index], plan.waits[task.first_wait + task.wait_count - 1U]);
  --task.wait_count;
}

void drop_waits(Plan& plan, std::uint32_t id, const std::function<bool(const Wait&)>& matches) {
  bool dropped = false;
  for (std::uint32_t i = plan.tasks[id].wait_count; i-- > 0;) {
    if (!matches(plan.waits[plan.tasks[id].first_wait + i])) continue;
    drop_wait(plan, id, i);
    dropped = true;
  }
  REQUIRE(dropped);
}

void add_wait(Plan& plan, std::uint32_t id, Wait wait) {
  Task& task = plan.tasks[id];
  std::vector<Wait> own(plan.waits.begin() + task.first_wait, plan.waits.begin() + task.first_wait + task.wait_count);
  own.push_back(wait);
  task.first_wait = static_cast<std::uint32_t>(plan.waits.size());
  ++task.wait_count;
  plan.waits.insert(plan.waits.end(), own.begin(), own.end());
}

Use& use_of(Plan& plan, std::uint32_t id, BufferKind kind) {
  const Task& task = plan.tasks[id];
  for (std::uint32_t i = 0; i < task.use_count; ++i) {
    Use& use = plan.uses[task.first_use + i];
    if (plan.buffers[use.buffer].kind == kind) return use;
  }
  FAIL("the task uses no buffer of this kind");
  throw 0;
}

}  // namespace spipe::plan::testing
