// Policy invariance: `policy_matrix cover|full [STEPS]` under mpirun trains a tiny model for 200 steps in every cell of
// {precision} x {policy} x {placement} x {schedule} x {budget} x {course} x {update rule and form of its state} with the ranks
// and hosts it was started with, and compares losses, norms, clipping, loss scales, evaluations and the final state with a
// plain synchronous run of one resident rank, bit for bit. Clipping bites on many of the steps, three of them overflow, one is
// a spike, bf16 has parameter groups, evaluation comes every seventh; a course may stop with updates on their way and go on,
// also with another policy. Prints a table; ends with 0 when all of it held.
#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <set>

#include "covering.h"
#include "rank_runs.h"
#include "spipe/base/error.h"
#include "spipe/base/log.h"

namespace spipe::test {
namespace {

constexpr const char* kModels[] = {"llama", "bf16", "fp16"};
constexpr const char* kPolicies[] = {"sync", "overlap", "deferred", "hybrid", "auto"};
constexpr const char* kPlacements[] = {"cpu", "device", "resident", "auto"};
constexpr const char* kSchedules[] = {"spipe", "mobius", "roundpipe", "streaming-dp"};
constexpr const char* kBudgets[] = {"roomy", "tight"};  // tight: the least that works and a half
constexpr const char* kCourses[] = {"whole", "resumed", "resumed otherwise"};
// Update rules and forms of their state, for each precision: AdamW whole in fp32; with bf16 moments; other rules.
using Settings = std::vector<std::string>;
constexpr const char* kStates[] = {"plain", "narrow", "other", "third"};
const std::map<std::string, std::vector<Settings>> kStateSettings = {
    {"llama",
     {{},
      {"optimizer.moments=bf16"},
      {"optimizer={type: sgd, nesterov: true, lr: 0.05}"},
      {"optimizer={type: lion, lr: 2e-3, moments: bf16}"}}},
    {"bf16",
     {{},
      {"optimizer={type: adam, lr: 2e-2, moments: bf16, master: split}", "train.grad_clip=1"},
      {"optimizer={type: lion, lr: 2e-3}", "train.grad_clip=1.2"},
      {"optimizer.master=split"}}},  // held against the whole master's bits
    {"fp16",
     {{},
      {"optimizer.moments=bf16"},
      {"optimizer={type: sgd, lr: 0.05, moments: bf16}"},
      {"optimizer={type: lion, lr: 2e-3}"}}}};
const std::vector<std::size_t> kChoices = {std::size(kModels),    std::size(kPolicies), std::size(kPlacements),
                                           std::size(kSchedules), std::size(kBudgets),  std::size(kCourses),
                                           std::size(kStates)};

struct Cell {
  std::string model, policy, placement, schedule, course, name;
  bool tight = false;
  std::size_t state = 0;  // of kStates
};

Cell cell_of(const Row& row) {
  Cell cell{.model = kModels[row[0]],
            .policy = kPolicies[row[1]],
            .placement = kPlacements[row[2]],
            .schedule = kSchedules[row[3]],
            .course = kCourses[row[5]],
            .name = {},
            .tight = row[4] == 1,
            .state = row[6]};
  cell.name = fmt::format("{:5} {:6} {:8} {:8} {:12} {:5} {}", cell.model, kStates[cell.state], cell.policy, cell.placement,
                          cell.schedule, kBudgets[row[4]], cell.course);
  return cell;
}

// Every precision, policy, placement and course, with schedule, budget and state taking turns.
bool in_full_set(const Row& row) {
  return row[6] == (row[1] + 2 * row[2] + row[5]) % std::size(kStates) &&
         row[3] * std::size(kBudgets) + row[4] ==
             (row[0] + 3 * row[1] + 5 * row[2] + 7 * row[5]) % (std::size(kSchedules) * std::size(kBudgets));
}

class Matrix {
 public:
  Matrix(comm::World& world, std::uint64_t steps)
      : world_(world), steps_(steps), runs_(world, {std::begin(kModels), std::end(kModels)}) {}

