// The published evaluation of SPipe, predicted: plans of the schedules, run by the simulator on hardware files of the two
// clusters, beside the published milliseconds. Six constants a cluster are fitted on its single-node rows (--fit prints them),
// the network on the 30B/1024 rows; all other rows are predictions. Then the ablation of figure 15 and what runs out of
// memory. The last line is JSON.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "paper_rows.h"
#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/plan/timeline.h"

namespace {

using namespace spipe;
using namespace spipe::bench;

struct Prediction {
  double step_ms = 0, latency_ms = 0;
};

// A row with its plan, which does not depend on the hardware.
struct Case {
  Row row;
  model::ModelShape shape;
  plan::Plan plan;

  explicit Case(const Row& r) : row(r), shape(published_shape(r)), plan(published_plan(r, shape)) {}
  Case(const Row& r, const Ablation& ablation) : row(r), shape(published_shape(r)), plan(ablation_plan(r, shape, ablation)) {}
  [[nodiscard]] plan::Simulation simulate(const plan::Hardware& hardware) const {
    return plan::simulate(plan, shape, hardware);
  }
  [[nodiscard]] Prediction predict(const plan::Hardware& hardware) const {
    const plan::Simulation s = simulate(hardware);
    return {1e3 * s.step_seconds, 1e3 * s.pass_seconds};
  }
};

double geometric_mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double v : values) sum += std::log(v);
  return values.empty() ? 0 : std::exp(sum / static_cast<double>(values.size()));
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// Fitting: coordinate search on the logarithms of the constants.

struct Constant {
  const char* name;
  void (*scale)(plan::Hardware&, double);
};
constexpr Constant kConstants[] = {
    {"device.matmul_flops", [](plan::Hardware& h, double f) { h.matmul_flops *= f; }},
    {"device.memory_bandwidth", [](plan::Hardware& h, double f) { h.memory_bytes_per_s *= f; }},
    {"link.h2d", [](plan::Hardware& h, double f) { h.h2d_bytes_per_s *= f; }},
    {"link.d2h", [](plan::Hardware& h, double f) { h.d2h_bytes_per_s *= f; }},
    {"link.message_kernels", [](plan::Hardware& h, double f) { h.message_kernel_bytes_per_s *= f; }},
    {"host.update",
     [](plan::Hardware& h, double f) {
       h.update_params_per_s *= f;
       h.update_params_per_s_rank *= f;
     }},
};

constexpr double kGain = 4;

// Squares of relative errors of the step, half as much of the pass, and what the ablation's steps gain over each other.
double misfit(const std::vector<Case>& cases, const plan::Hardware& hardware) {
  double sum = 0;
  std::optional<double> before;
  for (const Case& c : cases) {
    const Prediction p = c.predict(hardware);
    const double step = std::log(p.step_ms / *c.row.elapsed_ms);
    sum += step * step;
    if (c.row.figure == 15) {
      if (before) sum += kGain * (step - *before) * (step - *before);
      before = step;
    }
    if (c.row.latency_ms) {
      const double pass = std::log(p.latency_ms / *c.row.latency_ms);
      sum += pass * pass / 2;
    }
  }
  return sum;
}

// What no link of its kind exceeds: sixteen lanes of PCIe 3 (V100) and 4 (RTX 3090).
double link_limit(const std::string& cluster) { return cluster == "v100" ? 13e9 : 26e9; }

plan::Hardware fitted(const std::vector<Case>& cases, plan::Hardware hardware, double limit) {
  double best = misfit(cases, hardware);
  for (double step = 0.2; step > 0.004;) {
    bool better = false;
    for (const Constant& constant : kConstants) {
      for (const double factor : {1 + step, 1 / (1 + step)}) {
        plan::Hardware changed = hardware;
        constant.scale(changed, factor);
        if (std::max(changed.h2d_bytes_per_s, changed.d2h_bytes_per_s) > limit) continue;
        const double now = misfit(cases, changed);
        if (now >= best - 1e-9) continue;
        best = now;
        hardware = changed;
        better = true;
      }
    }
    if (!better) step /= 2;
  }
  return hardware;
}

