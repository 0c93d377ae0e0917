// Schedule invariance, determinism and resume on one rank: the same global batch and numerics block give the same bits,
// whatever the budget, recompute, parking, threads and interruptions.
#include <catch2/catch.hpp>
#include <cmath>
#include <set>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "tests/support/tiny_run.h"

using namespace spipe;
using namespace spipe::test;

namespace {

TinyResult fresh(const std::string& model, std::vector<std::string> settings, exec::RunOptions options = {}) {
  const TempFolder folder;
  TinyRun run;
  run.model_json = model;
  run.settings = std::move(settings);
  run.options = std::move(options);
  return run_tiny(folder.path(), run);
}

bool same_bits(const TinyResult& a, const TinyResult& b) {
  return a.losses == b.losses && a.norms == b.norms && a.files == b.files && a.summary.eval_loss == b.summary.eval_loss;
}

std::string bytes(std::uint64_t count) { return "device.memory=" + std::to_string(count); }

std::uint64_t smallest(const std::string& model, std::vector<std::string> settings, const std::string& key = "device.memory") {
  settings.push_back(key + "=1");
  try {
    (void)fresh(model, settings);
  } catch (const Error& error) {
    const std::string text = error.what();
    const auto works = text.find("smallest that works is");
    REQUIRE(works != std::string::npos);
    return std::stoull(text.substr(text.find('(', works) + 1));
  }
  FAIL("a budget of one byte was accepted");
  return 0;
}

struct Case {
  const char* name;
  std::string model;
  std::vector<std::string> settings;
};

std::vector<Case> cases() {
  return {
      {"llama fp32", tiny_llama_json(), {}},
      {"gpt2 fp32", tiny_gpt2_json(), {}},
      {"tied llama fp32", tiny_tied_llama_json(), {}},
      {"llama bf16", tiny_llama_json(), {"train.precision=bf16"}},
      {"gpt2 bf16, two sum groups", tiny_gpt2_json(), {"train.precision=bf16", "batch.sum_groups=2"}},
      {"llama fp32, three sum groups", tiny_llama_json(), {"batch.sum_groups=3"}},
      {"gpt2 fp32, dropout", tiny_gpt2_json(), {"model.dropout=0.2"}},
      {"llama fp16", tiny_llama_json(), {"train.precision=fp16", "train.loss_scale_window=2"}},
      {"gpt2 fp16, two sum groups", tiny_gpt2_json(), {"train.precision=fp16", "batch.sum_groups=2", "model.dropout=0.1"}},
      {"gpt2 fp32, one micro-batch", tiny_gpt2_json(), {"batch.micro=6"}},
  };
}

}  // namespace

TEST_CASE("budgets, recompute, parking and threads do not change a bit") {
  for (const Case& c : cases()) {
    INFO(c.name);
    const auto with = [&c](std::vector<std::string> more) {
      std::vector<std::string> all = c.settings;
      all.insert(all.end(), more.begin(), more.end());
      return all;
    };
    const TinyResult resident = fresh(c.model, with({}));
    REQUIRE(resident.losses.size() == 6);
    REQUIRE(resident.losses.back() < resident.losses.front());
    REQUIRE(resident.fetched > 0);  // the inputs
    const std::uint64_t peak = resident.device_bytes;
    const std::uint64_t least = smallest(c.model, c.settings);
    REQUIRE(least < peak / 2);

    std::set<std::uint64_t> plans = {resident.summary.plan_hash};
    const auto check = [&](const std::string& what, std::vector<std::string> more, bool streams) {
      INFO(what);
      const TinyResult other = fresh(c.model, with(std::move(more)));
      INFO(other.plan_summary);
      CHECK(same_bits(resident, other));
      if (streams) {
        CHECK(other.fetched > 2 * resident.fetched);
        CHECK(other.summary.plan_hash != resident.summary.plan_hash);
      }
      plans.insert(other.summary.plan_hash);
      return other;
    };
    check("half the budget", {bytes(std::max(peak / 2, least))}, false);
    check("a quarter of the budget", {bytes(std::max(peak / 4, least))}, true);
    const TinyResult tight = check("the smallest budget", {bytes(least)}, true);
    CHECK(tight.device_bytes <= least);
    check("recompute on", {"train.recompute=true"}, false);
    check("recompute off, streamed", {"train.recompute=false", bytes(peak - 1)}, false);
    check("recompute and parking", {"train.recompute=true", "train.park=true", bytes(std::max(peak / 4, least))}, true);
    check("one thread", {"device.threads=1"}, false);
    check("three threads", {"device.threads=3", bytes(std::max(peak / 4, least))}, true);
    CHECK(plans.size() >= 5);
    CHECK_THROWS_AS(fresh(c.model, with({bytes(least - 1)})), Error);
  }
}

