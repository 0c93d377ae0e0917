// Overflows and other non-finite steps on one rank: the loss scale moves as it should, a skipped step leaves no trace, and what
// went wrong is named. Ranks: rank_matrix.
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <limits>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/base/log.h"
#include "tests/support/tiny_run.h"

using namespace spipe;
using namespace spipe::test;

namespace {

constexpr float kInfinite = std::numeric_limits<float>::infinity();
constexpr int kLayer1 = 2;  // its store unit

TinyResult run_in(const std::filesystem::path& folder, std::vector<std::string> settings, exec::RunOptions options) {
  TinyRun run;
  run.model_json = tiny_llama_json();
  run.settings = std::move(settings);
  run.options = std::move(options);
  return run_tiny(folder, run);
}

TinyResult fresh(std::vector<std::string> settings, exec::RunOptions options = {}) {
  const TempFolder folder;
  return run_in(folder.path(), std::move(settings), std::move(options));
}

const bool kQuiet = (init_logging(LogLevel::error), true);

exec::RunOptions with_faults(const std::vector<std::uint64_t>& steps, float factor = kInfinite, int unit = kLayer1) {
  exec::RunOptions options;
  for (const std::uint64_t step : steps) options.gradient_faults.push_back({step, unit, factor});
  return options;
}

// All state that the next step depends on.
std::string state_of(store::Store& store) {
  std::string all;
  for (const auto plane : {store::Plane::compute, store::Plane::master, store::Plane::m, store::Plane::v}) {
    if (!store.format().has(plane)) continue;
    for (int unit = 0; store.layout().elements.size() > static_cast<std::size_t>(unit); ++unit) {
      all.append(static_cast<const char*>(store.slab(unit, plane).data), store.layout().slab_bytes(unit, plane));
    }
  }
  return all;
}

std::string error_of(const std::vector<std::string>& settings, const exec::RunOptions& options) {
  try {
    (void)fresh(settings, options);
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kNonFinite);
    return error.what();
  }
  return "no error";
}

