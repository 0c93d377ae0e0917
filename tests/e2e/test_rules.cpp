// Update rules and forms of the state through whole runs: every rule learns, nobody's way of updating changes a bit, a run
// resumes to the bit, a split master gives the bits of a whole one, and another rule is refused. Ranks: policy_matrix.
#include <catch2/catch.hpp>
#include <cmath>
#include <numeric>

#include "spipe/base/error.h"
#include "spipe/base/log.h"
#include "spipe/io/safetensors.h"
#include "tests/support/tiny_run.h"

using namespace spipe;
using namespace spipe::test;

namespace {

const bool kQuiet = (init_logging(LogLevel::error), true);

TinyResult run_in(const std::filesystem::path& folder, std::vector<std::string> settings, exec::RunOptions options = {}) {
  TinyRun run;
  run.model_json = tiny_llama_json();
  run.settings = std::move(settings);
  run.options = std::move(options);
  return run_tiny(folder, run);
}

TinyResult fresh(const std::vector<std::string>& settings) {
  const TempFolder folder;
  return run_in(folder.path(), settings);
}

bool same(const TinyResult& a, const TinyResult& b) {
  return a.losses == b.losses && a.norms == b.norms && !a.files.empty() && a.files == b.files;
}

std::vector<std::string> with(std::vector<std::string> settings, const std::vector<std::string>& more) {
  settings.insert(settings.end(), more.begin(), more.end());
  return settings;
}

double mean(std::vector<double>::const_iterator begin, std::vector<double>::const_iterator end) {
  return std::accumulate(begin, end, 0.0) / static_cast<double>(end - begin);
}

// The fall of the loss from the first steps to the last ones.
double fall(const TinyResult& result) {
  return mean(result.losses.begin(), result.losses.begin() + 5) - mean(result.losses.end() - 5, result.losses.end());
}

// One of every rule, in different forms.
const std::vector<std::vector<std::string>> kForms = {
    {"optimizer.type=adam", "optimizer.weight_decay=0.01", "optimizer.lr=3e-3", "optimizer.moments=bf16"},
    {"optimizer.type=sgd", "optimizer.lr=0.1", "train.precision=fp16"},
    {"optimizer={type: sgd, nesterov: true, momentum: 0.8, lr: 0.1}", "train.precision=bf16", "optimizer.master=split"},
    {"optimizer.type=lion", "optimizer.lr=1e-3", "optimizer.moments=bf16", "optimizer.master=split", "train.precision=bf16"},
    {"optimizer.type=adamw", "optimizer.lr=3e-3", "optimizer.moments=bf16", "optimizer.master=split", "train.precision=bf16"}};

}  // namespace

TEST_CASE("every rule learns, and no policy or placement changes a bit of it") {
  for (const std::vector<std::string>& form : kForms) {
    INFO(form.front());
    const std::vector<std::string> settings =
        with(form, {"train.steps=40", "train.grad_clip=0.8", "optimizer.schedule.warmup=2"});
    const TinyResult sync = fresh(with(settings, {"optimizer.policy=sync", "optimizer.placement=cpu"}));
    CHECK(fall(sync) > 0.1);
    for (const char* way : {"overlap cpu", "hybrid device", "deferred resident"}) {
      INFO(way);
      const std::string text = way;
      const std::size_t space = text.find(' ');
      CHECK(same(sync, fresh(with(settings, {"optimizer.policy=" + text.substr(0, space),
                                             "optimizer.placement=" + text.substr(space + 1)}))));
    }
  }
}

TEST_CASE("a run of any rule resumes to the bit") {
  for (const std::vector<std::string>& form : kForms) {
    INFO(form.front());
    const TinyResult straight = fresh(form);
    const TempFolder folder;
    exec::RunOptions until, after;
    until.stop_after = 3;
    after.resume = true;
    (void)run_in(folder.path(), form, until);
    CHECK(run_in(folder.path(), form, after).files == straight.files);
  }
}

TEST_CASE("a split master gives the files of a whole one, and each resumes the other's") {
  const std::vector<std::string> whole = {"train.precision=bf16", "optimizer.policy=overlap", "train.grad_clip=0.8"};
  const std::vector<std::string> split = with(whole, {"optimizer.master=split"});
  const TinyResult expected = fresh(whole);
  CHECK(same(expected, fresh(split)));
  for (const bool begins_split : {true, false}) {
    const TempFolder folder;
    exec::RunOptions until, after;
    until.stop_after = 3;
    after.resume = true;
    (void)run_in(folder.path(), begins_split ? split : whole, until);
    CHECK(run_in(folder.path(), begins_split ? whole : split, after).files == expected.files);
  }
}

TEST_CASE("bf16 moments change a run little, and their rounding is the run's seedless own") {
  const std::vector<std::string> settings = {"train.steps=40", "optimizer.lr=3e-3"};
  const TinyResult wide = fresh(settings), narrow = fresh(with(settings, {"optimizer.moments=bf16"}));
  CHECK(narrow.losses.front() == wide.losses.front());
  CHECK(narrow.losses.back() != wide.losses.back());
  CHECK(std::abs(narrow.losses.back() - wide.losses.back()) < 0.02);
  CHECK(same(narrow, fresh(with(settings, {"optimizer.moments=bf16"}))));
}

TEST_CASE("another rule, momentum or type of moments is not the same run, and what is permitted goes on") {
  const TempFolder folder;
  exec::RunOptions until, after;
  until.stop_after = 3;
  after.resume = true;
  const std::vector<std::string> lion = {"optimizer.type=lion", "optimizer.lr=1e-3"};
  (void)run_in(folder.path(), lion, until);
  CHECK_THROWS_WITH(run_in(folder.path(), {"optimizer.lr=1e-3"}, after), Catch::Contains("optimizer.type: lion -> adamw"));
  CHECK_THROWS_WITH(run_in(folder.path(), with(lion, {"optimizer.moments=bf16"}), after),
                    Catch::Contains("dtype.moments: fp32 -> bf16"));
  exec::RunOptions allowed = after;
  allowed.allow_changes = {"optimizer.type", "optimizer.betas", "optimizer.eps"};
  CHECK_THROWS_WITH(run_in(folder.path(), {"optimizer.lr=1e-3"}, allowed), Catch::Contains("has no second moments"));
  allowed.allow_changes = {"dtype.moments"};
  CHECK(run_in(folder.path(), with(lion, {"optimizer.moments=bf16"}), allowed).summary.checkpoint.filename() != "");
}
