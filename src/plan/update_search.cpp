#include "spipe/plan/update_search.h"

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace spipe::plan {

namespace {

constexpr double kWorthIt = 1 - 1.0 / 500;

using Fraction = double UpdateSplit::*;

class Descent {
 public:
  Descent(const SplitSpace& space, const UpdateSplit& start, int most_trials,
          const std::function<double(const UpdateSplit&)>& seconds)
      : left_(most_trials), seconds_(seconds), best_(start) {
    if (space.speculate) free_.push_back(&UpdateSplit::speculate);
    if (space.device) free_.push_back(&UpdateSplit::device);
    if (space.resident) free_.push_back(&UpdateSplit::resident);
  }

  UpdateSplit run() {
    best_seconds_ = ask(best_);
    // Speculation and devices help each other: where to begin is looked for among both.
    if (free_.size() > 1) {
      const UpdateSplit start = best_;
      for (const double first : {0.0, 0.5, 1.0}) {
        for (const double second : {0.0, 0.25, 0.5}) {
          UpdateSplit split = start;
          split.*free_[0] = first;
          split.*free_[1] = second;
          consider(split);
        }
      }
    }
    for (int round = 0; round < 3; ++round) {
      const UpdateSplit before = best_;
      for (const Fraction fraction : free_) {
        for (const double value : {0.25, 0.5, 0.75, 1.0, 0.0}) consider(with(fraction, value));
      }
      if (best_ == before) break;
    }
    for (const Fraction fraction : free_) {
      const double middle = best_.*fraction;
      for (const double value : {middle - 0.125, middle + 0.125}) {
        if (value > 0 && value < 1) consider(with(fraction, value));
      }
    }
    return best_;
  }

 private:
  // What was asked is remembered; what may not be asked any more counts as infinitely slow.
  double ask(const UpdateSplit& split) {
    for (const auto& [asked, answer] : answers_) {
      if (asked == split) return answer;
    }
    if (left_ <= 0) return std::numeric_limits<double>::infinity();
    --left_;
    answers_.emplace_back(split, seconds_(split));
    return answers_.back().second;
  }

  UpdateSplit with(Fraction fraction, double value) const {
    UpdateSplit split = best_;
    split.*fraction = value;
    return split;
  }

  // Takes a split that is better than the best; one with more of anything must be worth it.
  void consider(const UpdateSplit& split) {
    if (split == best_) return;
    const double answer = ask(split);
    const bool more = split.speculate > best_.speculate || split.device > best_.device || split.resident > best_.resident;
    if (!(answer < (more ? best_seconds_ * kWorthIt : best_seconds_))) return;
    best_ = split;
    best_seconds_ = answer;
  }

  int left_;
  const std::function<double(const UpdateSplit&)>& seconds_;
  std::vector<Fraction> free_;
  std::vector<std::pair<UpdateSplit, double>> answers_;
  UpdateSplit best_;
  double best_seconds_ = std::numeric_limits<double>::infinity();
};

}  // namespace

UpdateSplit best_split(const SplitSpace& space, const UpdateSplit& start, int most_trials,
                       const std::function<double(const UpdateSplit&)>& seconds) {
  return Descent(space, start, most_trials, seconds).run();
}

}  // namespace spipe::plan
