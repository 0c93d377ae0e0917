#include "paper_rows.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <tuple>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/plan/schedules.h"

namespace spipe::bench {

namespace {

constexpr int kVocabulary = 50304;  // 50,257 padded
constexpr int kForwardStages = 2;

std::optional<double> optional_number(const std::string& text) {
  if (text.empty()) return std::nullopt;
  return std::stod(text);
}

}  // namespace

std::vector<Row> read_rows(const std::string& file) {
  std::istringstream lines(read_text(file));
  std::string line;
  std::getline(lines, line);
  std::vector<Row> rows;
  for (int number = 2; std::getline(lines, line); ++number) {
    while (!line.empty() && line.back() == '\r') line.pop_back();
    std::vector<std::string> cells;
    std::istringstream parts(line);
    for (std::string cell; std::getline(parts, cell, ',');) cells.push_back(cell);
    cells.resize(17);
    try {
      Row row;
      row.figure = std::stoi(cells[0]);
      row.cluster = cells[1];
      row.system = cells[2];
      int* const counts[] = {&row.size_b,  &row.layers, &row.hidden,        &row.ffn,         &row.heads,
                             &row.seq_len, &row.nodes,  &row.gpus_per_node, &row.micro_batch, &row.global_batch};
      for (std::size_t i = 0; i < std::size(counts); ++i) *counts[i] = std::stoi(cells[3 + i]);
      row.elapsed_ms = optional_number(cells[13]);
      row.latency_ms = optional_number(cells[14]);
      row.failure = cells[16];
      rows.push_back(row);
    } catch (const std::logic_error&) {
      throw Error("not a row of figures", file + ":" + std::to_string(number));
    }
  }
  return rows;
}

bool is_evaluation(const Row& row) {
  if ((row.figure != 9 && row.figure != 10) || row.system == "DeepSpeed") return false;
  return !(row.figure == 10 && row.size_b == 110 && row.seq_len == 1024);
}

model::ModelShape published_shape(const Row& row) {
  model::Architecture a;
  a.family = model::Family::llama;
  a.vocab_size = kVocabulary;
  a.hidden_size = row.hidden;
  a.layers = row.layers;
  a.heads = a.kv_heads = row.heads;
  a.head_dim = row.hidden / row.heads;
  a.ffn_size = row.ffn;
  a.max_positions = row.seq_len;
  model::ModelShape shape = model::make_shape(
      a, {.micro = row.micro_batch, .seq_len = row.seq_len, .head_chunk = row.micro_batch * row.seq_len}, DType::f16);
  const double tokens = static_cast<double>(shape.tokens_per_micro()), hidden = row.hidden;
  const double forward = 2 * tokens * hidden * (4 * hidden + 3.0 * row.ffn) + 4 * tokens * row.seq_len * hidden;
  for (model::ComputeUnit& unit : shape.units) {
    if (unit.kind != model::UnitKind::layer) continue;
    unit.forward_flops = forward;
    unit.backward_flops = 2 * forward;
  }
  return shape;
}

namespace {

// Stages of equal layers; the embedding goes with the first, the head with the last.
std::vector<int> cuts(const Row& row, int stages) {
  std::vector<int> list = {0};
  for (int i = 1; i < stages; ++i) list.push_back(1 + i * row.layers / stages);
  return list;
}

using ExtraWaits = std::multimap<std::uint32_t, std::uint32_t>;  // task -> task of the same step that it waits for

void add_waits(plan::Plan& plan, const ExtraWaits& extra) {
  std::vector<plan::Wait> waits;
  for (plan::Task& task : plan.tasks) {
    const auto first = static_cast<std::uint32_t>(waits.size());
    waits.insert(waits.end(), plan.waits.begin() + task.first_wait, plan.waits.begin() + task.first_wait + task.wait_count);
    const auto [begin, end] = extra.equal_range(task.id);
    for (auto at = begin; at != end; ++at) waits.push_back({at->second, false});
    task.first_wait = first;
    task.wait_count = static_cast<std::uint16_t>(waits.size() - first);
  }
  plan.waits = std::move(waits);
}

bool computes_a_unit(const plan::Task& task) {
  return task.kind == plan::TaskKind::forward || task.kind == plan::TaskKind::loss || task.kind == plan::TaskKind::backward;
}
bool in_backward_stage(const plan::Task& task) {
  return task.kind != plan::TaskKind::forward || (task.flags & plan::kRecompute) != 0;
}

// The published code computes with a stage when all its parameters are there; plans begin with the first unit that is.
void wait_for_whole_stages(plan::Plan& plan) {
  struct Run {
    bool backward = false;
    int stage = -1;
    std::uint32_t first_task = 0, last_fetch = 0;
  };
  std::vector<std::uint32_t> fetch_of(plan.buffers.size(), 0);
  std::vector<Run> runs(static_cast<std::size_t>(plan.ranks));
  ExtraWaits extra;
  const auto close = [&](const Run& run) {
    if (run.last_fetch > 0) extra.emplace(run.first_task, run.last_fetch);
  };
  for (const plan::Task& task : plan.tasks) {
    if (task.kind == plan::TaskKind::fetch) fetch_of[plan.uses[task.first_use + 1].buffer] = task.id;
    if (!computes_a_unit(task)) continue;
    Run& run = runs[task.rank];
    if (run.backward != in_backward_stage(task) || run.stage != task.stage) {
      close(run);
      run = {in_backward_stage(task), task.stage, task.id, 0};
    }
    for (std::uint32_t u = 0; u < task.use_count; ++u) {
      run.last_fetch = std::max(run.last_fetch, fetch_of[plan.uses[task.first_use + u].buffer]);
    }
  }
  for (const Run& run : runs) close(run);
  add_waits(plan, extra);
}

plan::Plan make_plan(const Row& row, const model::ModelShape& shape, const Ablation& how) {
  plan::PipelineInput input;
  input.shape = &shape;
  input.compute_dtype_size = input.grad_dtype_size = 2;
  input.ranks = row.ranks();
  for (int r = 0; r < row.ranks(); ++r) input.host_of_rank.push_back(r / row.gpus_per_node);
  input.micro_batches = row.micro_batches();
  input.backward_cuts = cuts(row, how.backward_stages * row.ranks());
  if (std::string(how.schedule) == "spipe") input.forward_cuts = cuts(row, kForwardStages * row.ranks());
  input.prefetch = how.prefetch;
  input.fuse_last = false;
  input.barrier_between_steps = true;
  if (how.early_updates) input.updates = plan::update_ways(shape, {.speculate = 1});
  plan::Plan plan = plan::make_schedule(how.schedule, input);
  wait_for_whole_stages(plan);
  return plan;
}

// Visits of every rank in order, as the last compute task of each.
std::vector<std::vector<std::uint32_t>> visits_of(const plan::Plan& plan) {
  std::vector<std::vector<std::uint32_t>> visits(static_cast<std::size_t>(plan.ranks));
  std::vector<std::tuple<bool, int, int>> at(visits.size(), {false, -1, -1});
  for (const plan::Task& task : plan.tasks) {
    if (task.kind != plan::TaskKind::forward && task.kind != plan::TaskKind::loss && task.kind != plan::TaskKind::backward)
      continue;
    const bool backward = task.kind != plan::TaskKind::forward || (task.flags & plan::kRecompute) != 0;
    const std::tuple<bool, int, int> key = {backward, task.stage, task.micro_batch};
    if (at[task.rank] != key) visits[task.rank].push_back(task.id);
    at[task.rank] = key;
    visits[task.rank].back() = task.id;
  }
  return visits;
}

// The published code's simpler transport: the rank that ran a checkpoint's forward stage sends it in the tick before its use,
// after the visit that it runs then; the receiver waits for it after its own visit of that tick.
void send_checkpoints_late(plan::Plan& plan, const Row& row, const Ablation& how) {
  const int ranks = plan.ranks, micro_batches = row.micro_batches();
  const auto visits = visits_of(plan);
  const std::vector<int> forward = cuts(row, kForwardStages * ranks), backward = cuts(row, how.backward_stages * ranks);
  const auto stage_at = [](const std::vector<int>& list, int unit) {
    return static_cast<int>(std::upper_bound(list.begin(), list.end(), unit) - list.begin()) - 1;
  };
  ExtraWaits extra;
  for (const plan::Task& task : plan.tasks) {
    if (task.kind != plan::TaskKind::recv) continue;
    const plan::Buffer& target = plan.buffers[plan.uses[task.first_use + 1].buffer];
    const int stage = stage_at(backward, target.unit);
    const bool checkpoint = target.kind == plan::BufferKind::boundary &&
                            backward[static_cast<std::size_t>(stage)] == target.unit && ranks - 1 - stage % ranks == task.rank;
    if (!checkpoint) continue;
    const int sender = stage_at(forward, target.unit) % ranks;
    const int visit = (how.backward_stages - 1 - stage / ranks) * micro_batches + target.micro_batch;
    const auto& list = visits[static_cast<std::size_t>(sender)];
    const int tick = task.rank + kForwardStages * micro_batches - 1 + visit - sender;
    const auto visit_then = list[static_cast<std::size_t>(std::clamp(tick, 0, static_cast<int>(list.size()) - 1))];
    extra.emplace(task.id, visit_then);
    const auto& own = visits[task.rank];
    extra.emplace(task.id, own[static_cast<std::size_t>(kForwardStages * micro_batches - 1 + visit)]);
  }
  add_waits(plan, extra);
}

}  // namespace

plan::Plan published_plan(const Row& row, const model::ModelShape& shape) {
  if (row.system == "SPipe") return make_plan(row, shape, {"", "spipe", 6, 1, false, true});
  return make_plan(row, shape, {"", row.system == "Mobius" ? "mobius" : "1f1b", kForwardStages, 1, false, false});
}

std::optional<Ablation> ablation_of(const std::string& system) {
  static const std::map<std::string, Ablation> steps = {
      {"CFG0", {"Mobius, a stage fetched when the last is done", "mobius", 2, 0, false, false}},
      {"CFG1", {"Mobius, prefetched", "mobius", 2, 1, false, false}},
      {"CFG2", {"decoupled passes, 2 + 2 stages, late checkpoints", "spipe", 2, 1, true, false}},
      {"CFG3", {"2 + 6 stages", "spipe", 6, 1, true, false}},
      {"CFG4", {"checkpoints sent when made", "spipe", 6, 1, false, false}},
      {"CFG5", {"updates during the pass", "spipe", 6, 1, false, true}}};
  const auto found = steps.find(system);
  if (found == steps.end()) return std::nullopt;
  return found->second;
}

plan::Plan ablation_plan(const Row& row, const model::ModelShape& shape, const Ablation& ablation) {
  plan::Plan plan = make_plan(row, shape, ablation);
  if (ablation.checkpoints_late) send_checkpoints_late(plan, row, ablation);
  return plan;
}

// 16-bit parameters of two stages; of the backward stage at hand 16-bit gradients and all activations of one micro-batch, or at
// its end the gradients twice (the copy that is reduced); checkpoints wait where they are used; tensors that a rank's next
// stage will take queue up.
double published_device_bytes(const Row& row) {
  constexpr double kActivations = 34;         // bytes a token and hidden element that a layer keeps, with 16-bit elements
  constexpr double kReserve = 2.94 * 0x1p30;  // driver, libraries, communicators, what the allocator cannot use
  const bool spipe = row.system == "SPipe";
  const double ranks = row.ranks(), hidden = row.hidden, micro_batches = row.micro_batches();
  const double tokens = static_cast<double>(row.micro_batch) * row.seq_len;
  const double layer = 4 * hidden * hidden + 3 * hidden * row.ffn, table = kVocabulary * hidden;
  const int backward_stages = spipe ? 6 : kForwardStages;
  const double forward_stage = row.layers / (kForwardStages * ranks) * layer,
               backward_layers = row.layers / (backward_stages * ranks);
  const double backward_stage = backward_layers * layer;
  const double boundary = tokens * hidden * 2;
  const double checkpoints = backward_stages * micro_batches * boundary,
               queue = std::max(0.0, micro_batches - ranks) * boundary;
  const double forward = 2 * 2 * forward_stage + 2 * table + checkpoints + queue;
  const double head = 2 * 2 * table + tokens * kVocabulary * (2 + 4 + 2);
  const double live = std::max(kActivations * tokens * hidden * backward_layers, 2 * backward_stage);
  const double backward = (2 + 1) * 2 * backward_stage + live + checkpoints + queue + head;
  return std::max(forward, backward) + kReserve;
}

}  // namespace spipe::bench
