#include "startup_tables.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "spipe/base/error.h"
#include "spipe/base/host.h"
#include "spipe/base/units.h"
#include "spipe/report/report.h"

namespace spipe::tools {

namespace {

bool decays(const model::Parameter& p, std::span<const optim::ParameterGroup> groups) {
  return optim::rule_of(p, groups, p.decay ? 1 : 0).weight_decay > 0 && !optim::is_frozen(p, groups);
}

// A row for every parameter group, and one for what is in none.
std::vector<std::pair<std::string, std::string>> group_rows(const exec::RunSetup& setup) {
  const auto& groups = setup.hyper.groups;
  if (groups.empty()) return {};
  std::vector<std::uint64_t> tensors(groups.size() + 1), elements(groups.size() + 1);
  for (const model::StoreUnit& unit : setup.shape.store_units) {
    for (const model::Parameter& p : unit.parameters) {
      const std::size_t at = p.group < 0 ? groups.size() : static_cast<std::size_t>(p.group);
      ++tensors[at];
      elements[at] += p.elements();
    }
  }
  std::vector<std::pair<std::string, std::string>> rows;
  for (std::size_t i = 0; i <= groups.size(); ++i) {
    const std::string of = fmt::format("{} in {} tensors", format_count(static_cast<double>(elements[i])), tensors[i]);
    if (i == groups.size()) {
      rows.emplace_back("no group", of);
    } else {
      rows.emplace_back(fmt::format("group {}", i),
                        fmt::format("{} ('{}'): {}", of, groups[i].pattern, optim::settings_text(groups[i])));
    }
  }
  return rows;
}

// As in "adamw, betas 0.9 0.95, weight decay 0.1; 16 B/parameter".
std::string optimizer_text(const config::OptimizerConfig& o, const store::StoreFormat& format) {
  const std::string factors = o.type == "sgd" ? fmt::format("{}momentum {}", o.nesterov ? "Nesterov " : "", o.momentum)
                                              : fmt::format("betas {} {}", o.beta1, o.beta2);
  return fmt::format("{}, {}, weight decay {}; {} B/parameter of state and gradients", o.type, factors, o.weight_decay,
                     format.bytes_per_parameter());
}

}  // namespace

std::string model_table(const exec::RunSetup& setup) {
  const model::Architecture& a = setup.architecture;
  std::uint64_t decayed = 0, plain = 0, tensors = 0;
  for (const model::StoreUnit& unit : setup.shape.store_units) {
    for (const model::Parameter& p : unit.parameters) {
      (decays(p, setup.hyper.groups) ? decayed : plain) += p.elements();
      ++tensors;
    }
  }
  const config::Config& c = setup.config;
  const std::int64_t step_tokens = c.batch.global * c.data.seq_len;
  std::vector<std::vector<std::string>> rows = {{"model", model::family_name(a.family)}};
  const auto row = [&rows](std::string key, std::string value) { rows.push_back({std::move(key), std::move(value)}); };
  row("parameters", fmt::format("{} in {} tensors ({} with weight decay, {} without)", format_count(double(decayed + plain)),
                                tensors, format_count(double(decayed)), format_count(double(plain))));
  for (const auto& [name, text] : group_rows(setup)) row(name, text);
  row("shape", fmt::format("{} layers, hidden {}, {} heads ({} KV) of {}, ffn {}, vocabulary {}{}", a.layers, a.hidden_size,
                           a.heads, a.kv_heads, a.head_dim, a.ffn_size, a.vocab_size, a.tied_embeddings ? ", tied" : ""));
  row("step", fmt::format("{} sequences of {} = {} tokens, as {} micro-batches of {}", c.batch.global, c.data.seq_len,
                          step_tokens, setup.micro_batches, c.batch.micro));
  row("precision", fmt::format("compute {}, master fp32{}, moments {}, gradients {} (numerics {})",
                               dtype_name(setup.shape.compute), setup.format.split_master ? " split" : "",
                               dtype_name(setup.format.moment), dtype_name(setup.format.grad), setup.numerics.hash()));
  row("optimizer", optimizer_text(c.optimizer, setup.format));
  if (const optim::LossScaling& scaling = setup.loss_scaling; scaling.dynamic) {
    row("loss scale", fmt::format("dynamic, first {}; x {} after {} steps without overflow, x {} at overflow {}, within {}..{}",
                                  scaling.initial, scaling.growth, scaling.window, scaling.backoff, scaling.hysteresis,
                                  scaling.minimum, scaling.maximum));
  } else if (scaling.scales()) {
    row("loss scale", fmt::format("{}", scaling.initial));
  }
  return report::table(rows);
}

std::string memory_table(const exec::RunSetup& setup) {
  const plan::Plan& plan = setup.fit.train;
  std::vector<std::vector<std::string>> rows = {{"memory", "at the peak", "own peak"}};
  for (const plan::MemoryUse& use : plan::memory_by_kind(plan)) {
    rows.push_back({plan::buffer_kind_name(use.kind), format_bytes(use.at_peak), format_bytes(use.own_peak)});
  }
  if (plan.in_place_bytes > 0) rows.push_back({"store, used in place", format_bytes(plan.in_place_bytes), ""});
  const auto& budget = setup.config.device.memory;
  rows.push_back({"device", format_bytes(plan.device_bytes()), budget ? "budget " + format_bytes(*budget) : "no budget"});
  rows.push_back({"", "", ""});
  std::uint64_t here = 0;
  const std::vector<int> hosts = setup.host_of_unit();
  for (std::size_t s = 0; s < hosts.size(); ++s) {
    if (hosts[s] == setup.job.host()) here += setup.shape.store_units[s].elements;
  }
  const double per = static_cast<double>(setup.host.store) / static_cast<double>(std::max<std::uint64_t>(1, here));
  rows.push_back({"store (state)", format_bytes(setup.host.store),
                  fmt::format("{:.1f} B/parameter{}", per, setup.job.hosts() > 1 ? ", of this host's units" : "")});
  const int ranks = setup.job.ranks_of_host(setup.job.host());
  const std::string of_ranks = ranks > 1 ? fmt::format("of {} ranks", ranks) : "";
  rows.push_back({"device arena", format_bytes(setup.host.arena),
                  ranks > 1 ? fmt::format("on the host (CPU devices), {}", of_ranks) : "on the host (CPU device)"});
  rows.push_back({"parking", format_bytes(setup.host.parking), of_ranks});
  if (setup.pipeline()) rows.push_back({"mailboxes", format_bytes(setup.host.mailboxes), "shared by the ranks"});
  rows.push_back({"staging", format_bytes(setup.host.staging), ""});
  rows.push_back({"host", format_bytes(setup.host.total),
                  fmt::format("limit {} ({})", format_bytes(setup.host_limit), setup.host_limit_source)});
  return report::table(rows);
}

namespace {

// "updates: 60 % before the norm is known, 40 % after; 75 % by CPU cores, 25 % by devices in pieces".
std::string updates_text(const exec::RunSetup& setup) {
  const plan::ScheduleOptions& options = setup.fit.train.options;
  double all = 0, speculating = 0, device = 0, resident = 0, slots = 0;
  for (int s = 0; s < setup.shape.store_unit_count(); ++s) {
    const auto elements = static_cast<double>(setup.shape.store_units[static_cast<std::size_t>(s)].elements);
    const plan::UpdateWay& way = options.way(s);
    all += elements;
    if (way.speculate) speculating += elements;
    if (way.placement == plan::Placement::device) device += elements;
    if (way.placement == plan::Placement::resident) resident += elements;
    if (way.slots() == 2) slots += elements;
  }
  std::string text;
  const auto add = [&](double elements, const char* what) {
    if (elements <= 0) return;
    text += fmt::format("{}{:.0f} % {}", text.empty() || text.ends_with("; ") ? "" : ", ", 100 * elements / all, what);
  };
  add(speculating, "before the norm is known");
  add(all - speculating, options.barrier_between_steps ? "when the norm is known, before the next step"
                                                       : "when the norm is known, under the next step");
  text += "; ";
  add(all - device - resident, "by CPU cores");
  add(device, "by devices, in pieces");
  add(resident, "by devices, where their state stays");
  if (slots > 0) text += fmt::format("; second slots for {} parameters", format_count(slots));
  return "updates: " + text + "\n";
}

}  // namespace

std::string trial_table(const std::vector<plan::Trial>& trials) {
  std::vector<std::vector<std::string>> rows = {
      {"schedule", "stages F/B", "step", "bubble", "exposed optimizer", "device", "host"}};
  for (std::size_t i = 0; i < std::min(trials.size(), kRunnersUp + 1); ++i) {
    const plan::Trial& t = trials[i];
    if (!t.refused.empty()) break;
    rows.push_back({t.schedule, fmt::format("{}/{}", t.forward_stages, t.backward_stages), format_duration(t.step_seconds),
                    fmt::format("{:.1f} %", 100 * t.bubble), format_duration(t.exposed_optimizer_seconds),
                    format_bytes(t.device_bytes), format_bytes(t.host_bytes)});
  }
  return report::table(rows);
}

std::string plan_text(const exec::RunSetup& setup) {
  std::string text = plan::summary(setup.fit.train);
  if (!text.ends_with('\n')) text += '\n';
  text += updates_text(setup);
  if (!setup.fit.reason.empty()) text += setup.fit.reason + "\n";
  if (setup.pipeline()) text += trial_table(setup.trials);
  return text;
}

std::string ranks_text(const exec::RunSetup& setup) {
  const exec::Job& job = setup.job;
  if (job.ranks() == 1) return "";
  std::string text = fmt::format("{} ranks on {} host{}", job.ranks(), job.hosts(), job.hosts() == 1 ? "" : "s");
  const auto& threads = job.threads_of_rank;
  if (threads.empty()) return text + "\n";
  const auto [least, most] = std::minmax_element(threads.begin(), threads.end());
  text += *least == *most ? fmt::format(", {} thread{} each", *most, *most == 1 ? "" : "s")
                          : fmt::format(", threads by rank {}", fmt::join(threads, " "));
  return text + fmt::format("; {} processors here\n", usable_cpus());
}

std::string device_text(const device::DeviceInfo& info, const device::DeviceRates& rates) {
  return fmt::format(
      "device {} ({}, {} threads): {:.1f} GFLOP/s matmul, {:.1f} GB/s copies, {:.2f} G parameters/s AdamW measured\n",
      info.name, info.arithmetic, info.threads, rates.matmul_flops * 1e-9, rates.h2d_bytes * 1e-9,
      rates.adam_parameters * 1e-9);
}

int parse_failure(const CLI::App& app, const CLI::ParseError& error) {
  if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) return app.exit(error);
  std::string what = error.what();
  while (!what.empty() && (what.back() == '\n' || what.back() == '.')) what.pop_back();
  fmt::print(stderr, "error: {}; {} --help shows what there is\n", what,
             app.get_name().empty() ? "spipe-train" : app.get_name());
  return static_cast<int>(ExitCode::kUser);
}

// What is opened next would else become standard output or error, and be written into.
void open_standard_files() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) != -1) continue;
    const auto opened = ::open("/dev/null", O_RDWR);
    (void)opened;  // the lowest free number, which is fd
  }
}

int guarded(int (*body)(int, char**), int argc, char** argv) {
  open_standard_files();
  try {
    return body(argc, argv);
  } catch (const Error& error) {
    std::fflush(stdout);
    fmt::print(stderr, "error: {}\n", error.what());
    return static_cast<int>(error.code());
  } catch (const InternalError& error) {
    std::fflush(stdout);
    fmt::print(stderr, "{}\n", error.what());
    return static_cast<int>(ExitCode::kInternal);
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "error: out of host memory; use a smaller model or batch, or set device.memory\n");
    return static_cast<int>(ExitCode::kUser);
  } catch (const std::exception& error) {
    std::fflush(stdout);
    fmt::print(stderr, "internal error: {}\n", error.what());
    return static_cast<int>(ExitCode::kInternal);
  }
}

}  // namespace spipe::tools
