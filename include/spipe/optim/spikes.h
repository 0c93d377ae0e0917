// The guard against spikes: a step whose loss or gradient norm lies far above those of the steps before it is skipped.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace spipe::optim {

struct SpikeGuard {
  double threshold = 0;       // z-score above which a step is a spike; 0: off
  std::int64_t window = 128;  // steps that are looked back on
  std::int64_t warmup = 64;   // steps that must be known before any is judged, 2 .. window
  [[nodiscard]] bool on() const { return threshold > 0; }
};

// (value - mean) / standard deviation (of the population) of `history`, in double, two passes in the order given: the same bits
// wherever it is computed. 0 when all values are equal: nothing is known about how they scatter.
[[nodiscard]] double z_score(std::span<const double> history, double value);

struct SpikeScore {
  double loss_z = 0, norm_z = 0;  // 0 while not judged
  bool judged = false, loss = false, norm = false;
  [[nodiscard]] bool spike() const { return loss || norm; }
};

// Losses (a target's mean) and norms (unscaled) of the newest steps that were finite and had targets, oldest first, whether
// they were skipped or not: a run whose level has changed for good goes on once the window knows the new one (of n steps k at
// the new level: its z-score is sqrt((n - k) / k)). Part of a checkpoint.
class SpikeHistory {
 public:
  SpikeHistory() = default;
  // Of a checkpoint: as many finite values of each, else std::range_error.
  SpikeHistory(std::vector<double> losses, std::vector<double> norms);
  // Keeps the newest `guard.window`; with the guard off nothing.
  void add(const SpikeGuard& guard, double loss, double norm);
  void trim(const SpikeGuard& guard);
  // Of the step after these. Only what lies above the mean is a spike.
  [[nodiscard]] SpikeScore judge(const SpikeGuard& guard, double loss, double norm) const;
  [[nodiscard]] const std::vector<double>& losses() const { return losses_; }
  [[nodiscard]] const std::vector<double>& norms() const { return norms_; }

 private:
  std::vector<double> losses_, norms_;
};

}  // namespace spipe::optim
