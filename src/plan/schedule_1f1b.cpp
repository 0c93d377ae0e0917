// Interleaved 1F1B: a rank alternates between forwards and backwards of its stages, so that few micro-batches are in flight;
// each change of stage fetches parameters again.
#include <algorithm>
#include <map>

#include "assignment.h"
#include "spipe/base/checked.h"

namespace spipe::plan {

namespace {

class Alternation {
 public:
  Alternation(const Assignment& assignment, const std::vector<int>& micro_batches, int ranks, const StageSeconds& seconds)
      : assignment_(assignment), seconds_(seconds), ranks_(static_cast<std::size_t>(ranks)) {
    // Ranks visit their stages for as many micro-batches as there are ranks before they come to the next ones.
    for (std::size_t first = 0; first < micro_batches.size(); first += static_cast<std::size_t>(ranks)) {
      const std::size_t end = std::min(micro_batches.size(), first + static_cast<std::size_t>(ranks));
      const std::vector<int> group(micro_batches.begin() + static_cast<std::ptrdiff_t>(first),
                                   micro_batches.begin() + static_cast<std::ptrdiff_t>(end));
      for (int f = 0; f < static_cast<int>(assignment.forward.size()); ++f) add(false, f, group);
      for (int b = static_cast<int>(assignment.backward.size()); b-- > 0;) add(true, b, group);
    }
    const int chunks = (static_cast<int>(assignment.forward.size()) + ranks - 1) / ranks;
    for (int r = 0; r < ranks; ++r) {
      const int warm_up = chunks > 1 ? (ranks - r - 1) * 2 + (chunks - 1) * ranks : ranks - r - 1;
      ranks_[static_cast<std::size_t>(r)].in_flight = warm_up + 1;
    }
  }

  VisitLists run() {
    for (bool progress = true; progress;) {
      progress = false;
      for (Rank& rank : ranks_) progress = try_run(rank, wanted(rank)) || progress;
      if (progress) continue;
      // Nobody may run what it should (more stages or fewer micro-batches than the rule is made for): somebody runs ahead.
      for (Rank& rank : ranks_) progress = progress || try_run(rank, false) || try_run(rank, true);
    }
    VisitLists lists;
    for (Rank& rank : ranks_) {
      SPIPE_CHECK(rank.next[0] == rank.queue[0].size() && rank.next[1] == rank.queue[1].size(), "1f1b blocks itself");
      lists.push_back(std::move(rank.done));
    }
    return lists;
  }

 private:
  struct Rank {
    std::vector<Visit> queue[2];  // forward, backward
    std::size_t next[2] = {0, 0};
    int in_flight = 1;
    double free = 0;
    std::vector<Visit> done;
  };

  void add(bool backward, int stage, const std::vector<int>& group) {
    const Stage& own = (backward ? assignment_.backward : assignment_.forward)[static_cast<std::size_t>(stage)];
    for (const int m : group) {
      ranks_[static_cast<std::size_t>(own.rank)].queue[backward].push_back({backward, stage, m, 0, seconds_(backward, stage)});
    }
  }
  static bool wanted(const Rank& rank) {
    if (rank.next[0] == rank.queue[0].size()) return true;
    return static_cast<int>(rank.next[0]) - static_cast<int>(rank.next[1]) >= rank.in_flight;
  }
  bool try_run(Rank& rank, bool backward) {
    if (rank.next[backward] == rank.queue[backward].size()) return false;
    Visit visit = rank.queue[backward][rank.next[backward]];
    visit.start = rank.free;
    for (const Producer& producer : producers_of(assignment_, backward, visit.stage)) {
      const auto end = ends_.find({producer.backward, producer.stage, visit.micro_batch});
      if (end == ends_.end()) return false;
      visit.start = std::max(visit.start, end->second);
    }
    rank.free = visit.start + visit.seconds;
    ends_[{backward, visit.stage, visit.micro_batch}] = rank.free;
    rank.done.push_back(visit);
    ++rank.next[backward];
    return true;
  }

  const Assignment& assignment_;
  const StageSeconds& seconds_;
  std::vector<Rank> ranks_;
  std::map<std::tuple<bool, int, int>, double> ends_;
};

VisitLists alternate(const Assignment& assignment, const std::vector<int>& micro_batches, int ranks,
                     const StageSeconds& seconds) {
  return Alternation(assignment, micro_batches, ranks, seconds).run();
}

}  // namespace

Schedule one_forward_one_backward_schedule() {
  return {.name = "1f1b", .same_cuts = true, .assign = assign_both_passes, .order = alternate};
}

}  // namespace spipe::plan
