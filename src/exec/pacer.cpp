#include "spipe/exec/pacer.h"

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <thread>

#include "paced_flows.h"
#include "spipe/base/error.h"

namespace spipe::exec {

using plan::SharedBy;
using plan::StreamKind;
using plan::Task;
using plan::TaskCost;

namespace {

constexpr std::int64_t kLateEnough = 200'000;    // ns, and
constexpr std::int64_t kPartLateEnough = 50;     // one in so many, to be an overrun
constexpr std::int64_t kWaitForPlace = 100'000;  // ns
constexpr std::int64_t kMostLateness = 100'000;  // ns that are made up for: more is a busy machine
constexpr unsigned long kTimerSlack = 1000;      // ns
constexpr double kNanoseconds = 1e9;

// What ranks of a host share: these, then both directions of every link.
enum Resource { kUpdate, kDram, kStorage, kNetwork, kFirstLink };

std::int64_t nanoseconds(double seconds) { return static_cast<std::int64_t>(std::llround(kNanoseconds * seconds)); }
double seconds(const std::atomic<std::int64_t>& ns) { return static_cast<double>(ns.load()) / kNanoseconds; }

std::int64_t steady_now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// Never returns early, and seldom late: threads wake some time after they asked to, so this one asks for earlier by what it has
// lately been, and gives the processor away until the time has come.
void sleep_until(std::int64_t until) {
  // The kernel wakes ordinary threads up to 50 us late, so that it can wake several at once.
  static thread_local const int asked = ::prctl(PR_SET_TIMERSLACK, kTimerSlack, 0, 0, 0);
  static_cast<void>(asked);
  static thread_local std::int64_t lateness = 0;
  if (const std::int64_t target = until - lateness; steady_now() < target) {
    const timespec time{.tv_sec = target / 1'000'000'000, .tv_nsec = target % 1'000'000'000};
    while (::clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, nullptr) == EINTR) {
    }
    lateness += (std::clamp<std::int64_t>(steady_now() - target, 0, kMostLateness) - lateness) / 8;
  }
  while (steady_now() < until) std::this_thread::yield();
}

std::vector<double> capacities_of(const plan::Hardware& hardware, int ranks_of_host) {
  std::vector<double> list(kFirstLink);
  list[kUpdate] = hardware.update_params_per_s;
  list[kDram] = hardware.dram_bytes_per_s;
  list[kStorage] = hardware.storage_bytes_per_s;
  list[kNetwork] = hardware.network_bytes_per_s;
  for (int r = 0; r < ranks_of_host; ++r) {  // links are fewer than ranks, or as many
    list.push_back(hardware.h2d_bytes_per_s);
    list.push_back(hardware.d2h_bytes_per_s);
  }
  for (double& capacity : list) capacity /= kNanoseconds;
  return list;
}

}  // namespace

std::uint64_t Pacer::shared_bytes(int ranks_of_host) {
  return PacedFlows::shared_bytes(ranks_of_host, kFirstLink + 2 * ranks_of_host);
}

Pacer::Pacer(const plan::Hardware& hardware, int rank_on_host, int ranks_of_host, std::span<std::byte> shared, double jitter,
             std::uint64_t seed, double speed)
    : Pacer(hardware, rank_on_host, ranks_of_host, shared, jitter, seed, speed, {steady_now, sleep_until}) {}

Pacer::Pacer(const plan::Hardware& hardware, int rank_on_host, int ranks_of_host, std::span<std::byte> shared, double jitter,
             std::uint64_t seed, double speed, Clock clock)
    : hardware_(hardware),
      rank_on_host_(rank_on_host),
      jitter_(jitter),
      seed_(seed),
      speed_(speed),
      clock_(std::move(clock)),
      capacities_(capacities_of(hardware, ranks_of_host)),
      flows_(std::make_unique<PacedFlows>(shared, ranks_of_host, capacities_)) {
  SPIPE_CHECK(rank_on_host >= 0 && rank_on_host < ranks_of_host && speed > 0, "a pacer is one rank's of a host");
}

Pacer::~Pacer() = default;

