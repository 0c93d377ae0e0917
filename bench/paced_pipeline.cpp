// Real against simulated: four real processes with paced devices (device.pace) run plans whose steps the simulator predicts.
//   mpirun -np 4 --oversubscribe --bind-to none build/release/bench/paced_pipeline
// Prints a table, then one line of JSON. A run is void when more than 1 % of its tasks overran their modelled time, or the real
// work took more than 30 % of it.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <nlohmann/json.hpp>

#include "paced.h"
#include "spipe/base/error.h"
#include "spipe/base/log.h"

namespace spipe::bench {
namespace {

std::vector<Case> cases() {
  std::vector<Case> list;
  const Case shapes[] = {
      {.name = "heavy head", .layers = 12, .vocabulary = 1500},
      {.name = "wide ffn, odd M",
       .layers = 9,
       .ffn = 160,
       .vocabulary = 256,
       .micro_batches = 9,
       .fetch_over_forward = 5,
       .backward_stages = 11},
      {.name = "link and update bound",
       .layers = 14,
       .vocabulary = 900,
       .micro_batches = 5,
       .layer_forward_ms = 12,
       .fetch_over_forward = 8,
       .update_over_forward = 12},
  };
  for (const Case& shape : shapes) {
    for (const char* schedule : {"spipe", "mobius", "1f1b"}) {
      Case c = shape;
      c.schedule = schedule;
      c.jitter = 0.2;
      if (c.schedule != "spipe") c.backward_stages = 8;
      list.push_back(c);
    }
  }
  Case slow = shapes[0];
  slow.name = "slow rank";
  slow.jitter = 0.2;
  slow.slow_rank = 2;
  list.push_back(slow);
  return list;
}

// The 10B model on four V100 at 1,024 tokens: 48 layers, M = 8; a layer's forward takes 12.4 ms there, its fetch 77 ms, its
// update 0.1 s of the host's rate (0.4 s of a rank's); all of it three times as fast here.
Case regime(const char* schedule) {
  Case c{.name = "10B/1024 regime",
         .layers = 48,
         .vocabulary = 384,
         .layer_forward_ms = 4.13,
         .fetch_over_forward = 6.2,
         .update_over_forward = 32.5};
  c.schedule = schedule;
  c.barrier = true;
  const bool spipe = c.schedule == "spipe";
  if (spipe) c.policy = "overlap";
  c.forward_stages = 8;
  c.backward_stages = spipe ? 24 : 8;
  return c;
}

// Runs cases, prints a line for each, and keeps what all of them say.
class Table {
 public:
  Table(comm::World& world, int steps) : bench_(world, steps), prints_(world.rank() == 0) {
    if (!prints_) return;
    fmt::print("{:22} {:7} {:>8} {:>8} {:>9} {:>8} {:>8} {:>8} {:>7}\n", "case", "plan", "real ms", "sim ms", "error", "bubble",
               "sim", "overrun", "work");
  }
  Measured run(const Case& c) {
    const Measured m = bench_.run(c);
    worst_error = std::max(worst_error, std::abs(m.error()));
    void_runs += m.is_void() ? 1 : 0;
    if (!prints_) return m;
    fmt::print("{:22} {:7} {:8.1f} {:8.1f} {:+7.1f} % {:6.1f} % {:6.1f} % {:6.2f} % {:5.1f} %{}\n", c.name, c.schedule,
               1e3 * m.real, 1e3 * m.simulated, 100 * m.error(), 100 * m.bubble_real, 100 * m.bubble_simulated,
               100 * m.overruns, 100 * m.real_share, m.is_void() ? "  VOID" : "");
    std::fflush(stdout);
    return m;
  }
  double worst_error = 0;
  int void_runs = 0;

 private:
  PacedBench bench_;
  bool prints_;
};

// Equal units, M = 2N, updates that take no time: the bubble of the pipeline itself.
Case equal_units() {
  Case c{.name = "bubble, M = 2N",
         .layers = 48,
         .vocabulary = 64,
         .micro_batches = 2 * kRanks,
         .layer_forward_ms = 5,
         .fetch_over_forward = 1,
         .update_over_forward = 0};
  c.forward_stages = 8;
  c.backward_stages = 24;
  return c;
}

nlohmann::ordered_json measure(comm::World& world, int steps, bool quick, bool only_last) {
  Table table(world, steps);
  nlohmann::ordered_json json = {{"hosts", world.hosts()}};
  std::vector<Case> all = cases();
  if (quick) all.resize(3);
  if (only_last) all.clear();
  for (const Case& c : all) table.run(c);
  if (world.hosts() == 1) {
    json["bubble_2n"] = table.run(equal_units()).bubble_real;
    const double spipe = table.run(regime("spipe")).real;
    json["mobius_over_spipe_10b"] = table.run(regime("mobius")).real / spipe;
  }
  json["worst_error"] = table.worst_error;
  json["void_runs"] = table.void_runs;
  return json;
}

int run(int argc, char** argv) {
  CLI::App app{"Measures paced pipelines of four ranks against the simulator.", "paced_pipeline"};
  app.footer(
      "Examples:\n"
      "  mpirun -np 4 --oversubscribe --bind-to none paced_pipeline\n"
      "  SPIPE_FAKE_HOSTS=2 mpirun -np 4 --oversubscribe --bind-to none paced_pipeline    as two hosts with a network between");
  int steps = 9;
  bool quick = false, only_last = false;
  app.add_option("--steps", steps, "steps of each run")->check(CLI::Range(6, 1000));
  app.add_flag("--quick", quick, "one shape only");
  app.add_flag("--only-last", only_last, "the bubble and the 10B regime only");
  CLI11_PARSE(app, argc, argv);
  init_logging(LogLevel::error);
  comm::World world;
  const bool prints = world.rank() == 0;
  int code = 2;
  if (world.size() != kRanks || kRanks % world.hosts() != 0) {
    if (prints) fmt::print(stderr, "error: start it with mpirun -np {}\n", kRanks);
    world.finish();
    return code;
  }
  try {
    const nlohmann::ordered_json json = measure(world, steps, quick, only_last);
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
