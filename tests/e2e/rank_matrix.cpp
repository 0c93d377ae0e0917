// Schedule invariance over ranks: `rank_matrix cover|full|random` under mpirun trains tiny models for five steps in every cell
// of {model} x {schedule, replicas} x {stages} x {micro-batches} x {budget} (all, a pairwise cover, or any stage counts and
// numbers of micro-batches) with the ranks and hosts it was started with, and compares losses, norms, evaluation and final
// state with one resident rank, bit for bit. Refused cells must have a known reason. Prints a table of what was run; ends with
// 0 when all of it held.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <set>

#include "covering.h"
#include "rank_runs.h"
#include "spipe/base/log.h"
#include "spipe/base/random.h"

namespace spipe::test {
namespace {

// What a cell is made of, by the choices of its row.
constexpr const char* kSchedules[] = {"spipe",        "mobius",       "1f1b",          "gpipe", "roundpipe",
                                      "streaming-dp", "spipe data 2", "mobius data 2", "auto"};
// Untied with grouped KV heads; tied, with dropout; the first in bf16; and in fp16, where two of the steps overflow.
constexpr const char* kModels[] = {"llama", "gpt2", "bf16", "fp16"};
constexpr const char* kStages[] = {"N/N", "N+1/2N-1", "finest"};
constexpr const char* kMicroBatches[] = {"M<N", "M=N", "M=2N", "M odd"};
constexpr const char* kBudgets[] = {"roomy", "tight"};
const std::vector<std::size_t> kChoices = {std::size(kModels), std::size(kSchedules), std::size(kStages),
                                           std::size(kMicroBatches), std::size(kBudgets)};

// Why a cell may be impossible.
constexpr const char* kReasons[] = {"stage on a rank", "cannot share", "is more than the", "runs both passes over",
                                    "cannot be divided"};

struct Cell {
  std::string model, schedule, name;
  int micro_batches = 1, groups = 1, data = 1, forward = 0, backward = 0;
  bool tight = false;
};

Cell cell_of(const Row& row, int ranks) {
  Cell cell;
  cell.model = kModels[row[0]];
  cell.schedule = kSchedules[row[1]];
  if (const auto data = cell.schedule.find(" data"); data != std::string::npos) {
    cell.data = 2;
    cell.schedule.resize(data);
  }
  constexpr int kUnits = 7;
  const bool same = cell.schedule == "mobius" || cell.schedule == "1f1b" || cell.schedule == "gpipe";
  const int pipeline = std::max(1, ranks / cell.data);
  cell.forward = row[2] == 0 ? pipeline : row[2] == 1 ? pipeline + 1 : kUnits;
  cell.backward = row[2] == 0 ? pipeline : row[2] == 1 ? std::max(2, 2 * pipeline - 1) : kUnits;
  if (same) cell.forward = cell.backward;
  const int m[] = {std::max(1, ranks - 1), ranks, 2 * ranks, 2 * ranks + 1};
  cell.micro_batches = m[row[3]];
  cell.groups = cell.schedule == "streaming-dp" ? ranks : cell.data;
  if (cell.groups == 1 && row[1] % 2 == 1 && cell.micro_batches > 1) cell.groups = 2;
  cell.tight = row[4] == 1;
  cell.name = fmt::format("{:6} {:14} {:9} {:6} {}", kModels[row[0]], kSchedules[row[1]], kStages[row[2]],
                          kMicroBatches[row[3]], kBudgets[row[4]]);
  return cell;
}

// Any counts: what a verified plan says, the executor runs to its end.
std::vector<Cell> random_cells(int count, int ranks, std::uint64_t seed) {
  std::vector<Cell> cells;
  for (int i = 0; i < count; ++i) {
    auto roll = [&, next = std::uint64_t{0}](int low, int high) mutable {
      const float u = uniform_at(make_key(seed, 99), static_cast<std::uint64_t>(i), next++);
      return low + static_cast<int>(u * static_cast<float>(high - low + 1));
    };
    Row row;
    for (const std::size_t choices : kChoices) row.push_back(static_cast<std::size_t>(roll(0, static_cast<int>(choices) - 1)));
    Cell cell = cell_of(row, ranks);
    cell.backward = roll(1, 7);
    cell.forward = roll(1, 7);
    if (cell.schedule == "mobius" || cell.schedule == "1f1b") cell.forward = cell.backward;
    if (cell.schedule == "gpipe") cell.forward = cell.backward = roll(1, std::min(7, ranks));
    cell.micro_batches = roll(cell.groups, 11);
    cell.name += fmt::format(", now {}/{} stages, {} micro-batches", cell.forward, cell.backward, cell.micro_batches);
    cells.push_back(cell);
  }
  return cells;
}

class Matrix {
 public:
  explicit Matrix(comm::World& world) : world_(world), runs_(world, {std::begin(kModels), std::end(kModels)}) {}

  int run(const std::vector<Cell>& cells) {
    for (const Cell& cell : cells) one(cell);
    twin();
    if (world_.rank() == 0) {
      fmt::print("{} ranks on {} hosts: {} cells equal, {} refused, {} wrong; {} different plans\n", world_.size(),
                 world_.hosts(), equal_, refused_, wrong_, plans_.size());
      for (const auto& [reason, count] : reasons_) fmt::print("  refused {:3}: {}\n", count, reason);
    }
    const bool enough = equal_ > 0 && plans_.size() > cells.size() / 8;
    return wrong_ == 0 && (world_.rank() != 0 || enough) ? 0 : 1;
  }