void Pacer::add_plan(int number, const plan::Plan& plan, const model::ModelShape& shape) {
  if (costs_.size() <= static_cast<std::size_t>(number)) costs_.resize(static_cast<std::size_t>(number) + 1);
  costs_[static_cast<std::size_t>(number)] = plan::task_costs(plan, shape, hardware_);
}

// Until the task's amount is through what it shares; returns when that was, which is before now by what waking up takes.
double Pacer::move(const TaskCost& cost, double start) {
  const int link = kFirstLink + 2 * (rank_on_host_ / hardware_.ranks_per_link);
  PacedFlows::Flow flow{.start = start, .amount = cost.amount};
  const auto through = [&](int resource, double weight) {
    if (capacities_[static_cast<std::size_t>(resource)] > 0) flow.use(resource, weight);
  };
  switch (cost.shared) {
    case SharedBy::nobody:
      break;
    case SharedBy::link_in:
      through(link, 1);
      break;
    case SharedBy::link_out:
      through(link + 1, 1);
      break;
    case SharedBy::network:
      through(kNetwork, 1);
      break;
    case SharedBy::update:
      flow.cap = hardware_.update_params_per_s_rank / kNanoseconds;
      through(kUpdate, 1);
      break;
    case SharedBy::storage:
      through(kStorage, 1);
      break;
  }
  if (cost.dram_bytes > 0) through(kDram, cost.dram_bytes / cost.amount);
  if (flow.use_count == 0 && flow.cap <= 0) return start;
  std::optional<int> place = flows_->start(flow);
  for (; !place; place = flows_->start(flow)) clock_.sleep_until(clock_.now() + kWaitForPlace);
  while (true) {
    const double expected = flows_->expected_end(*place);
    const auto wake = static_cast<std::int64_t>(std::ceil(expected));
    if (clock_.now() < wake) clock_.sleep_until(wake);
    if (const std::optional<double> ended = flows_->end(*place, expected)) return *ended;
  }
}

void Pacer::pace(int number, const Task& task, std::int64_t begin_ns, std::uint64_t step) {
  const TaskCost& cost = costs_[static_cast<std::size_t>(number)][task.id];
  const std::int64_t real = clock_.now() - begin_ns;
  double alone = cost.seconds;
  if (task.stream == StreamKind::compute) {
    if (jitter_ > 0) alone *= plan::jitter_factor(jitter_, seed_, step, task.id);
    alone = alone / speed_ + static_cast<double>(tax_ns_.exchange(0, std::memory_order_relaxed)) / kNanoseconds;
  }
  if (cost.device_tax > 0) tax_ns_.fetch_add(nanoseconds(cost.device_tax), std::memory_order_relaxed);
  std::int64_t modelled = nanoseconds(alone);
  if (cost.amount > 0) {
    modelled = std::llround(move(cost, static_cast<double>(begin_ns + modelled)) - static_cast<double>(begin_ns));
  }
  if (modelled > 0) count(task, real, modelled);
  if (clock_.now() < begin_ns + modelled) clock_.sleep_until(begin_ns + modelled);
}

void Pacer::count(const Task& task, std::int64_t real, std::int64_t modelled) {
  tasks_.fetch_add(1, std::memory_order_relaxed);
  if (task.stream == StreamKind::compute) {
    real_ns_.fetch_add(real, std::memory_order_relaxed);
    paced_ns_.fetch_add(modelled, std::memory_order_relaxed);
  }
  const std::int64_t late = real - modelled;
  if (late <= 0) return;
  late_ns_.fetch_add(late, std::memory_order_relaxed);
  if (late <= kLateEnough || late <= modelled / kPartLateEnough) return;
  overruns_.fetch_add(1, std::memory_order_relaxed);
  std::int64_t worst = worst_ns_.load(std::memory_order_relaxed);
  while (late > worst && !worst_ns_.compare_exchange_weak(worst, late, std::memory_order_relaxed)) {
  }
}

Pacer::Account Pacer::account() const {
  return {.tasks = tasks_.load(),
          .overruns = overruns_.load(),
          .real_seconds = seconds(real_ns_),
          .paced_seconds = seconds(paced_ns_),
          .worst_overrun_seconds = seconds(worst_ns_),
          .late_seconds = seconds(late_ns_)};
}

}  // namespace spipe::exec
