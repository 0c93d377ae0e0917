#include "spipe/plan/search.h"

#include <algorithm>

#include "rank_trials.h"
#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/base/units.h"
#include "spipe/plan/verifier.h"

namespace spipe::plan {

namespace {

// Of the fullest host, with the state split evenly.
std::uint64_t host_bytes(const SearchRequest& request, const Plan& plan) {
  const std::uint64_t mailboxes = *std::max_element(plan.mailbox_bytes.begin(), plan.mailbox_bytes.end());
  const auto ranks = static_cast<std::uint64_t>(ceil_div(plan.ranks, plan.hosts()));
  return ceil_div(request.store_bytes, static_cast<std::uint64_t>(plan.hosts())) + plan.parking_bytes * ranks + mailboxes;
}

// Whether the plan of a trial fits the hardware; the first use of memory that does is the trial's.
void try_one(const SearchRequest& request, Trial& trial) {
  const model::ModelShape& shape = *request.input.shape;
  const Hardware& hardware = request.hardware;
  for (const Thrift& thrift : kThrifts) {
    trial.input.prefetch = thrift.prefetch;
    trial.input.park = thrift.park;
    const Plan plan = make_schedule(trial.schedule, trial.input);
    trial.device_bytes = plan.device_bytes();
    trial.host_bytes = host_bytes(request, plan);
    trial.refused.clear();
    if (hardware.memory_bytes > 0 && trial.device_bytes > hardware.memory_bytes) {
      trial.refused = "needs " + format_bytes(trial.device_bytes) + " of device memory";
    } else if (hardware.host_bytes > 0 && trial.host_bytes > hardware.host_bytes) {
      trial.refused = "needs " + format_bytes(trial.host_bytes) + " of host memory";
    }
    if (!trial.refused.empty()) continue;
    if (const auto violation = verify(plan, shape)) {
      throw InternalError("verified plan", violation->message, __FILE__, __LINE__);
    }
    const Simulation simulation = simulate(plan, shape, hardware);
    trial.step_seconds = simulation.step_seconds;
    trial.bubble = simulation.bubble;
    trial.exposed_optimizer_seconds = simulation.exposed_optimizer_seconds;
    return;
  }
}

}  // namespace

std::vector<Trial> search_schedules(const SearchRequest& request) {
  std::vector<Trial> trials = list_trials(request.input, request.schedules.empty() ? schedule_names() : request.schedules,
                                          request.forward_stages, request.backward_stages)
                                  .trials;
  for (Trial& trial : trials) {
    if (trial.refused.empty()) try_one(request, trial);
  }
  std::stable_sort(trials.begin(), trials.end(), faster);
  return trials;
}

}  // namespace spipe::plan
