#include "status_command.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>
#include <thread>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/base/units.h"
#include "spipe/io/checkpoint.h"
#include "spipe/report/page.h"
#include "spipe/report/run_facts.h"

namespace spipe::tools {
namespace {

struct Seen {
  std::optional<report::RunFacts> facts;
  std::optional<report::MetricPoint> last;  // of a step
  std::optional<double> eval_loss;
  std::optional<double> silent_seconds;  // since the last line of metrics
  std::optional<std::string> holder;     // of the run's lock
  std::optional<std::uint64_t> checkpoint;
};

Seen look(const Path& run) {
  if (!std::filesystem::is_directory(run)) {
    throw Error("no such run folder", run.string(), "give a run's folder (its checkpoint.dir)");
  }
  const Path facts = run / "run.json", metrics = run / "metrics.jsonl";
  Seen seen;
  seen.holder = io::run_lock_holder(run);
  if (std::filesystem::exists(facts)) seen.facts = report::read_run_facts(facts);
  if (std::filesystem::exists(metrics)) {
    for (const report::MetricPoint& point : report::read_metrics(metrics)) {
      if (point.eval_loss) {
        seen.eval_loss = point.eval_loss;
      } else {
        seen.last = point;
      }
    }
    const auto age = std::filesystem::file_time_type::clock::now() - std::filesystem::last_write_time(metrics);
    seen.silent_seconds = std::max(0.0, std::chrono::duration<double>(age).count());
  }
  const auto checkpoints = io::list_checkpoints(run);
  if (!checkpoints.empty()) seen.checkpoint = checkpoints.back().step;
  if (!seen.facts && !seen.last && !seen.holder && !seen.checkpoint) {
    throw Error("no run.json, metrics.jsonl or checkpoint in this folder", run.string(),
                "give a run's folder (its checkpoint.dir)");
  }
  return seen;
}

RunState state_of(const Seen& seen) {
  if (seen.holder) return RunState::running;
  if (!seen.facts || !seen.facts->end) return RunState::died;
  if (seen.facts->end->how == "finished") return RunState::finished;
  return seen.facts->end->how == "saved" ? RunState::saved : RunState::failed;
}

std::string step_text(const Seen& seen) {
  const std::uint64_t step = seen.last ? seen.last->step : seen.checkpoint.value_or(0);
  if (!seen.facts) return fmt::format("step {}", step);
  const double part = static_cast<double>(step) / static_cast<double>(std::max<std::uint64_t>(1, seen.facts->total_steps));
  return fmt::format("step {}/{} ({:.0f} %)", step, seen.facts->total_steps, 100 * part);
}

std::string losses_text(const Seen& seen) {
  std::string text;
  if (seen.last && seen.last->loss) text += fmt::format("  loss {:.4f}", *seen.last->loss);
  if (seen.eval_loss) text += fmt::format("  held out {:.4f}", *seen.eval_loss);
  return text;
}

std::string running_text(const Seen& seen) {
  std::string text = "running: " + step_text(seen) + losses_text(seen);
  if (seen.last && seen.last->tokens_per_s) text += fmt::format("  {} tok/s", format_count(*seen.last->tokens_per_s));
  if (seen.facts && seen.last && seen.last->step_seconds && seen.last->step < seen.facts->total_steps) {
    const double left = static_cast<double>(seen.facts->total_steps - seen.last->step) * *seen.last->step_seconds;
    text += "  ETA " + format_duration(left);
  }
  if (seen.last && seen.silent_seconds) text += fmt::format("  last line {} ago", format_duration(*seen.silent_seconds));
  return text + "  " + *seen.holder;
}

std::string go_on_text(const Seen& seen) {
  return seen.checkpoint ? fmt::format("; newest checkpoint: step {}, continue with --resume", *seen.checkpoint)
                         : "; it left no checkpoint";
}

std::string text_of(const Seen& seen, RunState state) {
  const auto after = [&] { return fmt::format("after {}", format_duration(seen.facts->end->seconds)); };
  switch (state) {
    case RunState::running:
      return running_text(seen);
    case RunState::finished:
      return fmt::format("finished {}: {}{}", after(), step_text(seen), losses_text(seen));
    case RunState::saved:
      return fmt::format("stopped and saved {}: {}{}{}", after(), step_text(seen), losses_text(seen), go_on_text(seen));
    case RunState::failed:
      return fmt::format("failed {}: {}: {}{}", after(), step_text(seen), seen.facts->end->text, go_on_text(seen));
    case RunState::died:
      return fmt::format("ended without saying why (killed, or the machine went down): {}{}{}", step_text(seen),
                         losses_text(seen), go_on_text(seen));
  }
  return {};
}

}  // namespace

RunStatus status_of(const std::filesystem::path& run) {
  const Seen seen = look(run);
  const RunState state = state_of(seen);
  return {state, text_of(seen, state)};
}

int exit_code_of(RunState state) {
  switch (state) {
    case RunState::running:
    case RunState::finished:
      return 0;
    case RunState::saved:
      return static_cast<int>(ExitCode::kSaved);
    case RunState::failed:
    case RunState::died:
      return 1;
  }
  return 1;
}

CLI::App* add_status_command(CLI::App& app, StatusFlags& flags) {
  CLI::App* command = app.add_subcommand("status", "watch a running job, or see how it ended");
  command->footer(
      "Examples:\n"
      "  spipe status runs/mine                   the run's step, losses, speed and time left, until it ends\n"
      "  spipe status runs/mine --once            now, and no more\n"
      "Exit code: 0 running (--once) or finished, 75 stopped and saved, 1 failed or killed, 2 no such run.");
  command->add_option("run", flags.run, "the run's folder (checkpoint.dir)")->required();
  command->add_flag("--once", flags.once, "say it once instead of watching");
  command->add_option("--every", flags.every, "seconds between looks")->check(CLI::Range(0.1, 86400.0))->capture_default_str();
  return command;
}

int run_status(const StatusFlags& flags) {
  const bool terminal = ::isatty(STDOUT_FILENO) == 1;
  std::string last_step;  // the part of a line that is worth a new one
  for (;;) {
    const RunStatus status = status_of(flags.run);
    const bool over = flags.once || status.state != RunState::running;
    const std::string step = status.text.substr(0, status.text.find("  last line"));
    if (terminal && !over) {
      fmt::print("\r\x1b[K{}", status.text);
    } else if (over || step != last_step) {
      fmt::print("{}{}\n", terminal ? "\r\x1b[K" : "", status.text);
    }
    std::fflush(stdout);
    if (over) return exit_code_of(status.state);
    last_step = step;
    std::this_thread::sleep_for(std::chrono::duration<double>(flags.every));
  }
}

}  // namespace spipe::tools
