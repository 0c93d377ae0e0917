// spipe: the tools around a run. Subcommands: generate, measure, plan, report, status, tokenize.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cstdio>

#include "generate_command.h"
#include "measure_command.h"
#include "plan_hardware.h"
#include "report_command.h"
#include "spipe/base/error.h"
#include "spipe/base/log.h"
#include "spipe/base/units.h"
#include "spipe/base/version.h"
#include "spipe/data/data.h"
#include "spipe/exec/run_setup.h"
#include "spipe/plan/plan.h"
#include "startup_tables.h"
#include "status_command.h"

namespace spipe::tools {
namespace {

struct PlanFlags {
  std::string file, which = "train";
  std::vector<std::string> overrides;
  bool dump = false;
  HardwareFlags hardware;
};

void run_plan(const PlanFlags& flags) {
  const config::Config config = config::load_config(flags.file, flags.overrides);
  if (!flags.hardware.hardware.empty()) {
    plan_on_hardware(config, flags.hardware);
    return;
  }
  const auto device = device::make_cpu_device({});
  const exec::RunSetup setup = exec::prepare_run(config, device->info(), {});
  const plan::Plan* plan = &setup.fit.train;
  if (flags.which == "save") plan = &setup.train_and_save;
  if (flags.which == "evaluate") {
    if (!setup.fit.evaluate) throw Error("the config has no data.eval, so there is no evaluation plan", flags.file);
    plan = &*setup.fit.evaluate;
  }
  if (flags.dump) {
    fmt::print("{}", plan::dump(*plan));
    return;
  }
  fmt::print("{}\n{}\n{}plan {:016x}, {} tasks, {} waits, {} buffers; verified\n", model_table(setup), memory_table(setup),
             plan_text(setup), plan::plan_hash(*plan), plan->tasks.size(), plan->waits.size(), plan->buffers.size());
}

void run_tokenize(const data::TokenizeOptions& options) {
  const auto tokenizer = data::byte_tokenizer();
  const data::TokenizeSummary s = data::tokenize(*tokenizer, options);
  fmt::print("{}: {} documents, {} tokens ({} tokenizer, vocabulary {})\n", options.output.string(),
             s.documents - s.held_out_documents, s.tokens - s.held_out_tokens, tokenizer->name(), tokenizer->vocab_size());
  if (s.held_out_documents > 0) {
    fmt::print("{}: {} documents, {} tokens held out\n", options.hold_out_output.string(), s.held_out_documents,
               s.held_out_tokens);
  }
  fmt::print("read {}; {} empty documents skipped, {} broken characters replaced by U+FFFD\n", format_bytes(s.bytes),
             s.empty_documents, s.replaced_surrogates);
}

int run(int argc, char** argv) {
  CLI::App app{"spipe: plans, reports, generated text, token files and other things around spipe-train.", "spipe"};
  app.footer(
      "Examples:\n"
      "  spipe plan run.yaml                      memory and plan of a run, verified, without running it\n"
      "  spipe plan run.yaml --dump               every task with its waits, buffers and offsets\n"
      "  spipe plan run.yaml --hardware configs/hardware/v100x4.yaml --timeline step.html\n"
      "  spipe measure --output mine.yaml         what this machine achieves, as a file for --hardware\n"
      "  spipe report runs/mine                   an HTML page of a run, or of several\n"
      "  spipe status runs/mine                   how far a running job is, or how it ended\n"
      "  spipe generate runs/mine --prompt 'In the beginning'\n"
      "  spipe tokenize --input a.jsonl b.txt --output train.bin --held-out heldout.bin --hold-out-fraction 0.05");
  app.require_subcommand(1);
  app.set_version_flag("--version", fmt::format("spipe {} ({}), {}", version(), git_commit(), build_text()));

  PlanFlags plan;
  CLI::App* plan_command = app.add_subcommand("plan", "show, dump and verify the plan of a config");
  plan_command->add_option("config", plan.file, "the YAML file that describes the run")->required();
  plan_command->add_option("--set", plan.overrides, "override one key: a.b=value (repeatable)")->allow_extra_args(false);
  plan_command->add_option("--which", plan.which, "train, save (a training step that also saves) or evaluate")
      ->check(CLI::IsMember({"train", "save", "evaluate"}));
  plan_command->add_flag("--dump", plan.dump, "print every task");
  HardwareFlags& hw = plan.hardware;
  CLI::Option* hardware = plan_command->add_option(
      "--hardware", hw.hardware, "simulate the step on this hardware (configs/hardware/*.yaml); needs no device");
  plan_command->add_option("--schedule", hw.schedule, "auto, spipe, mobius, 1f1b, gpipe, roundpipe or streaming-dp")
      ->needs(hardware);
  plan_command->add_option("--hosts", hw.hosts, "hosts, instead of the file's number")
      ->needs(hardware)
      ->check(CLI::Range(1, 4096));
  plan_command->add_option("--replicas", hw.replicas, "data-parallel replicas of the pipeline")
      ->needs(hardware)
      ->check(CLI::Range(1, 4096));
  plan_command->add_option("--forward-stages", hw.forward_stages, "forward stages over all ranks; not given: tried")
      ->needs(hardware)
      ->check(CLI::Range(1, 100000));
  plan_command->add_option("--backward-stages", hw.backward_stages, "backward stages over all ranks; not given: tried")
      ->needs(hardware)
      ->check(CLI::Range(1, 100000));
  plan_command->add_option("--timeline", hw.timeline, "write the simulated step as an HTML page")->needs(hardware);
  plan_command->add_option("--trace", hw.trace, "write the simulated step for chrome://tracing or ui.perfetto.dev")
      ->needs(hardware);

  MeasureFlags measure;
  const CLI::App* measure_command = add_measure_command(app, measure);

  GenerateFlags generate;
  const CLI::App* generate_command = add_generate_command(app, generate);

  ReportFlags report;
  const CLI::App* report_command = add_report_command(app, report);

  StatusFlags status;
  const CLI::App* status_command = add_status_command(app, status);

  data::TokenizeOptions tokenize;
  CLI::App* tokenize_command = app.add_subcommand("tokenize", "turn text or JSONL into a token file (byte tokenizer)");
  tokenize_command->add_option("--input", tokenize.inputs, "text files, or .jsonl with one {\"text\": ...} a line")->required();
  tokenize_command->add_option("--output", tokenize.output, "the token file to write")->required();
  tokenize_command->add_option("--held-out", tokenize.hold_out_output, "token file for the held-out documents");
  tokenize_command
      ->add_option("--hold-out-fraction", tokenize.hold_out, "fraction of the documents, the last ones, to hold out")
      ->check(CLI::Range(0.0, 0.9));
  tokenize_command->add_option("--separator", tokenize.document_separator, "plain text: a line that ends a document");
  tokenize_command->add_option("--field", tokenize.field, "JSONL: the key that holds the text");
  bool no_end = false;
  tokenize_command->add_flag("--no-end-of-document", no_end, "do not append the end-of-document id to each document");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return parse_failure(app, error);
  }
  init_logging(LogLevel::info);
  if (plan_command->parsed()) run_plan(plan);
  if (generate_command->parsed()) run_generate(generate);
  if (measure_command->parsed()) run_measure(measure);
  if (report_command->parsed()) run_report(report);
  if (status_command->parsed()) return run_status(status);
  if (tokenize_command->parsed()) {
    tokenize.end_of_document = !no_end;
    if ((tokenize.hold_out > 0) != !tokenize.hold_out_output.empty()) {
      throw Error("--held-out and --hold-out-fraction go together", "spipe tokenize");
    }
    run_tokenize(tokenize);
  }
  return 0;
}

}  // namespace
}  // namespace spipe::tools

int main(int argc, char** argv) { return spipe::tools::guarded(spipe::tools::run, argc, argv); }
