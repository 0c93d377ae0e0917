// What hiding the optimizer is worth: four real processes with paced devices run the regimes of two published rows by the
// published method (spipe, 2 + 6 stages a rank, every update as soon as its gradient is there, a barrier between steps),
// without speculation, and as the planner chooses. Regimes of other rows are simulated.
//   mpirun -np 4 --oversubscribe --bind-to none build/release/bench/paced_updates
// Prints a table, then one line of JSON. Void runs are marked.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "paced.h"
#include "spipe/base/error.h"
#include "spipe/base/log.h"

namespace spipe::bench {
namespace {

// A regime: 48 layers on four ranks that share a host's cores, in 16 bits. Times of a layer on the published machine as its
// figures are modelled best with four numbers (62 TFLOP/s, links of 12 GB/s, 1.9e9 updates a second by a host, whichever rank
// asks), and as bench/reproduce_paper fits them with more (slow copies in, a quarter of a host's rate for a rank).
struct Regime {
  const char* name;
  bool measured;  // or only simulated
  int micro_batches;
  double layer_forward_ms, fetch_ms, update_ms;  // update: by one rank alone
  double ranks_that_fill;
};

constexpr Regime kRegimes[] = {
    {"10B/1024", true, 8, 13.9, 33.7, 106.5, 1},      {"30B/1024, one of two hosts", true, 16, 20.6, 50.3, 158.7, 1},
    {"19B/1024", false, 8, 24.0, 58.6, 185.2, 1},     {"40B/1024, one of two hosts", false, 16, 27.9, 68.3, 215.8, 1},
    {"10B/1024, fitted", false, 8, 12.4, 77, 403, 4}, {"30B/1024, fitted", false, 16, 18.6, 115, 600, 4},
};

Case case_of(const Regime& regime, double tokens) {
  Case c{.name = regime.name, .layers = 48, .vocabulary = 384};
  c.micro_batches = static_cast<int>(std::lround(regime.micro_batches * tokens));
  c.layer_forward_ms = regime.layer_forward_ms / 3;
  c.fetch_over_forward = regime.fetch_ms / regime.layer_forward_ms;
  c.update_over_forward = regime.update_ms / regime.layer_forward_ms;
  c.ranks_that_fill = regime.ranks_that_fill;
  c.precision = "bf16";
  return c;
}

Case published(Case c) {
  c.schedule = "spipe";
  c.forward_stages = 8;
  c.backward_stages = 24;
  c.policy = "overlap";
  c.placement = "cpu";
  c.barrier = true;
  return c;
}

// The planner's choice, with the memory that the published plan takes and a quarter more.
Case planned(Case c, const char* policy, std::uint64_t device_bytes) {
  c.schedule = "auto";
  c.backward_stages = 0;
  c.policy = policy;
  c.device_bytes = device_bytes;
  return c;
}

class Table {
 public:
  Table(comm::World& world, int steps) : bench_(world, steps), prints_(world.rank() == 0) {
    if (!prints_) return;
    fmt::print("{:27} {:10} {:12} {:>8} {:>8} {:>8} {:>8} {:>8}  {}\n", "case", "updates", "schedule", "real ms", "sim ms",
               "error", "bound ms", "of bound", "split");
  }

  // With `measured` false only rank 0 knows anything, and its real seconds are the simulated ones.
  Measured run(const Case& c, const char* updates, bool measured) {
    if (!measured && !prints_) return {};
    Measured m = measured ? bench_.run(c) : bench_.predict(c);
    if (!measured) m.real = m.simulated;
    worst_error = std::max(worst_error, std::abs(m.error()));
    void_runs += m.is_void() ? 1 : 0;
    if (prints_) print(c, updates, m, measured);
    return m;
  }
  double worst_error = 0;
  int void_runs = 0;

 private:
  static void print(const Case& c, const char* updates, const Measured& m, bool measured) {
    const std::string real = measured ? fmt::format("{:.1f}", 1e3 * m.real) : "-";
    const std::string error = measured ? fmt::format("{:+.1f} %", 100 * m.error()) : "-";
    fmt::print("{:27} {:10} {:12} {:>8} {:8.1f} {:>8} {:8.1f} {:8.3f}  {}{}\n", c.name, updates, m.schedule, real,
               1e3 * m.simulated, error, 1e3 * m.bound, m.bound / m.real, plan::split_text(m.split),
               m.is_void() ? "  VOID" : "");
    std::fflush(stdout);
  }
  PacedBench bench_;
  bool prints_;
};

nlohmann::ordered_json measure(comm::World& world, int steps, bool simulate) {
  Table table(world, steps);
  nlohmann::ordered_json json;
  for (const Regime& regime : kRegimes) {
    const bool measured = regime.measured && !simulate;
    const Case c = case_of(regime, 1);
    const Measured theirs = table.run(published(c), "published", measured);
    const std::uint64_t budget = theirs.device_bytes * 5 / 4;  // known, and used, on rank 0
    const Measured deferred = table.run(planned(c, "deferred", budget), "deferred", measured);
    const Measured chosen = table.run(planned(c, "auto", budget), "auto", measured);
    // How much shorter the steps of twice as many tokens were, if updates took no time.
    const Case twice = planned(case_of(regime, 2), "auto", 2 * budget);
    Case no_updates = twice;
    no_updates.update_over_forward = 0;
    const Measured both = table.run(twice, "auto, 2T", measured), passes = table.run(no_updates, "none, 2T", measured);
    json.push_back({{"regime", regime.name},
                    {"measured", measured},
                    {"deferred_over_published", theirs.real / deferred.real},
                    {"auto_over_published", theirs.real / chosen.real},
                    {"of_bound", chosen.bound / chosen.real},
                    {"exposed_at_twice_the_tokens", 1 - passes.real / both.real}});
  }
  return {{"regimes", json}, {"worst_error", table.worst_error}, {"void_runs", table.void_runs}};
}

int run(int argc, char** argv) {
  CLI::App app{"Measures policies of updates on paced devices of four ranks.", "paced_updates"};
  app.footer("Examples:\n  mpirun -np 4 --oversubscribe --bind-to none paced_updates --steps 9\n  paced_updates --simulate");
  int steps = 9;
  app.add_option("--steps", steps, "steps of each run")->check(CLI::Range(6, 1000));
  bool simulate = false;
  app.add_flag("--simulate", simulate, "no runs, only what the simulator says (one process)");
  CLI11_PARSE(app, argc, argv);
  init_logging(LogLevel::error);
  comm::World world;
  const bool prints = world.rank() == 0;
  int code = 2;
  if (world.size() != (simulate ? 1 : kRanks) || world.hosts() != 1) {
    if (prints) fmt::print(stderr, "error: start it with mpirun -np {} on one host, or alone with --simulate\n", kRanks);
    world.finish();
    return code;
  }
  try {
    const nlohmann::ordered_json json = measure(world, steps, simulate);
    if (prints) fmt::print("{}\n", json.dump());
    code = 0;
  } catch (const Error& error) {
    if (prints) fmt::print(stderr, "error: {}\n", error.what());
  }
  world.finish();
  return code;
}

}  // namespace
}  // namespace spipe::bench

int main(int argc, char** argv) { return spipe::bench::run(argc, argv); }