  int run(const std::vector<Cell>& cells) {
    for (const Cell& cell : cells) one(cell);
    twin();
    if (world_.rank() != 0) return 0;
    fmt::print("{} ranks on {} hosts, {} steps: {} cells equal, {} wrong; {} different plans; {} updates taken back\n",
               world_.size(), world_.hosts(), steps_, equal_, wrong_, plans_.size(), taken_back_);
    return wrong_ == 0 && equal_ > 0 && plans_.size() > cells.size() / 3 ? 0 : 1;
  }

 private:
  Settings settings(const std::string& model, std::size_t state) const {
    std::vector<std::string> list = {fmt::format("train.steps={}", steps_),
                                     "batch.global=4",
                                     "batch.sum_groups=4",
                                     fmt::format("checkpoint.dir={}/runs/{}", runs_.path(), number_),
                                     fmt::format("checkpoint.every={}", steps_ / 3),
                                     "train.eval_every=7",
                                     "train.grad_clip=1.4",
                                     "train.nonfinite=skip",
                                     "train.skip_spikes=8",
                                     "train.spike_window=30",
                                     "train.spike_warmup=15"};
    if (model == "fp16") list.insert(list.end(), {"train.loss_scale_hysteresis=1", "train.loss_scale_window=20"});
    if (model == "bf16") {
      list.emplace_back(
          "optimizer.groups=[{pattern: \"model.layers.3.*\", frozen: true}, {pattern: \"*.up_proj.*\", frozen: true}, "
          "{pattern: \"*.o_proj.weight\", lr_scale: 0.5, weight_decay: 0}, {pattern: \"*norm*\", weight_decay: 0.2}]");
    }
    const Settings& of_state = kStateSettings.at(model)[state];
    list.insert(list.end(), of_state.begin(), of_state.end());
    return list;
  }

  // Overflows at the beginning, in a step that is on its way when the run stops, and near the end; a spike between.
  exec::RunOptions options() const {
    const float overflow = std::numeric_limits<float>::infinity();
    exec::RunOptions options;
    options.gradient_faults = {
        {steps_ / 10, 3, overflow}, {stop_after() - 1, 5, overflow}, {steps_ * 9 / 10, 1, overflow}, {steps_ * 7 / 10, 2, 64}};
    return options;
  }
  [[nodiscard]] std::uint64_t stop_after() const { return steps_ / 2 + 3; }  // not a step with an evaluation or a checkpoint

  const Outcome& reference(const std::string& model, std::size_t state) {
    if (model == "bf16" && state == 3) state = 0;
    auto found = references_.find({model, state});
    if (found != references_.end()) return found->second;
    comm::World alone{comm::LaunchFacts{}};
    std::vector<std::string> plain = settings(model, state);
    plain.insert(plain.end(), {"parallel.schedule=streaming", "optimizer.policy=sync", "optimizer.placement=cpu"});
    const Outcome outcome = runs_.train(model, plain, options(), alone).outcome;
    const auto clipped = std::ranges::count_if(outcome.clips, [](double clip) { return clip < 1; });
    const auto skipped = std::ranges::count(outcome.skipped, true);
    const double share = static_cast<double>(clipped) / static_cast<double>(steps_);
    if (share < 0.05 || share > 0.95 || skipped < 4) {
      ++wrong_;
      fmt::print("WRONG {} {}: the run to compare with clips {} of {} steps and skips {}\n", model, kStates[state], clipped,
                 steps_, skipped);
    }
    fmt::print("{} {}: {} of {} steps clipped, {} skipped, loss {:.3f} to {:.3f}\n", model, kStates[state], clipped, steps_,
               skipped, outcome.losses.front(), outcome.losses.back());
    return references_.emplace(std::pair(model, state), outcome).first->second;
  }

  std::vector<std::string> plan_settings(const Cell& cell, const std::string& policy) {
    std::vector<std::string> list = settings(cell.model, cell.state);
    list.insert(list.end(),
                {"parallel.schedule=" + cell.schedule, "optimizer.policy=" + policy, "optimizer.placement=" + cell.placement});
    if (cell.schedule != "streaming-dp") {
      const int stages = std::min(7, std::max(2, 2 * world_.size() - 1));
      list.push_back(fmt::format("parallel.forward_stages={}", stages));
      list.push_back(fmt::format("parallel.backward_stages={}", stages));
    }
    if (cell.tight) {
      list.push_back(fmt::format("device.memory={}", runs_.smallest_budget(cell.model, list) * 3 / 2));
    }
    return list;
  }

