#include <catch2/catch.hpp>
#include <limits>
#include <stdexcept>

#include "spipe/optim/spikes.h"

using namespace spipe::optim;

TEST_CASE("a z-score counts standard deviations of the history from its mean") {
  // Mean 5, squares of the differences 9 1 1 1 0 0 4 16: population deviation sqrt(32 / 8) = 2.
  const std::vector<double> history = {2, 4, 4, 4, 5, 5, 7, 9};
  CHECK(z_score(history, 5) == 0);
  CHECK(z_score(history, 9) == 2);
  CHECK(z_score(history, 1) == -2);
  CHECK(z_score(history, 18) == 6.5);
}

TEST_CASE("nothing known and nothing that scatters give no score") {
  CHECK(z_score({}, 100) == 0);
  CHECK(z_score(std::vector<double>{3}, 100) == 0);
  CHECK(z_score(std::vector<double>{3, 3, 3}, 100) == 0);
}

namespace {

SpikeHistory eight_of(const SpikeGuard& guard) {
  SpikeHistory history;
  for (const double value : {2, 4, 4, 4, 5, 5, 7, 9}) history.add(guard, value, 10 * value);
  return history;
}

}  // namespace

TEST_CASE("a loss or a norm above the threshold is a spike, at it or far below the mean it is none") {
  const SpikeGuard guard{.threshold = 3, .window = 16, .warmup = 8};
  const SpikeHistory history = eight_of(guard);
  const SpikeScore usual = history.judge(guard, 11, 110);
  CHECK((usual.judged && !usual.spike() && usual.loss_z == 3 && usual.norm_z == 3));
  const SpikeScore loss = history.judge(guard, 12, 50);
  CHECK((loss.loss && !loss.norm && loss.spike() && loss.loss_z == 3.5 && loss.norm_z == 0));
  const SpikeScore norm = history.judge(guard, 5, 130);
  CHECK((!norm.loss && norm.norm && norm.spike() && norm.norm_z == 4));
  CHECK_FALSE(history.judge(guard, -100, -1000).spike());
}

TEST_CASE("no step is judged before the warm-up, nor with the guard off") {
  const SpikeGuard guard{.threshold = 3, .window = 16, .warmup = 9};
  SpikeHistory history = eight_of(guard);
  CHECK_FALSE(history.judge(guard, 1000, 1000).judged);
  history.add(guard, 5, 50);
  CHECK(history.judge(guard, 1000, 1000).spike());
  const SpikeGuard off{.threshold = 0, .window = 16, .warmup = 2};
  CHECK(eight_of(off).losses().empty());
  CHECK_FALSE(history.judge(off, 1000, 1000).judged);
}

TEST_CASE("the window holds the newest steps, a smaller one forgets the oldest") {
  const SpikeGuard guard{.threshold = 3, .window = 4, .warmup = 2};
  SpikeHistory history = eight_of(guard);
  CHECK(history.losses() == std::vector<double>{5, 5, 7, 9});
  CHECK(history.norms() == std::vector<double>{50, 50, 70, 90});
  history.trim({.threshold = 3, .window = 2, .warmup = 2});
  CHECK(history.losses() == std::vector<double>{7, 9});
  history.trim({});
  CHECK(history.losses().empty());
}

TEST_CASE("a new level is a spike until enough of the window knows it") {
  const SpikeGuard guard{.threshold = 3, .window = 100, .warmup = 100};
  SpikeHistory history;
  for (int i = 0; i < 100; ++i) history.add(guard, 1, 1);
  history.add(guard, 2, 1);  // one of a hundred: z = sqrt(99 / 1)
  int spikes = 0;
  for (; history.judge(guard, 2, 1).spike(); ++spikes) history.add(guard, 2, 1);
  CHECK(spikes == 9);  // k of 100: sqrt((100 - k) / k) > 3 up to k = 9; at 10 it is 3
}

TEST_CASE("a history that no run can have is refused") {
  CHECK_NOTHROW(SpikeHistory({1, 2}, {3, 4}));
  CHECK_THROWS_AS(SpikeHistory({1, 2}, {3}), std::range_error);
  CHECK_THROWS_AS(SpikeHistory({1}, {std::numeric_limits<double>::infinity()}), std::range_error);
}