TEST_CASE("the smallest host budget works, and one byte less is refused") {
  for (const Case& c : cases()) {
    const std::string least_device = bytes(smallest(c.model, c.settings));
    for (const std::string& setting : {std::string("train.park=auto"), std::string("train.park=true"), least_device}) {
      INFO(c.name << ", " << setting);
      std::vector<std::string> settings = c.settings;
      settings.emplace_back(setting);
      settings.emplace_back("train.steps=2");
      const std::uint64_t least = smallest(c.model, settings, "device.host_memory");
      settings.push_back("device.host_memory=" + std::to_string(least));
      CHECK(fresh(c.model, settings).losses.size() == 2);
      settings.back() = "device.host_memory=" + std::to_string(least - 1);
      // With both budgets at their least, a byte less may be told of either.
      const std::string figure =
          setting == least_device ? "the smallest that works is" : "(" + std::to_string(least) + " bytes";
      CHECK_THROWS_WITH(fresh(c.model, settings), Catch::Contains(figure));
    }
  }
}

TEST_CASE("two runs give the same bytes") { CHECK(same_bits(fresh(tiny_llama_json(), {}), fresh(tiny_llama_json(), {}))); }

TEST_CASE("one ulp in the middle of the model changes the run (twin of the equalities)") {
  exec::RunOptions options;
  options.after_step = [](store::Store& store, std::uint64_t done) {
    if (done != 1) return;
    float* layer = store.master(2);  // layer 1
    for (int i = 0; i < 32; ++i) layer[i] = std::nextafter(layer[i], 10.0F);
  };
  const TinyResult plain = fresh(tiny_llama_json(), {});
  const TinyResult nudged = fresh(tiny_llama_json(), {}, options);
  CHECK(plain.losses[0] == nudged.losses[0]);
  CHECK_FALSE(same_bits(plain, nudged));
  CHECK(plain.files != nudged.files);
}

TEST_CASE("stop and resume equals never stopped") {
  for (const Case& c : cases()) {
    INFO(c.name);
    const TinyResult straight = fresh(c.model, c.settings);
    for (const std::uint64_t stop : {1, 2, 3, 4, 5}) {  // wherever it stops
      INFO("stopped after step " << stop);
      const TempFolder folder;
      TinyRun run;
      run.model_json = c.model;
      run.settings = c.settings;
      run.options.stop_after = stop;
      const TinyResult first = run_tiny(folder.path(), run);
      CHECK(first.summary.code == ExitCode::kSaved);
      CHECK(first.losses.size() == stop);
      run.options = {};
      run.options.resume = true;
      if (stop == 3) run.settings.push_back(bytes(smallest(c.model, c.settings)));  // another plan continues
      const TinyResult second = run_tiny(folder.path(), run);
      CHECK(second.summary.first_step == stop);
      CHECK(second.losses.size() == 6 - stop);
      CHECK(std::equal(second.losses.begin(), second.losses.end(), straight.losses.begin() + static_cast<long>(stop)));
      CHECK(second.files == straight.files);
      CHECK(second.summary.eval_loss == straight.summary.eval_loss);
    }
  }
}

TEST_CASE("a finished run resumes to nothing") {
  const TempFolder folder;
  TinyRun run;
  run.model_json = tiny_gpt2_json();
  const TinyResult first = run_tiny(folder.path(), run);
  run.options.resume = true;
  const TinyResult again = run_tiny(folder.path(), run);
  CHECK(again.summary.already_finished);
  CHECK(again.losses.empty());
  CHECK(again.files == first.files);
}

TEST_CASE("periodic saves while training goes on are the states of their steps") {
  for (const std::string& model : {tiny_llama_json(), tiny_tied_llama_json(), tiny_gpt2_json()}) {
    for (const bool streams : {false, true}) {
      INFO(model << (streams ? " streamed" : " resident"));
      const TempFolder folder;
      TinyRun run;
      run.model_json = model;
      run.settings = {"checkpoint.every=2", "checkpoint.keep=10"};
      if (streams) run.settings.push_back(bytes(smallest(model, {})));
      const TinyResult whole = run_tiny(folder.path(), run);
      const TempFolder other;
      TinyRun stopped;
      stopped.model_json = model;
      stopped.options.stop_after = 4;
      const TinyResult at_four = run_tiny(other.path(), stopped);
      for (const auto& [name, content] : at_four.files) {
        INFO(name);
        CHECK(read_text(folder.path() / "run" / "step-00000004" / name) == content);
      }
      CHECK(whole.files != at_four.files);
    }
  }
}
