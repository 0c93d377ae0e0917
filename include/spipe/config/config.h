// The YAML configuration: schema, parsing with line numbers and "did you mean", defaults, overrides and origins (DESIGN section
// 10).
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "spipe/base/dtype.h"

namespace spipe::config {

// Where a value came from; printed by --dry-run.
enum class Origin : std::uint8_t { defaulted, file, command_line, planner };

enum class Precision : std::uint8_t { automatic, fp32, bf16, fp16 };
enum class Switch : std::uint8_t { automatic, on, off };  // auto | true | false
enum class Init : std::uint8_t { from_scratch, pretrained };

struct ModelConfig {
  std::filesystem::path config;  // a Hugging Face config.json, or a YAML file with the same keys (configs/models/*.yaml)
  std::filesystem::path hf;      // a Hugging Face folder (config.json + safetensors)
  Init init = Init::from_scratch;
  std::string initialization = "family";  // family | fan_in: the scale of random parameters (model::InitKind)
  double dropout = 0;                     // after the embedding and both residual projections
};
struct DataConfig {
  std::vector<std::string> train, eval;  // paths or glob patterns of token files, relative to the working folder
  std::int64_t seq_len = 1024;
  std::uint64_t shuffle_seed = 7;
};
struct BatchConfig {
  std::int64_t global = 64, micro = 1, sum_groups = 1;  // sum_groups: parallel.data unless given
};
// Powers of two. The scale is `fixed` where it is given; dynamic where asked for, or with fp16 and nothing said; else 1.
struct LossScaleConfig {
  std::optional<double> fixed;
  bool dynamic = false;
  double initial = 65536, growth = 2, backoff = 0.5, minimum = 1, maximum = 16777216;
  std::int64_t window = 1000, hysteresis = 2;
};
struct TrainConfig {
  std::int64_t steps = 0;
  Precision precision = Precision::automatic;
  std::uint64_t seed = 1;
  double grad_clip = 1.0;  // 0: off
  Switch recompute = Switch::automatic;
  Switch park = Switch::automatic;
  std::int64_t eval_every = 0;     // steps; 0: only at the end
  std::int64_t eval_batches = 0;   // micro-batches per evaluation; 0: the whole held-out set
  std::int64_t head_chunk = 0;     // rows of logits at a time; 0: auto
  std::string nonfinite = "stop";  // stop | skip
  std::int64_t max_skips = 100;    // in a row; 0: any number
  double skip_spikes = 0;          // z-score; 0: off
  std::int64_t spike_window = 128, spike_warmup = 64;
  LossScaleConfig loss_scale;
};
struct LrScheduleConfig {
  std::string type = "cosine";  // constant, linear, cosine, inverse_sqrt, wsd_linear, wsd_sqrt (wsd = wsd_linear)
  std::int64_t warmup = 0;
  double final = 0.1;
  std::int64_t decay = 0;  // wsd
};
struct ParameterGroupConfig {
  std::string pattern;
  std::optional<double> weight_decay;
  double lr_scale = 1;
  bool frozen = false;
};
struct OptimizerConfig {
  std::string type = "adamw";  // adamw | adam | sgd | lion
  double lr = 3e-4;
  double beta1 = 0.9, beta2 = 0.95;       // betas: [0.9, 0.95]; lion: [0.9, 0.99] unless given
  double eps = 1e-8, weight_decay = 0.1;  // weight_decay: 0 for adam and sgd unless given
  double momentum = 0.9;                  // sgd
  bool nesterov = false;                  // sgd
  std::string moments = "fp32";           // fp32 | bf16
  std::string master = "fp32";            // fp32 | split
  std::vector<ParameterGroupConfig> groups;
  LrScheduleConfig schedule;
  std::string policy = "auto";     // auto | sync | overlap | deferred | hybrid
  double speculate = 0.5;          // hybrid: fraction of the parameters
  std::string placement = "auto";  // auto | cpu | device | resident
};
struct ParallelConfig {
  std::string schedule = "auto";                                          // auto | streaming | a schedule of several ranks
  std::optional<std::int64_t> pipeline, forward_stages, backward_stages;  // unset: auto
  std::int64_t data = 1;
};
struct DeviceConfig {
  std::string type = "auto";                         // auto | cpu now
  std::optional<std::uint64_t> memory, host_memory;  // bytes; unset: auto (no budget / what the host has)
  std::optional<std::int64_t> threads;               // unset: auto
  std::string isa = "auto";                          // cpu_isa: auto | scalar | avx2 | avx512
  // Measurements: compute, copies and updates take as long as on the hardware of this file.
  std::filesystem::path pace;
  double pace_jitter = 0;
  std::uint64_t pace_seed = 1;
  std::optional<std::int64_t> pace_slow_rank;
  double pace_slow_factor = 1;
};
struct CheckpointConfig {
  std::filesystem::path dir = "runs/run";
  std::int64_t every = 0;  // steps; 0: only at the end
  std::int64_t keep = 3;
};
struct LogConfig {
  std::int64_t every = 10;
  bool jsonl = true, unit_norms = true, trace = false;
  std::vector<std::string> samples;  // prompts
  std::int64_t sample_tokens = 64;
  double sample_temperature = 0.8;
};

struct Config {
  ModelConfig model;
  DataConfig data;
  BatchConfig batch;
  TrainConfig train;
  OptimizerConfig optimizer;
  ParallelConfig parallel;
  DeviceConfig device;
  CheckpointConfig checkpoint;
  LogConfig log;
  std::filesystem::path file;             // the YAML file it came from
  std::map<std::string, Origin> origins;  // by dotted key
};

// One key of the schema: the single source of parsing, --dry-run and docs/config.md.
struct KeyInfo {
  std::string path;  // "optimizer.schedule.type"
  std::string type;  // "integer", "number", "text", "bytes", "list of paths", "auto | true | false", ...
  std::string default_value;
  std::string allowed;  // ">= 1", "0..1", "cosine | linear | ..."
  std::string help;     // one sentence
};
[[nodiscard]] const std::vector<KeyInfo>& schema();

// Reads `file`, applies "a.b=c" overrides in order (checked like the file), fills defaults, checks every value and the rules
// between keys. Errors: "run.yaml:12: unknown key 'optimizer.lrr'; did you mean 'optimizer.lr'?". YAML 1.1 traps (CASES O27,
// O28): numbers are parsed by their key's type; 1e-5 works, "010", "1_000", "12:30", nan, inf are refused; duplicates, tabs,
// lists for maps, empty files refused.
[[nodiscard]] Config load_config(const std::filesystem::path& file, const std::vector<std::string>& overrides = {});
// The same from text (tests); `name` stands for the file in messages.
[[nodiscard]] Config parse_config(const std::string& text, const std::string& name,
                                  const std::vector<std::string>& overrides = {});

// The resolved config as YAML that load_config reads back to the same values, each line with its origin as a comment.
[[nodiscard]] std::string resolved_text(const Config& config);
// All keys, types, defaults and meanings as the Markdown table of docs/config.md (a test compares).
[[nodiscard]] std::string schema_markdown();

// The numerics block (DESIGN section 5) as ordered key/value text. `backend` comes from DeviceInfo::arithmetic.
// Keys whose difference is only warned about on resume: "instruction_set", "libraries".
struct NumericsBlock {
  std::vector<std::pair<std::string, std::string>> values;
  [[nodiscard]] std::string text() const;
  [[nodiscard]] std::string hash() const;  // hex of xxh3 over text()
};

}  // namespace spipe::config
