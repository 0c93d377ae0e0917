#include "paced_flows.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <thread>
#include <type_traits>

#include "spipe/base/error.h"

namespace spipe::exec {

namespace {
constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kInstant = 1;  // ns: times closer than this are one; doubles of a clock that has run for months keep it
constexpr double kFull = 1e-9;  // of a capacity: less left over is none
constexpr int kYields = 50;
constexpr auto kLockPatience = std::chrono::seconds(10);
}  // namespace

// Held for microseconds of arithmetic. A rank that dies in them must not hang the others.
class PacedFlows::Lock {
 public:
  explicit Lock(std::atomic<std::uint32_t>& word) : word_(word) {
    const auto begin = std::chrono::steady_clock::now();
    for (int tries = 0; word_.exchange(1, std::memory_order_acquire) != 0; ++tries) {
      if (tries < kYields) {
        std::this_thread::yield();
        continue;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      SPIPE_CHECK(std::chrono::steady_clock::now() - begin < kLockPatience, "a rank has died while it paced a task");
    }
  }
  ~Lock() { word_.store(0, std::memory_order_release); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  std::atomic<std::uint32_t>& word_;
};

std::uint64_t PacedFlows::shared_bytes(int ranks, int resources) {
  return sizeof(Head) + static_cast<std::uint64_t>(resources) * sizeof(double) +
         static_cast<std::uint64_t>(ranks) * kFlowsPerRank * sizeof(Place);
}

PacedFlows::PacedFlows(std::span<std::byte> shared, int ranks, std::vector<double> capacities)
    : capacities_(std::move(capacities)) {
  static_assert(std::atomic<std::uint32_t>::is_always_lock_free && std::is_trivially_copyable_v<Place>, "processes share them");
  SPIPE_CHECK(shared.size() >= shared_bytes(ranks, static_cast<int>(capacities_.size())),
              "the memory of paced flows is too small");
  SPIPE_CHECK(reinterpret_cast<std::uintptr_t>(shared.data()) % alignof(Place) == 0, "the memory of paced flows is aligned");
  std::byte* next = shared.data();
  head_ = reinterpret_cast<Head*>(next);
  next += sizeof(Head);
  full_until_ = {reinterpret_cast<double*>(next), capacities_.size()};
  next += full_until_.size_bytes();
  places_ = {reinterpret_cast<Place*>(next), static_cast<std::size_t>(ranks) * kFlowsPerRank};
}

PacedFlows::State PacedFlows::shared_state() const { return {head_->at, places_, full_until_}; }

std::optional<int> PacedFlows::start(const Flow& flow) {
  SPIPE_CHECK(flow.amount > 0 && (flow.cap > 0 || flow.use_count > 0), "a paced flow has something to wait for");
  const Lock lock(head_->lock);
  const auto place = std::ranges::find(places_, Phase::none, &Place::phase);
  if (place == places_.end()) return std::nullopt;
  *place = {.flow = flow, .remaining = flow.amount, .phase = Phase::moving};
  State state = shared_state();
  if (flow.start < state.at) join_late(state, *place);
  return static_cast<int>(place - places_.begin());
}

double PacedFlows::expected_end(int place) const {
  std::vector<Place> places;
  std::vector<double> full_until;
  State ahead;
  {
    const Lock lock(head_->lock);
    places.assign(places_.begin(), places_.end());
    full_until.assign(full_until_.begin(), full_until_.end());
    ahead.at = head_->at;
  }
  ahead.places = places;
  ahead.full_until = full_until;
  const Place& own = places[static_cast<std::size_t>(place)];
  while (own.phase == Phase::moving) SPIPE_CHECK(advance(ahead, kNever), "a paced flow never ends");
  return own.ended;
}

std::optional<double> PacedFlows::end(int place, double time) {
  const Lock lock(head_->lock);
  State state = shared_state();
  while (advance(state, time)) {
  }
  head_->at = state.at;
  Place& own = places_[static_cast<std::size_t>(place)];
  if (own.phase == Phase::moving) return std::nullopt;
  own.phase = Phase::none;
  return own.ended;
}

// Progressive filling, as the simulator's: all rates rise together; a flow stops at its cap or when a resource it uses is full.
void PacedFlows::share(const State& state, std::vector<double>& left) const {
  left = capacities_;
  std::vector<double> weight(capacities_.size());
  std::vector<Place*> open;
  for (Place& place : state.places) {
    place.rate = 0;
    if (place.phase != Phase::moving || place.flow.start > state.at) continue;
    open.push_back(&place);
  }
  const auto uses = [](const Place& place) {
    return std::span(place.flow.uses).first(static_cast<std::size_t>(place.flow.use_count));
  };
  for (const Place* place : open) {
    for (const Use& use : uses(*place)) weight[static_cast<std::size_t>(use.resource)] += use.weight;
  }
  const auto limit = [&](const Place& place) {
    double lowest = place.flow.cap > 0 ? place.flow.cap : kNever;
    for (const Use& use : uses(place)) {
      const auto r = static_cast<std::size_t>(use.resource);
      lowest = std::min(lowest, left[r] / weight[r]);
    }
    return lowest;
  };
  while (!open.empty()) {
    double level = kNever;
    for (const Place* place : open) level = std::min(level, limit(*place));
    // Who is bound is decided before anything is taken away, so that equals are treated equally.
    const auto bound = std::stable_partition(open.begin(), open.end(),
                                             [&](const Place* place) { return limit(*place) > level * (1 + 1e-12); });
    for (auto i = bound; i != open.end(); ++i) {
      (*i)->rate = level;
      for (const Use& use : uses(**i)) {
        const auto r = static_cast<std::size_t>(use.resource);
        left[r] = std::max(0.0, left[r] - level * use.weight);
        weight[r] -= use.weight;
      }
    }
    open.erase(bound, open.end());
  }
}

bool PacedFlows::advance(State& state, double time) const {
  std::vector<double> left;
  share(state, left);
  double next = kNever;
  for (const Place& place : state.places) {
    if (place.phase != Phase::moving) continue;
    next = std::min(next, place.flow.start > state.at ? place.flow.start : state.at + place.remaining / place.rate);
  }
  if (next == kNever || next > time + kInstant) return false;
  for (Place& place : state.places) {
    if (place.phase != Phase::moving || place.flow.start > state.at) continue;
    const bool ends = state.at + place.remaining / place.rate <= next;
    place.remaining = std::max(0.0, place.remaining - place.rate * (next - state.at));
    if (!ends) continue;
    place.phase = Phase::ended;
    place.ended = next;
    for (int u = 0; u < place.flow.use_count; ++u) {
      const auto r = static_cast<std::size_t>(place.flow.uses[static_cast<std::size_t>(u)].resource);
      if (left[r] <= kFull * capacities_[r]) state.full_until[r] = next;
    }
  }
  state.at = next;
  return true;
}

// The flow started before the last event. What others took of full resources until they ended is gone; since then it had the
// share that it has now, and those who are still there had less than they thought.
void PacedFlows::join_late(State& state, Place& late) const {
  double from = late.flow.start;
  for (int u = 0; u < late.flow.use_count; ++u) {
    from = std::max(from, state.full_until[static_cast<std::size_t>(late.flow.uses[static_cast<std::size_t>(u)].resource)]);
  }
  if (from >= state.at) return;
  std::vector<double> left, before(state.places.size());
  late.phase = Phase::none;
  share(state, left);
  for (std::size_t p = 0; p < before.size(); ++p) before[p] = state.places[p].rate;
  late.phase = Phase::moving;
  share(state, left);
  const double until = std::min(state.at, from + late.remaining / late.rate);
  for (std::size_t p = 0; p < before.size(); ++p) {
    Place& place = state.places[p];
    if (&place == &late || place.rate >= before[p]) continue;
    place.remaining += (before[p] - place.rate) * std::max(0.0, until - std::max(from, place.flow.start));
  }
  late.remaining = std::max(0.0, late.remaining - late.rate * (until - from));
  if (until == state.at) return;
  late.phase = Phase::ended;
  late.ended = until;
}

}  // namespace spipe::exec
