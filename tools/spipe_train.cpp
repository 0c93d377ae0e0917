// spipe-train: the job. Trains what a YAML config describes.
#include <fmt/core.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "run_facts.h"
#include "spipe/base/error.h"
#include "spipe/base/log.h"
#include "spipe/base/units.h"
#include "spipe/base/version.h"
#include "spipe/comm/world.h"
#include "spipe/data/utf8.h"
#include "spipe/exec/signals.h"
#include "spipe/exec/trainer.h"
#include "spipe/report/report.h"
#include "spipe/report/trace.h"
#include "startup_tables.h"

namespace spipe::tools {
namespace {

// A line that is overwritten needs a terminal at the other end. mpirun gives rank 0 one even where its own output is a file:
// what started the ranks (scripts/launch.sh, a batch system) says so by TERM.
bool on_terminal() {
  const char* const term = std::getenv("TERM");
  return isatty(STDOUT_FILENO) != 0 && term != nullptr && *term != '\0' && std::string_view(term) != "dumb";
}

// A text as part of a line on a terminal: what would break the line or steer the terminal is shown by pictures.
std::string on_one_line(const std::string& text) {
  std::string line;
  for (const char c : data::without_controls(text)) {
    if (c == '\n' || c == '\t') {
      line += c == '\n' ? "\xE2\x8F\x8E" : " ";  // U+23CE
    } else {
      line.push_back(c);
    }
  }
  return line;
}

// Turns the step loop's records into the progress line and metrics.jsonl.
class Console : public exec::RunListener {
 public:
  void on_setup(const exec::RunSetup& setup, const device::DeviceInfo& info, const device::DeviceRates& rates,
                std::uint64_t resume_step) override {
    fmt::print("{}{}{}\n{}\n{}", device_text(info, rates), ranks_text(setup), model_table(setup), memory_table(setup),
               plan_text(setup));
    if (resume_step > 0) fmt::print("resuming after step {}\n", resume_step);
    std::fflush(stdout);
    const config::Config& c = setup.config;
    log_every_ = std::max<std::int64_t>(1, c.log.every);
    total_ = static_cast<std::uint64_t>(c.train.steps);
    unit_norms_ = c.log.unit_norms;
    flops_per_token_ = model::model_flops_per_token(setup.shape);
    peak_flops_ = rates.matmul_flops;
    facts_file_ = c.checkpoint.dir / "run.json";
    facts_ = run_facts(setup, info, rates, resume_step);
    report::write_run_facts(facts_file_, facts_);
    start_ = std::chrono::steady_clock::now();
    if (c.log.jsonl) metrics_ = std::make_unique<report::MetricsWriter>(c.checkpoint.dir / "metrics.jsonl", resume_step);
    if (!c.log.samples.empty()) {
      samples_ = std::make_unique<report::MetricsWriter>(c.checkpoint.dir / "samples.jsonl", resume_step);
    }
    progress_ = std::make_unique<report::Progress>(total_, log_every_, on_terminal());
  }

