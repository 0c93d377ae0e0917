// What a person sees of a run: start-up tables, a live progress line, metrics.jsonl.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "spipe/plan/plan.h"

namespace spipe::report {

// Aligned plain-text table; the first row is the heading; columns that look like numbers are right-aligned.
[[nodiscard]] std::string table(const std::vector<std::vector<std::string>>& rows);

// One line of metrics.jsonl; absent values are left out of the line, values that are not finite are null (JSON has no NaN).
struct StepMetrics {
  std::uint64_t step = 0;    // 1-based: the step just done
  std::uint64_t tokens = 0;  // trained since the beginning of the run (resumed runs included)
  double loss = 0, grad_norm = 0, lr = 0;
  double tokens_per_s = 0;              // of the window since the last line, evaluation and saving excluded
  double step_seconds = 0;              // mean of the window
  std::optional<double> peak_fraction;  // model FLOP/s over measured matmul FLOP/s
  double h2d_bytes_per_s = 0, d2h_bytes_per_s = 0;
  std::uint64_t skipped_steps = 0;
  std::string skipped_for;               // why this step was skipped; empty where it was not
  std::optional<double> loss_z, norm_z;  // of a step that train.skip_spikes has judged
  double clip = 1;
  std::optional<double> loss_scale;
  std::optional<double> eval_loss;
  std::uint64_t taken_back = 0;  // of the window: speculative updates of units; left out of the line where 0
  std::vector<std::pair<std::string, double>> unit_norms;  // of units by name; left out of the line where empty
};

// Appends JSON lines, each written at once; on resume lines of steps after `resume_step`, and a torn last line, are cut off so
// that the file reads as one run (0 starts it anew).
class MetricsWriter {
 public:
  MetricsWriter(std::filesystem::path file, std::uint64_t resume_step);
  ~MetricsWriter();
  void write(const StepMetrics& metrics);
  // A line of samples.jsonl (a writer of its own file): what the model made of a prompt after a step. Texts are UTF-8.
  void write_sample(std::uint64_t step, const std::string& prompt, const std::string& text, bool ended);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// On stdout: the live line on a terminal (rewritten in place at most ten times a second, cleared for log lines), plain lines
// every `log_every` steps and at the last one otherwise. One at a time in a process.
// step 120/2000  loss 2.3412  norm 0.81  lr 2.9e-04  12.4 k tok/s  71 % of peak  link 310/95 MB/s  ETA 3 m 07 s
class Progress {
 public:
  Progress(std::uint64_t total_steps, std::int64_t log_every, bool terminal);
  ~Progress();
  void step(const StepMetrics& metrics);
  void evaluation(std::uint64_t step, double loss, std::uint64_t targets);
  void line(std::string_view text);  // one that stays
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The text of a progress line (tests).
[[nodiscard]] std::string progress_text(const StepMetrics& metrics, std::uint64_t total_steps, double eta_seconds);

}  // namespace spipe::report
