// What the ranks of a host share while tasks move bytes or parameters: flows through resources of limited capacity, with the
// simulator's max-min fair shares, in real time. The state lies in memory that the ranks share; zero bytes are a host at rest.
//
// The state stands still at the last begin or end of a flow and moves when somebody asks. Nobody is woken: a flow's end is
// known if no other comes, and when others have come its owner finds out at that time and sleeps again.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace spipe::exec {

// Times are nanoseconds of one clock of the host; rates are per nanosecond.
class PacedFlows {
 public:
  static constexpr int kMaxUses = 2;
  static constexpr int kFlowsPerRank = 16;  // on their way at once; more wait for a place

  struct Use {
    int resource = 0;
    double weight = 1;  // of the resource per unit of the flow
  };
  struct Flow {
    double start = 0, amount = 0;
    double cap = 0;  // 0: none
    std::array<Use, kMaxUses> uses{};
    int use_count = 0;
    void use(int resource, double weight) { uses[static_cast<std::size_t>(use_count++)] = {resource, weight}; }
  };

  static std::uint64_t shared_bytes(int ranks, int resources);
  // `shared`: aligned to 8 bytes, at least shared_bytes. All ranks give the same capacities; flows use only those above 0.
  PacedFlows(std::span<std::byte> shared, int ranks, std::vector<double> capacities);

  // A flow with a cap or a use; its place, or nothing when all are taken. It may have started a while ago (its task did real
  // work since): the others then give back what they had of its share.
  [[nodiscard]] std::optional<int> start(const Flow& flow);
  [[nodiscard]] double expected_end(int place) const;
  // At a time that has come: when the flow ended, if it has; its place is then free.
  [[nodiscard]] std::optional<double> end(int place, double time);

 private:
  enum class Phase : std::uint32_t { none, moving, ended };
  struct Place {
    Flow flow;
    double remaining = 0, rate = 0, ended = 0;
    Phase phase = Phase::none;
  };
  struct Head {
    std::atomic<std::uint32_t> lock;
    double at;  // of the last begin or end
  };
  class Lock;
  struct State {  // the shared one, or a copy that runs ahead
    double at = 0;
    std::span<Place> places;
    std::span<double> full_until;  // per resource: until when flows that have ended took all of it
  };

  [[nodiscard]] State shared_state() const;
  void share(const State& state, std::vector<double>& left) const;
  // The next begin or end, when it is not after `time`.
  bool advance(State& state, double time) const;
  void join_late(State& state, Place& late) const;

  std::vector<double> capacities_;
  Head* head_;
  std::span<double> full_until_;
  std::span<Place> places_;
};

}  // namespace spipe::exec