 private:
  std::vector<std::string> settings(const Cell& cell, const std::vector<std::string>& more) const {
    std::vector<std::string> list = {"train.steps=5", fmt::format("batch.global={}", cell.micro_batches),
                                     fmt::format("batch.sum_groups={}", cell.groups),
                                     fmt::format("checkpoint.dir={}/runs/{}", runs_.path(), number_)};
    if (cell.model == "gpt2") list.emplace_back("model.dropout=0.1");
    if (cell.model == "fp16") list.insert(list.end(), {"train.loss_scale_hysteresis=1", "train.loss_scale_window=2"});
    list.insert(list.end(), more.begin(), more.end());
    return list;
  }

  // On all ranks; the outcome is rank 0's.
  Outcome train(const Cell& cell, const std::vector<std::string>& more, exec::RunOptions options, comm::World& world) {
    if (cell.model == "fp16") {
      options.gradient_faults = {{1, 3, std::numeric_limits<float>::infinity()}, {2, 1, 0x1p-4F}, {4, 5, 0x1p40F}};
    }
    RankRuns::Result result = runs_.train(cell.model, settings(cell, more), std::move(options), world);
    plan_ = result.summary.plan_hash;
    return std::move(result.outcome);
  }

  const Outcome& reference(const Cell& cell) {
    const std::string key = fmt::format("{} {} {}", cell.model, cell.micro_batches, cell.groups);
    auto found = references_.find(key);
    if (found == references_.end()) {
      comm::World alone{comm::LaunchFacts{}};
      found = references_.emplace(key, train(cell, {"parallel.schedule=streaming"}, {}, alone)).first;
    }
    return found->second;
  }

  // The settings of the cell's plan; of a tight one with the smallest budget that works.
  std::vector<std::string> plan_settings(const Cell& cell) {
    std::vector<std::string> list = {"parallel.schedule=" + cell.schedule, fmt::format("parallel.data={}", cell.data)};
    if (cell.schedule != "auto") {
      list.push_back(fmt::format("parallel.forward_stages={}", cell.forward));
      list.push_back(fmt::format("parallel.backward_stages={}", cell.backward));
    }
    if (!cell.tight) return list;
    list.push_back(fmt::format("device.memory={}", runs_.smallest_budget(cell.model, settings(cell, list))));
    return list;
  }

  void one(const Cell& cell) {
    ++number_;
    try {
      const Outcome outcome = train(cell, plan_settings(cell), {}, world_);
      if (world_.rank() != 0) return;
      const Outcome& expected = reference(cell);
      plans_.insert(plan_);
      const bool skips = cell.model != "fp16" || expected.skipped == std::vector<bool>{false, true, false, false, true};
      const bool same = outcome == expected && outcome.losses.size() == 5 && !outcome.tensors.empty() && skips;
      ++(same ? equal_ : wrong_);
      if (!same)
        fmt::print("WRONG {} (losses {}, parameters {})\n", cell.name, outcome.losses == expected.losses,
                   outcome.tensors == expected.tensors);
    } catch (const Error& error) {
      refuse(cell, error.what());
    }
  }

  void refuse(const Cell& cell, const std::string& text) {
    if (world_.rank() != 0) return;
    const auto reason =
        std::ranges::find_if(kReasons, [&](const char* known) { return text.find(known) != std::string::npos; });
    if (reason == std::end(kReasons)) {
      ++wrong_;
      fmt::print("WRONG {}: refused without a known reason: {}\n", cell.name, text);
      return;
    }
    ++refused_;
    ++reasons_[*reason];
  }

  // One ulp in the middle of the model must be noticed.
  void twin() {
    ++number_;
    Cell cell = cell_of({0, 0, 0, 1, 0}, world_.size());
    exec::RunOptions options;
    options.after_step = [this](store::Store& store, std::uint64_t done) {
      world_.barrier();
      if (done == 2 && store.has(2) && world_.local_rank() == 0) {
        float* layer = store.master(2);
        for (int i = 0; i < 32; ++i) layer[i] = std::nextafter(layer[i], 10.0F);
      }
      world_.barrier();
    };
    const Outcome outcome = train(cell, plan_settings(cell), options, world_);
    if (world_.rank() != 0) return;
    const Outcome& expected = reference(cell);
    const bool noticed =
        outcome.losses[0] == expected.losses[0] && outcome.losses != expected.losses && outcome.tensors != expected.tensors;
    if (noticed) return;
    ++wrong_;
    fmt::print("WRONG a changed parameter was not noticed\n");
  }

  comm::World& world_;
  RankRuns runs_;
  std::map<std::string, Outcome> references_;
  std::uint64_t plan_ = 0;
  std::set<std::uint64_t> plans_;
  std::map<std::string, int> reasons_;
  int number_ = 0, equal_ = 0, refused_ = 0, wrong_ = 0;
};

int run(int argc, char** argv) {
  init_logging(LogLevel::error);
  comm::World world;
  int code = 1;
  try {
    const std::string set = argc > 1 ? argv[1] : "cover";
    std::vector<Cell> cells;
    if (set == "random") cells = random_cells(argc > 2 ? std::atoi(argv[2]) : 40, world.size(), 20261201);
    for (const Row& row : set == "full" ? whole_product(kChoices) : pairwise_cover(kChoices)) {
      if (set != "random") cells.push_back(cell_of(row, world.size()));
    }
    code = Matrix(world).run(cells);
  } catch (const std::exception& error) {
    world.fail(error.what(), ExitCode::kInternal);
  }
  if (code != 0) world.fail("not all cells held", ExitCode::kInternal);
  world.finish();
  return code;
}

}  // namespace
}  // namespace spipe::test

int main(int argc, char** argv) { return spipe::test::run(argc, argv); }
