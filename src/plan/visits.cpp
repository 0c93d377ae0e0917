// Orders of visits: a list simulation of a pipeline in which only computing takes time.
#include <algorithm>
#include <map>

#include "assignment.h"
#include "spipe/base/checked.h"

namespace spipe::plan {

void assign_along_the_ring(Assignment& assignment, int ranks) {
  int next = 0;
  for (Stage& stage : assignment.forward) stage.rank = next++ % ranks;
  for (auto stage = assignment.backward.rbegin(); stage != assignment.backward.rend(); ++stage) stage->rank = next++ % ranks;
}

void assign_both_passes(Assignment& assignment, int ranks) {
  for (auto* stages : {&assignment.forward, &assignment.backward}) {
    for (std::size_t i = 0; i < stages->size(); ++i) (*stages)[i].rank = static_cast<int>(i) % ranks;
  }
}

VisitLists order_by_stages(const Assignment& assignment, const std::vector<int>& micro_batches, int ranks,
                           const StageSeconds& seconds) {
  VisitLists lists(static_cast<std::size_t>(ranks));
  const auto add = [&](bool backward, int stage) {
    const Stage& own = (backward ? assignment.backward : assignment.forward)[static_cast<std::size_t>(stage)];
    for (const int m : micro_batches) {
      lists[static_cast<std::size_t>(own.rank)].push_back({backward, stage, m, 0, seconds(backward, stage)});
    }
  };
  for (int f = 0; f < static_cast<int>(assignment.forward.size()); ++f) add(false, f);
  for (int b = static_cast<int>(assignment.backward.size()); b-- > 0;) add(true, b);
  time_visits(assignment, lists);
  return lists;
}

std::vector<Producer> producers_of(const Assignment& assignment, bool backward, int stage) {
  std::vector<Producer> list;
  const int begin = (backward ? assignment.backward : assignment.forward)[static_cast<std::size_t>(stage)].begin;
  for (std::size_t f = 0; f < assignment.forward.size(); ++f) {
    const Stage& producer = assignment.forward[f];
    if (producer.begin < begin && begin <= producer.end) list.push_back({false, static_cast<int>(f)});
  }
  if (backward && static_cast<std::size_t>(stage) + 1 < assignment.backward.size()) list.push_back({true, stage + 1});
  return list;
}

void time_visits(const Assignment& assignment, VisitLists& lists) {
  std::map<std::tuple<bool, int, int>, double> ends;
  std::vector<std::size_t> next(lists.size(), 0);
  std::vector<double> free(lists.size(), 0);
  for (bool progress = true; progress;) {
    progress = false;
    for (std::size_t r = 0; r < lists.size(); ++r) {
      while (next[r] < lists[r].size()) {
        Visit& visit = lists[r][next[r]];
        visit.start = free[r];
        bool ready = true;
        for (const Producer& producer : producers_of(assignment, visit.backward, visit.stage)) {
          const auto end = ends.find({producer.backward, producer.stage, visit.micro_batch});
          ready = ready && end != ends.end();
          if (ready) visit.start = std::max(visit.start, end->second);
        }
        if (!ready) break;
        free[r] = visit.start + visit.seconds;
        ends[{visit.backward, visit.stage, visit.micro_batch}] = free[r];
        ++next[r];
        progress = true;
      }
    }
  }
  for (std::size_t r = 0; r < lists.size(); ++r) SPIPE_CHECK(next[r] == lists[r].size(), "an order of visits blocks itself");
}

}  // namespace spipe::plan