  void on_step(const exec::StepRecord& record) override {
    window_seconds_ += record.seconds;
    window_tokens_ += record.step_tokens;
    window_h2d_ += record.h2d_bytes;
    window_d2h_ += record.d2h_bytes;
    ++window_steps_;
    report::StepMetrics m;
    m.step = record.step;
    m.tokens = record.tokens;
    m.loss = record.loss;
    m.grad_norm = record.grad_norm;
    m.lr = record.lr;
    m.clip = record.clip;
    m.loss_scale = record.loss_scale;
    m.skipped_steps = record.skipped_steps;
    m.skipped_for = record.skipped_for;
    m.taken_back = window_taken_back_ += record.taken_back;
    if (unit_norms_) m.unit_norms = record.unit_norms;
    if (record.spike.judged) {
      m.loss_z = record.spike.loss_z;
      m.norm_z = record.spike.norm_z;
    }
    m.tokens_per_s = static_cast<double>(window_tokens_) / window_seconds_;
    m.step_seconds = window_seconds_ / static_cast<double>(window_steps_);
    m.h2d_bytes_per_s = static_cast<double>(window_h2d_) / window_seconds_;
    m.d2h_bytes_per_s = static_cast<double>(window_d2h_) / window_seconds_;
    // The peak was measured once, on a machine that may have been busy then: what is achieved raises it.
    const double achieved = m.tokens_per_s * flops_per_token_;
    if (peak_flops_ > 0) {
      peak_flops_ = std::max(peak_flops_, achieved);
      m.peak_fraction = achieved / peak_flops_;
    }
    progress_->step(m);
    const bool last = record.step == total_;
    if (record.step % static_cast<std::uint64_t>(log_every_) == 0 || last || record.skipped) {
      if (metrics_) metrics_->write(m);
      window_seconds_ = 0;
      window_tokens_ = window_h2d_ = window_d2h_ = window_steps_ = window_taken_back_ = 0;
    }
    last_ = m;
  }

  void on_evaluation(std::uint64_t step, double loss, std::uint64_t targets) override {
    progress_->evaluation(step, loss, targets);
    if (!metrics_) return;
    report::StepMetrics m = last_;
    m.step = step;
    m.eval_loss = loss;
    m.skipped_for.clear();  // the step has a line of its own
    m.loss_z = m.norm_z = std::nullopt;
    m.taken_back = 0;
    m.unit_norms.clear();
    metrics_->write(m);
  }

  void on_samples(std::uint64_t step, const std::vector<exec::Sample>& samples) override {
    for (const exec::Sample& sample : samples) {
      progress_->line(fmt::format("sample at step {}: {}|{}{}", step, on_one_line(sample.prompt), on_one_line(sample.text),
                                  sample.ended ? "" : "..."));
      samples_->write_sample(step, sample.prompt, sample.text, sample.ended);
    }
  }

  void on_checkpoint(std::uint64_t step, const std::filesystem::path& path, double seconds) override {
    log_info(fmt::format("checkpoint of step {} in {} ({})", step, path.string(), format_duration(seconds)));
  }

  // How the run ended, for who looks at its folder. A run that ends before it was set up has no folder to say it in.
  void ended(const std::string& how, const std::string& text = {}) {
    if (facts_file_.empty()) return;
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    facts_.end = report::RunEnd{how, text, report::time_now_text(), std::max(last_.step, facts_.first_step), seconds};
    report::write_run_facts(facts_file_, facts_);
  }

  void finish() {
    if (progress_) progress_->finish();
  }

