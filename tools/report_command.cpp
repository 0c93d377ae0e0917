#include "report_command.h"

#include <fmt/core.h>

#include <algorithm>
#include <filesystem>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/report/page.h"
#include "spipe/report/report.h"

namespace spipe::tools {
namespace {

struct Files {
  Path trace, output, metrics;
  std::string title;
};

Files files_of(const ReportFlags& flags) {
  const Path run = flags.run;
  if (!std::filesystem::exists(run)) {
    throw Error("no such run folder or trace file", flags.run, "give a run's folder (its checkpoint.dir), or a trace.json");
  }
  const bool folder = std::filesystem::is_directory(run), in_folder = folder || run.filename() == "trace.json";
  Files files;
  files.trace = folder ? run / "trace.json" : run;
  if (!std::filesystem::exists(files.trace)) {
    throw Error("no trace.json in this folder", flags.run, "run with log.trace: true (--set log.trace=true)");
  }
  const Path place = std::filesystem::weakly_canonical(files.trace);
  files.title = in_folder ? place.parent_path().filename().string() : place.stem().string();
  if (in_folder) files.metrics = files.trace.parent_path() / "metrics.jsonl";
  files.output = in_folder ? files.trace.parent_path() / "report.html" : Path(run).replace_extension("html");
  if (!flags.output.empty()) files.output = flags.output;
  return files;
}

std::int64_t step_of(const ReportFlags& flags, const report::Trace& trace, const Path& file) {
  const std::vector<std::int64_t> steps = report::whole_steps(trace);
  if (steps.empty()) throw Error("the trace holds no whole step", file.string(), "train at least one step");
  if (!flags.step) return steps.back();
  if (std::find(steps.begin(), steps.end(), *flags.step - 1) == steps.end()) {
    throw Error(fmt::format("step {} is not in the trace", *flags.step), file.string(),
                fmt::format("it holds steps {} to {}", steps.front() + 1, steps.back() + 1));
  }
  return *flags.step - 1;
}

}  // namespace

CLI::App* add_report_command(CLI::App& app, ReportFlags& flags) {
  CLI::App* command = app.add_subcommand("report", "make an HTML page of a run: its curves, and a step's timeline");
  command->footer(
      "Examples:\n"
      "  spipe-train run.yaml --set log.trace=true    a run that writes a trace, into runs/mine\n"
      "  spipe report runs/mine                       writes runs/mine/report.html\n"
      "  spipe report runs/mine --step 3 --output step3.html\n"
      "  spipe report step.json                       a trace of spipe plan --trace");
  command->add_option("run", flags.run, "the run's folder (checkpoint.dir), or a trace file")->required();
  command->add_option("--output", flags.output, "the page to write; not given: report.html in the folder");
  command->add_option("--step", flags.step, "the step to draw; not given: the last whole one of the trace")
      ->check(CLI::Range(1, 2147483647));
  return command;
}

void run_report(const ReportFlags& flags) {
  const Files files = files_of(flags);
  const report::Trace trace = report::read_trace(files.trace);
  const std::int64_t step = step_of(flags, trace, files.trace);
  std::vector<report::MetricPoint> metrics;
  if (std::filesystem::exists(files.metrics)) metrics = report::read_metrics(files.metrics);
  write_text_atomic(files.output, report::report_page(files.title, trace, step, metrics));
  const report::StepSummary summary = report::summarise(trace, step);
  fmt::print("step {}: {}\n{}report: {}\n", step + 1, report::summary_line(summary),
             report::table(report::summary_rows(summary)), files.output.string());
}

}  // namespace spipe::tools