  RankRuns::Result train(const Cell& cell) {
    const std::vector<std::string> first = plan_settings(cell, cell.policy);
    if (cell.course == "whole") return runs_.train(cell.model, first, options(), world_);
    exec::RunOptions until = options(), after = options();
    until.stop_after = stop_after();
    RankRuns::Result result = runs_.train(cell.model, first, until, world_, true);
    after.resume = true;
    const std::string other = cell.policy == "overlap" ? "deferred" : "overlap";
    const RankRuns::Result rest =
        runs_.train(cell.model, cell.course == "resumed" ? first : plan_settings(cell, other), after, world_);
    result.outcome.append(rest.outcome);
    result.summary.taken_back += rest.summary.taken_back;
    result.speculating += rest.speculating;
    result.taken_back += rest.taken_back;
    return result;
  }

  void one(const Cell& cell) {
    ++number_;
    const RankRuns::Result result = train(cell);
    if (world_.rank() != 0) return;
    const Outcome& expected = reference(cell.model, cell.state);
    plans_.insert(result.summary.plan_hash);
    taken_back_ += result.summary.taken_back;
    const bool same = result.outcome == expected && result.outcome.losses.size() == steps_ && !result.outcome.tensors.empty();
    // What speculates is taken back where clipping bites, and nothing else ever is.
    const bool honest =
        (result.summary.taken_back > 0) == (result.speculating > 0) && result.summary.taken_back == result.taken_back;
    ++(same && honest ? equal_ : wrong_);
    if (same && honest) return;
    fmt::print(
        "WRONG {} (losses {}, norms {}, skipped {}, evaluations {}, state {}; {} taken back of {} units, the steps say {})\n",
        cell.name, result.outcome.losses == expected.losses, result.outcome.norms == expected.norms,
        result.outcome.skipped == expected.skipped, result.outcome.evaluations == expected.evaluations,
        result.outcome.tensors == expected.tensors, result.summary.taken_back, result.speculating, result.taken_back);
  }

  // One step whose clipped speculation is kept must be noticed.
  void twin() {
    ++number_;
    const Cell cell = cell_of({0, 1, 0, 0, 0, 0, 0});
    std::uint64_t clipped = 0;
    if (world_.rank() == 0) {
      const std::vector<double>& clips = reference(cell.model, cell.state).clips;
      for (clipped = 5; clipped + 1 < steps_ && clips[clipped] >= 1;) ++clipped;
    }
    std::vector<std::byte> bytes(sizeof(clipped));
    std::memcpy(bytes.data(), &clipped, sizeof(clipped));
    world_.broadcast(bytes, 0);
    std::memcpy(&clipped, bytes.data(), sizeof(clipped));
    exec::RunOptions broken = options();
    broken.keeps_speculation = clipped;
    const Outcome outcome = runs_.train(cell.model, plan_settings(cell, cell.policy), broken, world_).outcome;
    if (world_.rank() != 0) return;
    const Outcome& expected = reference(cell.model, cell.state);
    const auto until = static_cast<std::ptrdiff_t>(clipped) + 1;
    const bool noticed = std::equal(expected.losses.begin(), expected.losses.begin() + until, outcome.losses.begin()) &&
                         outcome.losses != expected.losses && outcome.tensors != expected.tensors;
    if (noticed) return;
    ++wrong_;
    fmt::print("WRONG a speculation that was kept in step {} was not noticed\n", clipped);
  }

  comm::World& world_;
  const std::uint64_t steps_;
  RankRuns runs_;
  std::map<std::pair<std::string, std::size_t>, Outcome> references_;
  std::set<std::uint64_t> plans_;
  std::uint64_t taken_back_ = 0;
  int number_ = 0, equal_ = 0, wrong_ = 0;
};

int run(int argc, char** argv) {
  init_logging(LogLevel::error);
  comm::World world;
  int code = 1;
  try {
    const bool full = argc > 1 && argv[1] == std::string("full");
    std::vector<Cell> cells;
    for (const Row& row : full ? whole_product(kChoices) : pairwise_cover(kChoices)) {
      if (!full || in_full_set(row)) cells.push_back(cell_of(row));
    }
    code = Matrix(world, argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 200).run(cells);
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