 private:
  std::unique_ptr<report::MetricsWriter> metrics_, samples_;
  std::unique_ptr<report::Progress> progress_;
  report::StepMetrics last_;
  std::filesystem::path facts_file_;
  report::RunFacts facts_;
  std::chrono::steady_clock::time_point start_;
  std::int64_t log_every_ = 1;
  bool unit_norms_ = true;
  std::uint64_t window_taken_back_ = 0;
  std::uint64_t total_ = 0, window_tokens_ = 0, window_steps_ = 0, window_h2d_ = 0, window_d2h_ = 0;
  double window_seconds_ = 0, flops_per_token_ = 0, peak_flops_ = 0;
};

// A word as a shell reads it back.
std::string quoted(const std::string& word) {
  if (!word.empty() &&
      word.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./:=,+-") == std::string::npos) {
    return word;
  }
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

// What this run was started with, to go on from where it ends.
std::string go_on_command(const comm::World& world, int argc, char** argv) {
  std::string text = world.size() > 1 ? fmt::format("scripts/launch.sh {}", world.size()) : quoted(argv[0]);
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--resume" || word == "--resume-auto" || (word == "auto" && std::string_view(argv[i - 1]) == "--resume"))
      continue;
    text += " " + quoted(word);
  }
  return text + " --resume";
}

void print_end(const config::Config& config, const exec::RunSummary& summary, const std::string& go_on) {
  const std::string dir = config.checkpoint.dir.string();
  if (summary.already_finished) {
    fmt::print("already finished: step {} of {}; nothing to do\n", summary.steps_done, config.train.steps);
  } else {
    fmt::print("{} step {} of {}, {} tokens, loss {:.4f}{}, {}\n", summary.code == ExitCode::kOk ? "done:" : "stopped after",
               summary.steps_done, config.train.steps, format_count(static_cast<double>(summary.tokens)), summary.last_loss,
               summary.eval_loss ? fmt::format(", held-out loss {:.4f}", *summary.eval_loss) : "",
               format_duration(summary.seconds));
  }
  if (summary.pace) {
    const double overruns =
        static_cast<double>(summary.pace->overruns) / static_cast<double>(std::max<std::uint64_t>(1, summary.pace->tasks));
    fmt::print("  paced       {:.2f} % of the tasks took longer than modelled{}; real computing was {:.1f} % of the modelled\n",
               100 * overruns, overruns > 0.01 ? " (more than 1 %: times are VOID as a measurement)" : "",
               100 * summary.pace->real_seconds / std::max(1e-9, summary.pace->paced_seconds));
  }
  fmt::print("  checkpoint  {}\n", summary.checkpoint.string());
  if (config.log.jsonl) fmt::print("  metrics     {}/metrics.jsonl\n", dir);
  if (!config.log.samples.empty()) fmt::print("  samples     {}/samples.jsonl\n", dir);
  fmt::print("  go on       {}{}\n", go_on,
             summary.code == ExitCode::kOk
                 ? fmt::format(" --set train.steps={} --allow-change train.steps", 2 * config.train.steps)
                 : "");
}

// CLI11 takes arguments last first. "--resume auto" becomes one flag, so that "--resume run.yaml" means what it says.
std::vector<std::string> joined_arguments(int argc, char** argv) {
  std::vector<std::string> arguments;
  for (int i = argc - 1; i > 0; --i) {
    const std::string word = argv[i];
    if (word == "--resume" && !arguments.empty() && arguments.back() == "auto") {
      arguments.back() = "--resume-auto";
    } else {
      arguments.push_back(word);
    }
  }
  return arguments;
}

// The slices of all ranks in one file, on rank 0.
void write_trace(comm::World& world, const report::TraceWriter& trace, const std::filesystem::path& file) {
  const auto ranks = world.all_gather(trace.bytes());
  if (world.rank() == 0) report::write_trace(file, report::merge_traces(ranks));
}

int train_on(comm::World& world, const std::string& file, const std::vector<std::string>& overrides, exec::RunOptions& options,
             const std::string& go_on) {
  const config::Config config = config::load_config(file, overrides);
  report::TraceWriter trace;
  if (config.log.trace) options.observers.push_back(&trace);
  Console console;
  exec::RunSummary summary;
  try {
    summary = exec::train(config, options, console, world);
  } catch (const Error& error) {
    if (world.rank() == 0) console.ended("failed", error.what());
    throw;
  }
  if (config.log.trace) write_trace(world, trace, config.checkpoint.dir / "trace.json");
  world.finish();
  if (world.rank() != 0) return static_cast<int>(summary.code);
  console.ended(summary.code == ExitCode::kSaved ? "saved" : "finished");
  console.finish();
  print_end(config, summary, go_on);
  return static_cast<int>(summary.code);
}

// What a run would do. Started on several ranks, one of them shows the plan of all.
void show_plan(const std::string& file, const std::vector<std::string>& overrides) {
  const comm::LaunchFacts facts = comm::launch_facts();
  if (facts.rank != 0) return;
  std::optional<exec::Job> job;
  if (facts.size > 1) {
    job.emplace();
    job->host_of_rank.clear();
    const int of_machine = facts.local_size > 0 ? facts.local_size : facts.size;
    for (int rank = 0; rank < facts.size; ++rank) {
      const int machine = rank / of_machine, group = rank % of_machine * facts.fake_hosts / of_machine;
      job->host_of_rank.push_back(machine * facts.fake_hosts + group);
    }
  }
  const config::Config config = config::load_config(file, overrides);
  const auto device = device::make_cpu_device({});
  const exec::RunSetup setup = exec::prepare_run(config, device->info(), {}, job);
  fmt::print("{}\n{}\n{}\n{}", config::resolved_text(config), model_table(setup), memory_table(setup), plan_text(setup));
}

// One of several: whatever goes wrong ends all of them, and is said once.
int as_rank(comm::World& world, const std::function<int()>& body) {
  std::string cause;
  ExitCode code = ExitCode::kInternal;
  try {
    return body();
  } catch (const Error& error) {
    cause = error.what();
    code = error.code();
  } catch (const std::bad_alloc&) {
    cause = "out of host memory; use a smaller model or batch, or set device.memory";
    code = ExitCode::kUser;
  } catch (const std::exception& error) {
    cause = error.what();
  }
  std::fflush(stdout);
  world.fail(cause, code);
}

int run(int argc, char** argv) {
  CLI::App app{"spipe-train: trains a language model whose state lives in host memory and streams through the device.",
               "spipe-train"};
  app.footer(
      "Examples:\n"
      "  spipe-train configs/quickstart.yaml\n"
      "  spipe-train run.yaml --set optimizer.lr=1e-4 --set train.steps=500\n"
      "  spipe-train run.yaml --resume            continue from the newest complete checkpoint\n"
      "  spipe-train run.yaml --dry-run           print the resolved config, memory and plan; train nothing\n"
      "  scripts/launch.sh 4 run.yaml             on four ranks of this machine (mpirun, with what it needs)\n"
      "Signals: SIGINT/SIGTERM/SIGUSR2 save and stop (exit code 75), a second SIGINT (a second later or more) stops at once; "
      "SIGUSR1 saves and goes "
      "on.\n"
      "Every config key is described in docs/config.md.");
  std::string file;
  std::vector<std::string> overrides;
  exec::RunOptions options;
  bool dry_run = false, verbose = false;
  app.add_option("config", file, "the YAML file that describes the run")->required();
  app.add_option("--set", overrides, "override one key: a.b=value (repeatable)")->allow_extra_args(false);
  app.add_flag("--resume", options.resume, "continue from the newest complete checkpoint; '--resume auto': continue or start");
  app.add_flag("--resume-auto", options.resume_auto)->group("");
  app.add_option("--allow-change", options.allow_changes, "permit this difference from the checkpoint on resume (repeatable)")
      ->allow_extra_args(false);
  app.add_flag("--dry-run", dry_run, "print the resolved config with origins, the memory table and the plan, then stop");
  app.add_flag("-v,--verbose", verbose, "log debug messages");
  app.set_version_flag("--version", fmt::format("spipe-train {} ({}), {}", version(), git_commit(), build_text()));
  try {
    app.parse(joined_arguments(argc, argv));
  } catch (const CLI::ParseError& error) {
    return parse_failure(app, error);
  }

  init_logging(verbose ? LogLevel::debug : LogLevel::info);
  if (dry_run) {
    show_plan(file, overrides);
    return 0;
  }
  exec::install_signal_handlers(comm::launch_facts().size > 1);
  comm::World world;  // before any other thread: how ranks end together
  const std::string go_on = go_on_command(world, argc, argv);
  const auto body = [&] { return train_on(world, file, overrides, options, go_on); };
  return world.size() == 1 ? body() : as_rank(world, body);
}

}  // namespace
}  // namespace spipe::tools

int main(int argc, char** argv) { return spipe::tools::guarded(spipe::tools::run, argc, argv); }