void fit(const std::vector<Row>& rows, const std::string& cluster, plan::Hardware hardware) {
  std::vector<Case> single, network;
  for (const Row& row : rows) {
    if (row.cluster != cluster || !row.elapsed_ms) continue;
    if (const auto ablation = ablation_of(row.system)) single.emplace_back(row, *ablation);
    if (!is_evaluation(row) || row.system == "Megatron") continue;
    if (row.nodes == 1) single.emplace_back(row);
    if (row.size_b == 30 && row.seq_len == 1024) network.emplace_back(row);
  }
  hardware = fitted(single, hardware, link_limit(cluster));
  double best = misfit(network, hardware);
  const double start = hardware.network_bytes_per_s;
  for (int i = -20; i <= 20; ++i) {
    plan::Hardware changed = hardware;
    changed.network_bytes_per_s = start * std::pow(1.1, i);
    const double now = misfit(network, changed);
    if (now < best - 1e-7) {
      best = now;
      hardware = changed;
    }
  }
  fmt::print("fitted on the single-node rows of {} (misfit {:.5f}):\n{}\n", cluster, misfit(single, hardware),
             plan::hardware_text(hardware));
}

// Figures 9 and 10.

struct Totals {
  std::vector<double> errors;                            // of SPipe and Mobius
  std::map<std::string, std::vector<double>> ratios;     // Mobius over SPipe, simulated, by cluster
  std::map<std::string, std::vector<double>> published;  // the same of the table
  int memory_right = 0, memory_wrong = 0;
};

void evaluate(const std::vector<Row>& rows, const std::string& cluster, const plan::Hardware& hardware, bool with_megatron,
              int max_nodes, Totals& totals) {
  fmt::print("\n{} (simulated ms / published ms)\n{:>5} {:>5} {:>5}  {:>30}  {:>30}  {:>30}\n", cluster, "model", "seq",
             "nodes", "SPipe", "Mobius", "1F1B-offload");
  std::map<std::tuple<int, int, int>, std::map<std::string, Row>> table;  // nodes, size, seq
  for (const Row& row : rows) {
    if (row.cluster == cluster && is_evaluation(row) && row.nodes <= max_nodes) {
      table[{row.nodes, row.size_b, row.seq_len}][row.system] = row;
    }
  }
  for (const auto& [key, systems] : table) {
    std::map<std::string, double> simulated;
    std::string line = fmt::format("{:>4}B {:>5} {:>5}", std::get<1>(key), std::get<2>(key), std::get<0>(key));
    for (const char* system : {"SPipe", "Mobius", "Megatron"}) {
      const auto found = systems.find(system);
      std::string cell = "-";
      if (found != systems.end() && !found->second.elapsed_ms) {
        cell = found->second.failure;
      } else if (found != systems.end() && (with_megatron || found->first != "Megatron")) {
        const double ms = Case(found->second).predict(hardware).step_ms;
        const double error = ms / *found->second.elapsed_ms - 1;
        simulated[system] = ms;
        cell = fmt::format("{:7.0f} / {:6.0f} {:+6.1f} %", ms, *found->second.elapsed_ms, 100 * error);
        if (found->first != "Megatron") totals.errors.push_back(std::abs(error));
      }
      line += fmt::format("  {:>30}", cell);
    }
    fmt::print("{}\n", line);
    if (simulated.contains("SPipe") && simulated.contains("Mobius")) {
      totals.ratios[cluster].push_back(simulated["Mobius"] / simulated["SPipe"]);
      totals.published[cluster].push_back(*systems.at("Mobius").elapsed_ms / *systems.at("SPipe").elapsed_ms);
    }
  }
  fmt::print("Mobius over SPipe, geometric mean: simulated {:.3f}, published {:.3f}\n", geometric_mean(totals.ratios[cluster]),
             geometric_mean(totals.published[cluster]));
}

void memory(const std::vector<Row>& rows, const std::string& cluster, const plan::Hardware& hardware, Totals& totals) {
  const double has = static_cast<double>(hardware.memory_bytes);
  fmt::print("\nout of memory on {} ({:.0f} GiB a device), predicted or published\n", cluster, has / 0x1p30);
  for (const Row& row : rows) {
    if (row.cluster != cluster || !is_evaluation(row) || row.system == "Megatron") continue;
    const double need = published_device_bytes(row);
    const bool fits = need <= has, ran = row.elapsed_ms.has_value();
    (fits == ran ? totals.memory_right : totals.memory_wrong)++;
    if (fits && ran) continue;
    fmt::print("  {:6} {:>4}B {}: {:5.1f} GiB: {}; published: {}\n", row.system, row.size_b, row.seq_len, need / 0x1p30,
               fits ? "fits" : "out of memory", ran ? "ran" : row.failure);
  }
}

