#include "spipe/optim/spikes.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

namespace spipe::optim {

double z_score(std::span<const double> history, double value) {
  if (history.empty()) return 0;
  const auto count = static_cast<double>(history.size());
  double sum = 0, squares = 0;
  for (const double one : history) sum += one;
  const double mean = sum / count;
  for (const double one : history) squares += (one - mean) * (one - mean);
  const double deviation = std::sqrt(squares / count);
  return deviation > 0 ? (value - mean) / deviation : 0;
}

SpikeHistory::SpikeHistory(std::vector<double> losses, std::vector<double> norms)
    : losses_(std::move(losses)), norms_(std::move(norms)) {
  const auto finite = [](double value) { return std::isfinite(value); };
  if (losses_.size() != norms_.size()) throw std::range_error("a spike history has as many losses as norms");
  if (!std::ranges::all_of(losses_, finite) || !std::ranges::all_of(norms_, finite)) {
    throw std::range_error("a spike history is finite");
  }
}

void SpikeHistory::add(const SpikeGuard& guard, double loss, double norm) {
  if (!guard.on()) return;
  losses_.push_back(loss);
  norms_.push_back(norm);
  trim(guard);
}

void SpikeHistory::trim(const SpikeGuard& guard) {
  const std::size_t window = guard.on() ? static_cast<std::size_t>(guard.window) : 0;
  if (losses_.size() <= window) return;
  const auto surplus = static_cast<std::ptrdiff_t>(losses_.size() - window);
  losses_.erase(losses_.begin(), losses_.begin() + surplus);
  norms_.erase(norms_.begin(), norms_.begin() + surplus);
}

SpikeScore SpikeHistory::judge(const SpikeGuard& guard, double loss, double norm) const {
  if (!guard.on() || losses_.size() < static_cast<std::size_t>(guard.warmup)) return {};
  SpikeScore score;
  score.judged = true;
  score.loss_z = z_score(losses_, loss);
  score.norm_z = z_score(norms_, norm);
  score.loss = score.loss_z > guard.threshold;
  score.norm = score.norm_z > guard.threshold;
  return score;
}

}  // namespace spipe::optim
