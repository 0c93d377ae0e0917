// The spike guard on one rank: a planted spike is skipped and leaves no trace, whoever updates what when, and across a resume.
// Ranks: policy_matrix.
#include <catch2/catch.hpp>

#include "spipe/base/file.h"
#include "spipe/base/log.h"
#include "tests/support/tiny_run.h"

using namespace spipe;
using namespace spipe::test;

namespace {

const bool kQuiet = (init_logging(LogLevel::error), true);
constexpr std::uint64_t kSpikeAt = 17;  // 0-based
const std::vector<std::string> kGuarded = {"train.steps=24", "train.skip_spikes=6", "train.spike_window=12",
                                           "train.spike_warmup=8"};

TinyResult run_in(const std::filesystem::path& folder, std::vector<std::string> settings, exec::RunOptions options) {
  TinyRun run;
  run.model_json = tiny_llama_json();
  run.settings = std::move(settings);
  run.options = std::move(options);
  return run_tiny(folder, run);
}

TinyResult fresh(const std::vector<std::string>& settings, exec::RunOptions options) {
  const TempFolder folder;
  return run_in(folder.path(), settings, std::move(options));
}

exec::RunOptions with_spike(std::vector<std::uint64_t> steps = {kSpikeAt}) {
  exec::RunOptions options;
  for (const std::uint64_t step : steps) options.gradient_faults.push_back({step, 2, 64});
  return options;
}

std::vector<std::uint64_t> spikes_of(const TinyResult& result) {
  std::vector<std::uint64_t> steps;
  for (std::size_t i = 0; i < result.skipped_for.size(); ++i) {
    if (result.skipped_for[i] == "spike") steps.push_back(i);
    CHECK((result.skipped[i] == !result.skipped_for[i].empty()));
  }
  return steps;
}

std::string state_of(store::Store& store) {
  std::string all;
  for (const auto plane : {store::Plane::compute, store::Plane::m, store::Plane::v}) {
    for (int unit = 0; store.layout().elements.size() > static_cast<std::size_t>(unit); ++unit) {
      all.append(static_cast<const char*>(store.slab(unit, plane).data), store.layout().slab_bytes(unit, plane));
    }
  }
  return all;
}

}  // namespace

TEST_CASE("a spike of the gradient norm is skipped: the state stays, the log names step, value and score") {
  const TempFolder folder;
  init_logging(LogLevel::error, folder.path() / "log");
  std::vector<std::string> states;
  exec::RunOptions options = with_spike();
  options.after_step = [&](store::Store& store, std::uint64_t) { states.push_back(state_of(store)); };
  const TinyResult run = run_in(folder.path(), kGuarded, options);
  init_logging(LogLevel::error);
  CHECK(spikes_of(run) == std::vector<std::uint64_t>{kSpikeAt});
  CHECK(run.summary.skipped_steps == 1);
  REQUIRE(states.size() == 24);
  CHECK(states[kSpikeAt - 1] == states[kSpikeAt]);
  CHECK(states[kSpikeAt] != states[kSpikeAt + 1]);
  const std::string log = read_text(folder.path() / "log");
  INFO(log);
  CHECK(log.find("step 18 skipped: spike: gradient norm ") != std::string::npos);
  CHECK(log.find(" standard deviations above the recent mean (train.skip_spikes 6)") != std::string::npos);
  // Chained steps come to the same, and without the guard the spike is taken.
  const TinyResult chained = fresh(kGuarded, with_spike());
  CHECK((chained.losses == run.losses && chained.norms == run.norms && chained.files == run.files));
  const TinyResult unguarded = fresh({"train.steps=24"}, with_spike());
  CHECK(spikes_of(unguarded).empty());
  CHECK(unguarded.files != run.files);
}

TEST_CASE("a spike of the loss is skipped") {
  exec::RunOptions options;
  std::vector<float> good;
  options.after_step = [&](store::Store& store, std::uint64_t done) {
    const Ptr head = store.slab(4, store::Plane::compute);
    auto* values = static_cast<float*>(head.data);
    const std::uint64_t elements = store.layout().elements[4];
    if (done == kSpikeAt) {
      good.assign(values, values + elements);
      for (std::uint64_t i = 0; i < elements; ++i) values[i] *= 64;
    } else if (done == kSpikeAt + 1) {
      std::copy(good.begin(), good.end(), values);
    }
  };
  const TinyResult run = fresh(kGuarded, options);
  CHECK(spikes_of(run) == std::vector<std::uint64_t>{kSpikeAt});
  CHECK(run.losses[kSpikeAt] > 2 * run.losses[kSpikeAt - 1]);
}

TEST_CASE("no policy or placement changes a bit of a run with spikes") {
  const std::vector<std::string> precise = {"train.precision=bf16", "train.grad_clip=1.2"};
  std::vector<std::string> settings = kGuarded;
  settings.insert(settings.end(), precise.begin(), precise.end());
  const auto with = [&settings](const char* policy, const char* placement) {
    std::vector<std::string> list = settings;
    list.insert(list.end(), {std::string("optimizer.policy=") + policy, std::string("optimizer.placement=") + placement});
    return fresh(list, with_spike({kSpikeAt, kSpikeAt + 4}));
  };
  const TinyResult sync = with("sync", "cpu");
  CHECK_FALSE(spikes_of(sync).empty());
  for (const char* policy : {"overlap", "deferred", "hybrid", "auto"}) {
    for (const char* placement : {"cpu", "device", "resident"}) {
      INFO(policy << " " << placement);
      const TinyResult run = with(policy, placement);
      CHECK((run.losses == sync.losses && run.norms == sync.norms && run.files == sync.files));
      CHECK(run.skipped_for == sync.skipped_for);
      if (policy == std::string("overlap") && placement != std::string("resident")) CHECK(run.summary.taken_back > 0);
    }
  }
}

TEST_CASE("stop and resume anywhere around a spike equals never stopped") {
  std::vector<std::string> settings = kGuarded;
  settings.emplace_back("optimizer.policy=overlap");
  const TinyResult straight = fresh(settings, with_spike());
  for (const std::uint64_t stop : {kSpikeAt - 10, kSpikeAt - 1, kSpikeAt, kSpikeAt + 1, kSpikeAt + 3}) {
    INFO("stopped after step " << stop);
    const TempFolder folder;
    exec::RunOptions options = with_spike();
    options.stop_after = stop;
    TinyResult run = run_in(folder.path(), settings, options);
    options.stop_after.reset();
    options.resume = true;
    const TinyResult rest = run_in(folder.path(), settings, options);
    run.skipped_for.insert(run.skipped_for.end(), rest.skipped_for.begin(), rest.skipped_for.end());
    CHECK(run.skipped_for == straight.skipped_for);
    CHECK(rest.files == straight.files);
    const std::string state = read_text(rest.summary.checkpoint / "trainer.json");
    CHECK(state.find("\"spike_history\"") != std::string::npos);
  }
}