// Figure 15: each step of the ablation by itself, in time of the whole step.
bool ablation(const std::vector<Row>& rows, const plan::Hardware& hardware) {
  struct Step {
    const char* text;
    double ms, published, pass_ms, published_pass_ms;
  };
  std::vector<Step> steps;
  for (const Row& row : rows) {
    if (row.figure != 15) continue;
    const std::optional<Ablation> ablation = ablation_of(row.system);
    if (!ablation) continue;
    const model::ModelShape shape = published_shape(row);
    const plan::Plan plan = ablation_plan(row, shape, *ablation);
    const plan::Simulation simulated = plan::simulate(plan, shape, hardware);
    steps.push_back({ablation->text, 1e3 * simulated.step_seconds, *row.elapsed_ms, 1e3 * simulated.pass_seconds,
                     row.latency_ms.value_or(0)});
  }
  fmt::print("\nfigure 15 (19B, sequence 1024, M = N = 4): simulated / published\n");
  for (const Step& s : steps) {
    fmt::print("  {:50} {:6.0f} / {:6.0f} ms   {:.3f} / {:.3f}   pass {:5.0f} / {:5.0f} ms\n", s.text, s.ms, s.published,
               steps[0].ms / s.ms, steps[0].published / s.published, s.pass_ms, s.published_pass_ms);
  }
  bool same = true;
  for (const Step& a : steps) {
    for (const Step& b : steps) same = same && (a.published < b.published) == (a.ms < b.ms);
  }
  fmt::print("the order is {}\n", same ? "the published one" : "another one");
  return same;
}

struct Options {
  std::string figures = "bench/data/figures.csv", hardware = "configs/hardware", fit, timeline;
  bool megatron = true;
  int max_nodes = 8;
};

int run(const Options& options) {
  const std::vector<Row> rows = read_rows(options.figures);
  const std::map<std::string, plan::Hardware> machines = {
      {"v100", plan::load_hardware(Path(options.hardware) / "v100x4.yaml")},
      {"3090", plan::load_hardware(Path(options.hardware) / "rtx3090x4.yaml")}};
  if (!options.fit.empty()) {
    const auto machine = machines.find(options.fit);
    if (machine == machines.end()) throw Error("unknown cluster " + options.fit, "--fit", "v100 or 3090");
    fit(rows, options.fit, machine->second);
    return 0;
  }
  Totals totals;
  for (const char* cluster : {"v100", "3090"}) {
    evaluate(rows, cluster, machines.at(cluster), options.megatron, options.max_nodes, totals);
  }
  for (const char* cluster : {"v100", "3090"}) memory(rows, cluster, machines.at(cluster), totals);
  const bool order = ablation(rows, machines.at("v100"));
  if (!options.timeline.empty()) {
    for (const Row& row : rows) {
      if (row.figure != 9 || row.size_b != 10 || row.seq_len != 1024 || row.system != "SPipe") continue;
      const Case c(row);
      const plan::Simulation s = c.simulate(machines.at("v100"));
      write_text_atomic(options.timeline,
                        plan::timeline_html(plan::slices_of(c.plan, s),
                                            {"SPipe, 10B, sequence 1024, four V100", plan::simulation_summary(c.plan, s)}));
    }
  }
  const double worst = *std::max_element(totals.errors.begin(), totals.errors.end());
  fmt::print("\n{}\n", nlohmann::json{{"median_error", median(totals.errors)},
                                      {"max_error", worst},
                                      {"cells", totals.errors.size()},
                                      {"mobius_over_spipe_v100", geometric_mean(totals.ratios["v100"])},
                                      {"mobius_over_spipe_v100_published", geometric_mean(totals.published["v100"])},
                                      {"mobius_over_spipe_3090", geometric_mean(totals.ratios["3090"])},
                                      {"mobius_over_spipe_3090_published", geometric_mean(totals.published["3090"])},
                                      {"ablation_order", order},
                                      {"memory_right", totals.memory_right},
                                      {"memory_wrong", totals.memory_wrong}}
                           .dump());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Predicts the published evaluation of SPipe with the simulator");
  Options options;
  app.add_option("--figures", options.figures, "the published figures (CSV)");
  app.add_option("--hardware", options.hardware, "folder of v100x4.yaml and rtx3090x4.yaml");
  app.add_option("--fit", options.fit, "only fit the constants of a cluster (v100 or 3090) and print them");
  app.add_option("--max-nodes", options.max_nodes, "leave out larger rows");
  app.add_option("--timeline", options.timeline, "write an HTML timeline of SPipe, 10B/1024, V100");
  app.add_flag("!--no-1f1b", options.megatron, "leave out 1F1B-offload");
  CLI11_PARSE(app, argc, argv);
  try {
    return run(options);
  } catch (const std::exception& e) {
    fmt::print(stderr, "reproduce_paper: {}\n", e.what());
    return 1;
  }
}