// What a run logs.
std::string log_of(const std::vector<std::string>& settings, exec::RunOptions options) {
  const TempFolder folder;
  init_logging(LogLevel::error, folder.path() / "log");
  (void)run_in(folder.path(), settings, std::move(options));
  init_logging(LogLevel::error);
  return read_text(folder.path() / "log");
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("fp16 learns, with a scale that grows") {
  const TinyResult half = fresh({"train.precision=fp16", "train.loss_scale_window=2"});
  const TinyResult single = fresh({});
  REQUIRE(half.losses.size() == 6);
  CHECK(half.scales == std::vector<double>{65536, 65536, 131072, 131072, 262144, 262144});
  CHECK(half.losses != single.losses);
  for (std::size_t i = 0; i < 6; ++i) {
    CHECK(half.losses[i] == Approx(single.losses[i]).epsilon(2e-3));
    CHECK(half.norms[i] == Approx(single.norms[i]).epsilon(2e-2));
  }
}

TEST_CASE("a power of two times the loss changes no bit in fp32 and bf16, and no norm") {
  for (const char* precision : {"train.precision=fp32", "train.precision=bf16"}) {
    INFO(precision);
    const TinyResult plain = fresh({precision}), scaled = fresh({precision, "train.loss_scale=1024"});
    CHECK((plain.scales.empty() && scaled.scales == std::vector<double>(6, 1024)));
    CHECK((plain.losses == scaled.losses && plain.norms == scaled.norms));
    // The files differ where they say what they are only: parameters and moments are the same.
    CHECK(plain.files == scaled.files);
  }
}

TEST_CASE("overflows lower the scale and change nothing else") {
  std::vector<std::string> states;
  exec::RunOptions options = with_faults({0, 1, 2});
  options.after_step = [&](store::Store& store, std::uint64_t) { states.push_back(state_of(store)); };
  const TinyResult run = fresh({"train.precision=fp16", "train.loss_scale_hysteresis=1"}, options);
  CHECK(run.scales == std::vector<double>{65536, 32768, 16384, 8192, 8192, 8192});
  CHECK(run.skipped == std::vector<bool>{true, true, true, false, false, false});
  CHECK(run.summary.skipped_steps == 3);
  REQUIRE(states.size() == 6);
  CHECK((states[0] == states[1] && states[1] == states[2]));
  CHECK((states[2] != states[3] && states[3] != states[4]));
}

TEST_CASE("a skipped step leaves no trace in any precision, whatever overflows, chained or not") {
  for (const char* precision : {"fp32", "bf16", "fp16"}) {
    for (float factor : {kInfinite, -kInfinite, std::numeric_limits<float>::quiet_NaN()}) {
      if (precision == std::string("fp16") && factor < 0) factor = 0x1p20F;  // too large for fp16 only
      INFO(precision << " x " << factor);
      const std::vector<std::string> settings = {std::string("train.precision=") + precision, "train.nonfinite=skip"};
      std::vector<std::string> states;
      exec::RunOptions options = with_faults({1, 4}, factor);
      const TinyResult chained = fresh(settings, options);
      options.after_step = [&](store::Store& store, std::uint64_t) { states.push_back(state_of(store)); };
      const TinyResult stepwise = fresh(settings, options);
      CHECK(chained.skipped == std::vector<bool>{false, true, false, false, true, false});
      REQUIRE(states.size() == 6);
      CHECK((states[0] == states[1] && states[1] != states[2] && states[3] == states[4]));
      CHECK((chained.losses == stepwise.losses && chained.files == stepwise.files && chained.scales == stepwise.scales));
    }
  }
}

TEST_CASE("stop and resume in the middle of growth and hysteresis equals never stopped") {
  const std::vector<std::string> settings = {"train.precision=fp16", "train.steps=12", "train.loss_scale_window=3",
                                             "train.loss_scale_hysteresis=2"};
  const std::vector<std::uint64_t> faults = {1, 2, 5, 10};
  const TinyResult straight = fresh(settings, with_faults(faults));
  CHECK(straight.scales ==
        std::vector<double>{65536, 65536, 65536, 32768, 32768, 32768, 16384, 16384, 16384, 32768, 32768, 32768});
  for (std::uint64_t stop = 1; stop < 12; ++stop) {
    INFO("stopped after step " << stop);
    const TempFolder folder;
    exec::RunOptions options = with_faults(faults);
    options.stop_after = stop;
    const TinyResult first = run_in(folder.path(), settings, options);
    options.stop_after.reset();
    options.resume = true;
    const TinyResult second = run_in(folder.path(), settings, options);
    std::vector<double> scales = first.scales;
    scales.insert(scales.end(), second.scales.begin(), second.scales.end());
    CHECK(scales == straight.scales);
    CHECK(second.files == straight.files);
  }
}

TEST_CASE("at the smallest scale an overflow stops the run, or is skipped up to train.max_skips times") {
  const std::vector<std::string> settings = {"train.precision=fp16", "train.steps=40", "train.loss_scale_initial=4",
                                             "train.loss_scale_hysteresis=1"};
  std::vector<std::uint64_t> always(40);
  for (std::size_t i = 0; i < always.size(); ++i) always[i] = i;
  const std::string stopped = error_of(settings, with_faults(always));
  INFO(stopped);
  CHECK(has(stopped, "non-finite gradient at step 3 (loss scale 1); first in the summed gradient of layer 1"));
  std::vector<std::string> skipping = settings;
  skipping.insert(skipping.end(), {"train.nonfinite=skip", "train.max_skips=7"});
  CHECK(has(error_of(skipping, with_faults(always)), "7 steps in a row were skipped (train.max_skips)"));
  skipping.back() = "train.max_skips=0";
  CHECK(fresh(skipping, with_faults(always)).summary.skipped_steps == 40);
}

TEST_CASE("a fixed scale that overflows is not a matter of scaling: the run stops") {
  const std::string text = error_of({"train.precision=fp16", "train.loss_scale=256"}, with_faults({1}));
  CHECK(has(text, "non-finite gradient at step 2 (loss scale 256); first in the summed gradient of layer 1"));
}

TEST_CASE("the first unit and micro-batch of a non-finite step are named, stopping or skipping, in every precision") {
  for (const char* precision : {"fp32", "bf16", "fp16"}) {
    INFO(precision);
    const std::string setting = std::string("train.precision=") + precision;
    // Parameters of layer 1 blow up after the first step: its forward of the first micro-batch is the first to show it.
    exec::RunOptions blown;
    blown.after_step = [](store::Store& store, std::uint64_t done) {
      if (done != 1) return;
      const Ptr slab = store.slab(kLayer1, store::Plane::compute);
      std::memset(slab.data, 0x7f, 64);  // not a number in 16 bits, huge in 32
      if (slab.dtype == DType::f32) std::fill_n(static_cast<float*>(slab.data), 16, kInfinite);
    };
    const std::string stopped = error_of({setting}, blown);
    INFO(stopped);
    CHECK(has(stopped, "non-finite loss at step 2"));
    CHECK(has(stopped, "first in forward of layer 1, micro-batch 0"));
    const std::string skipped = log_of({setting, "train.nonfinite=skip", "train.max_skips=0"}, blown);
    INFO(skipped);
    CHECK(has(skipped, "step 2 skipped: non-finite loss"));
    CHECK(has(skipped, "first in forward of layer 1, micro-batch 0"));
  }
}

TEST_CASE("an overflow of the scaled gradient is told with its unit and the scales") {
  const std::string log = log_of({"train.precision=fp16", "train.loss_scale_hysteresis=1"}, with_faults({2}));
  INFO(log);
  CHECK(has(log, "step 3 skipped: overflow at loss scale 65536, first in the gradient of layer 1; the next scale is 32768"));
}
