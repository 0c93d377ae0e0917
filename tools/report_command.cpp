#include "report_command.h"

#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/report/page.h"
#include "spipe/report/report.h"

namespace spipe::tools {
namespace {

struct Files {
  Path trace, folder;  // which may not be there; where it lies, the run's where it is called trace.json
  std::string title;
};

// A folder, a trace.json in a run's folder, or another trace.
Files files_of(const Path& run) {
  if (!std::filesystem::exists(run)) {
    throw Error("no such run folder or trace file", run.string(), "give a run's folder (its checkpoint.dir), or a trace.json");
  }
  const bool folder = std::filesystem::is_directory(run), in_folder = folder || run.filename() == "trace.json";
  Files files;
  files.trace = folder ? run / "trace.json" : run;
  files.folder = files.trace.parent_path();
  const Path place = std::filesystem::weakly_canonical(files.trace);
  files.title = in_folder ? place.parent_path().filename().string() : place.stem().string();
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

report::ReportedRun read_run(const ReportFlags& flags, const Files& files) {
  report::ReportedRun run;
  run.name = files.title;
  if (std::filesystem::exists(files.trace)) {
    run.trace = report::read_trace(files.trace);
    run.step = step_of(flags, *run.trace, files.trace);
  }
  const bool in_folder = files.trace.filename() == "trace.json";  // other files beside another trace are of something else
  const auto there = [&](const char* name) { return in_folder && std::filesystem::exists(files.folder / name); };
  if (there("metrics.jsonl")) run.metrics = report::read_metrics(files.folder / "metrics.jsonl");
  if (there("samples.jsonl")) run.samples = report::read_samples(files.folder / "samples.jsonl");
  if (there("run.json")) run.facts = report::read_run_facts(files.folder / "run.json");
  if (there("config.yaml")) run.config = read_text(files.folder / "config.yaml");
  if (!run.trace && run.metrics.empty() && !run.facts) {
    throw Error("no run.json, metrics.jsonl or trace.json in this folder", files.folder.string(),
                "give a run's folder (its checkpoint.dir)");
  }
  return run;
}

Path output_of(const ReportFlags& flags, const Files& first) {
  if (!flags.output.empty()) return flags.output;
  if (flags.runs.size() > 1) return "comparison.html";
  return first.trace.filename() == "trace.json" ? first.folder / "report.html" : Path(first.trace).replace_extension("html");
}

// Names of folders need not differ; what is given does.
void tell_apart(std::vector<report::ReportedRun>& runs, const std::vector<std::string>& given) {
  std::set<std::string> names;
  for (const report::ReportedRun& run : runs) names.insert(run.name);
  if (names.size() == runs.size()) return;
  for (std::size_t i = 0; i < runs.size(); ++i) runs[i].name = given[i];
}

}  // namespace

CLI::App* add_report_command(CLI::App& app, ReportFlags& flags) {
  CLI::App* command = app.add_subcommand("report", "make an HTML page of a run, or of several to compare");
  command->footer(
      "Examples:\n"
      "  spipe report runs/mine                       writes runs/mine/report.html: curves, memory, samples, configuration\n"
      "  spipe report runs/a runs/b runs/c            writes comparison.html: the curves over each other, and what differs\n"
      "  spipe-train run.yaml --set log.trace=true    a run whose report also draws a step\n"
      "  spipe report runs/mine --step 3 --output step3.html\n"
      "  spipe report step.json                       a trace of spipe plan --trace\n"
      "The page is one file and loads nothing. Runs that are still going on can be reported too.");
  command->add_option("runs", flags.runs, "runs' folders (checkpoint.dir), or a trace file")->required();
  command->add_option("--output", flags.output,
                      "the page to write; not given: report.html in the folder, comparison.html here for several");
  command->add_option("--step", flags.step, "the step to draw; not given: the last whole one of the trace")
      ->check(CLI::Range(1, 2147483647));
  return command;
}

void run_report(const ReportFlags& flags) {
  std::vector<report::ReportedRun> runs;
  Files first;
  for (const std::string& place : flags.runs) {
    const Files files = files_of(place);
    if (runs.empty()) first = files;
    runs.push_back(read_run(flags, files));
  }
  tell_apart(runs, flags.runs);
  if (flags.step && std::none_of(runs.begin(), runs.end(), [](const auto& run) { return run.trace.has_value(); })) {
    throw Error("no trace.json to draw a step of", flags.runs.front(), "run with log.trace: true (--set log.trace=true)");
  }
  const Path output = output_of(flags, first);
  write_text_atomic(output, report::report_page(runs));
  for (const report::ReportedRun& run : runs) {
    if (!run.trace) continue;
    const report::StepSummary summary = report::summarise(*run.trace, *run.step);
    fmt::print("{}step {}: {}\n{}", runs.size() > 1 ? run.name + ", " : "", *run.step + 1, report::summary_line(summary),
               report::table(report::summary_rows(summary)));
  }
  fmt::print("report: {}\n", output.string());
}

}  // namespace spipe::tools
