// What a good config becomes: values, defaults, origins, overrides, printing, documentation.
#include <catch2/catch.hpp>
#include <cstdlib>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/config/config.h"

using namespace spipe;
using namespace spipe::config;

namespace {

const std::string kSmallest = "model: {config: m.json}\ndata: {train: [a.bin]}\ntrain: {steps: 10}\n";

Config parse(const std::string& text, const std::vector<std::string>& overrides = {}) {
  return parse_config(text, "run.yaml", overrides);
}

// Values only: the text without its origin comments.
std::string values_of(const Config& config) {
  std::string text = resolved_text(config);
  for (std::size_t at = 0; (at = text.find(" # ", at)) != std::string::npos;) text.erase(at, text.find('\n', at) - at);
  return text;
}

}  // namespace

TEST_CASE("the smallest config takes every default") {
  const Config config = parse(kSmallest);
  CHECK(config.model.config == "m.json");
  CHECK(config.model.init == Init::from_scratch);
  CHECK(config.data.train == std::vector<std::string>{"a.bin"});
  CHECK(config.train.steps == 10);
  CHECK(config.batch.global == 64);
  CHECK(config.optimizer.lr == 3e-4);
  CHECK(config.optimizer.schedule.type == "cosine");
  CHECK_FALSE(config.device.memory.has_value());
  CHECK_FALSE(config.parallel.pipeline.has_value());
  CHECK((config.device.pace.empty() && !config.device.pace_slow_rank.has_value()));
  CHECK(config.train.recompute == Switch::automatic);
}

TEST_CASE("parameter groups are read in order and printed as they were read") {
  const Config c = parse(kSmallest + R"(
optimizer:
  groups:
    - {pattern: "*.bias", weight_decay: 0}
    - pattern: "model.layers.?.mlp.*"
      lr_scale: 0.25
      weight_decay: 0.5
    - {pattern: lm_head.weight, frozen: true}
)");
  const auto& groups = c.optimizer.groups;
  REQUIRE(groups.size() == 3);
  CHECK((groups[0].pattern == "*.bias" && groups[0].weight_decay == 0 && groups[0].lr_scale == 1 && !groups[0].frozen));
  CHECK((groups[1].pattern == "model.layers.?.mlp.*" && groups[1].weight_decay == 0.5 && groups[1].lr_scale == 0.25));
  CHECK((groups[2].pattern == "lm_head.weight" && !groups[2].weight_decay && groups[2].frozen));
  CHECK(values_of(parse(resolved_text(c))) == values_of(c));
  CHECK(values_of(parse(kSmallest)).find("groups: []") != std::string::npos);
  CHECK(parse(resolved_text(c), {"optimizer.groups=[]"}).optimizer.groups.empty());
}

TEST_CASE("every key reaches its field") {
  const Config c = parse(R"(
model: {hf: some/folder, init: from_scratch, initialization: fan_in, dropout: 0.25}
data: {train: [a.bin, "b/*.bin"], eval: c.bin, seq_len: 33, shuffle_seed: 18446744073709551615}
batch: {global: 12, micro: 3, sum_groups: 2}
train: {steps: 5, precision: bf16, seed: 4, grad_clip: 0, recompute: true, park: false, eval_every: 2, eval_batches: 7,
        head_chunk: 128, nonfinite: skip, max_skips: 7, loss_scale: dynamic, loss_scale_initial: 256, loss_scale_window: 20,
        loss_scale_growth: 4, loss_scale_backoff: 0.25, loss_scale_hysteresis: 3, loss_scale_min: 8, loss_scale_max: 512}
optimizer:
  {type: adamw, lr: 1e-5, betas: [0.8, 0.99], eps: 1E-6, weight_decay: .05,
   schedule: {type: wsd, warmup: 2, final: 0, decay: 3}, policy: sync, placement: cpu}
parallel: {schedule: spipe, pipeline: 4, data: 2, forward_stages: 4, backward_stages: 6}
device: {type: cpu, memory: 1.5 GiB, host_memory: 2 GB, threads: 3, isa: avx2, pace: "hardware/v 100.yaml", pace_jitter: 0.05,
         pace_seed: 9, pace_slow_rank: 3, pace_slow_factor: 1.5}
checkpoint: {dir: runs/x, every: 4, keep: 1}
log: {every: 1, jsonl: false, trace: true, tensorboard: false}
)");
  CHECK(c.model.hf == "some/folder");
  CHECK(c.model.init == Init::from_scratch);
  CHECK((c.model.initialization == "fan_in" && c.model.dropout == 0.25));
  CHECK(c.data.train == std::vector<std::string>{"a.bin", "b/*.bin"});
  CHECK(c.data.eval == std::vector<std::string>{"c.bin"});
  CHECK(c.data.seq_len == 33);
  CHECK(c.data.shuffle_seed == 18446744073709551615U);
  CHECK((c.batch.global == 12 && c.batch.micro == 3 && c.batch.sum_groups == 2));
  CHECK((c.train.steps == 5 && c.train.precision == Precision::bf16 && c.train.seed == 4 && c.train.grad_clip == 0));
  CHECK((c.train.recompute == Switch::on && c.train.park == Switch::off));
  CHECK((c.train.eval_every == 2 && c.train.eval_batches == 7 && c.train.head_chunk == 128 && c.train.nonfinite == "skip"));
  const LossScaleConfig& scale = c.train.loss_scale;
  CHECK((c.train.max_skips == 7 && scale.dynamic && !scale.fixed && scale.initial == 256 && scale.window == 20));
  CHECK((scale.growth == 4 && scale.backoff == 0.25 && scale.hysteresis == 3 && scale.minimum == 8 && scale.maximum == 512));
  CHECK((c.optimizer.lr == 1e-5 && c.optimizer.beta1 == 0.8 && c.optimizer.beta2 == 0.99 && c.optimizer.eps == 1e-6));
  CHECK(c.optimizer.weight_decay == 0.05);
  CHECK((c.optimizer.schedule.type == "wsd_linear" && c.optimizer.schedule.warmup == 2));
  CHECK((c.optimizer.schedule.final == 0 && c.optimizer.schedule.decay == 3));
  CHECK((c.optimizer.policy == "sync" && c.optimizer.placement == "cpu" && c.parallel.schedule == "spipe" &&
         c.parallel.data == 2));
  CHECK((c.parallel.pipeline == 4 && c.parallel.forward_stages == 4 && c.parallel.backward_stages == 6));
  CHECK((c.device.type == "cpu" && c.device.memory == 1610612736 && c.device.host_memory == 2000000000));
  CHECK((c.device.threads == 3 && c.device.isa == "avx2" && c.device.pace == "hardware/v 100.yaml"));
  CHECK((c.device.pace_jitter == 0.05 && c.device.pace_seed == 9));
  CHECK((c.device.pace_slow_rank == 3 && c.device.pace_slow_factor == 1.5));
  CHECK((c.checkpoint.dir == "runs/x" && c.checkpoint.every == 4 && c.checkpoint.keep == 1));
  CHECK((c.log.every == 1 && !c.log.jsonl && c.log.trace));

  SECTION("and the printed config reads back to the same values") {
    const Config again = parse(resolved_text(c));
    CHECK(values_of(again) == values_of(c));
    CHECK(again.origins.at("optimizer.lr") == Origin::file);
  }
}

TEST_CASE("update rules reach their fields, with the defaults that are theirs") {
  const OptimizerConfig adamw = parse(kSmallest).optimizer;
  CHECK((adamw.type == "adamw" && adamw.beta2 == 0.95 && adamw.weight_decay == 0.1));
  CHECK((adamw.moments == "fp32" && adamw.master == "fp32" && !adamw.nesterov));
  const OptimizerConfig adam = parse(kSmallest, {"optimizer.type=adam"}).optimizer;
  CHECK((adam.weight_decay == 0 && adam.beta2 == 0.95));
  const OptimizerConfig lion = parse(kSmallest, {"optimizer.type=lion", "optimizer.moments=bf16"}).optimizer;
  CHECK((lion.beta1 == 0.9 && lion.beta2 == 0.99 && lion.weight_decay == 0.1 && lion.moments == "bf16"));
  const Config sgd = parse(kSmallest, {"optimizer={type: sgd, momentum: 0.5, nesterov: true, weight_decay: 0.01}",
                                       "train.precision=bf16", "optimizer.master=split"});
  CHECK((sgd.optimizer.type == "sgd" && sgd.optimizer.momentum == 0.5 && sgd.optimizer.nesterov));
  CHECK((sgd.optimizer.weight_decay == 0.01 && sgd.optimizer.master == "split"));
  for (const char* type : {"adam", "sgd", "lion"}) {  // also when all keys are given
    const Config config = parse(kSmallest, {std::string("optimizer.type=") + type});
    CHECK(values_of(parse(resolved_text(config))) == values_of(config));
  }
  CHECK(values_of(parse(resolved_text(sgd))) == values_of(sgd));
}

TEST_CASE("a loss scale is auto, dynamic or a power of two") {
  CHECK((!parse(kSmallest).train.loss_scale.fixed && !parse(kSmallest).train.loss_scale.dynamic));
  CHECK(parse(kSmallest, {"train.loss_scale=1024"}).train.loss_scale.fixed == 1024);
  CHECK(parse(kSmallest, {"train.loss_scale=dynamic"}).train.loss_scale.dynamic);
  CHECK(parse(kSmallest, {"train.precision=fp16"}).train.precision == Precision::fp16);
  const Config later = parse(kSmallest, {"train.loss_scale=1024", "train.loss_scale=auto"});
  CHECK((!later.train.loss_scale.fixed && !later.train.loss_scale.dynamic));
  const Config fixed = parse(kSmallest, {"train.loss_scale=1024"});
  CHECK(parse(resolved_text(fixed)).train.loss_scale.fixed == 1024);
}

TEST_CASE("the printed defaults read back to themselves") {
  const Config config = parse(kSmallest);
  CHECK(values_of(parse(resolved_text(config))) == values_of(config));
}

TEST_CASE("odd paths survive printing and reading") {
  const std::vector<std::string> odd = {"a b.bin",   "quote\".bin", "back\\slash", "null",        "~",   "#x",  "a: b", "- x",
                                        "tab\there", "line\nend",   "*.bin",       "caf\xc3\xa9", "[x]", "'x'", "5"};
  Config config = parse(kSmallest);
  config.data.train = odd;
  config.checkpoint.dir = "yes: no";
  const Config again = parse(resolved_text(config));
  CHECK(again.data.train == odd);
  CHECK(again.checkpoint.dir == "yes: no");
}

TEST_CASE("a printed value keeps every bit of its double") {
  const double third = 1.0 / 3;
  const Config config = parse(kSmallest, {"optimizer.lr=0.333333333333333314829616256247390992939472198486328125"});
  CHECK(config.optimizer.lr == third);
  CHECK(parse(resolved_text(config)).optimizer.lr == third);
}

TEST_CASE("every value says where it came from") {
  const Config config = parse(kSmallest + "optimizer: {lr: 1, eps: 1e-9}\n", {"optimizer.lr=2"});
  CHECK(config.origins.at("optimizer.lr") == Origin::command_line);
  CHECK(config.origins.at("optimizer.eps") == Origin::file);
  CHECK(config.origins.at("optimizer.betas") == Origin::defaulted);
  CHECK(config.origins.size() == schema().size());
  CHECK_THAT(resolved_text(config), Catch::Matches("[^]*\n  lr: 2 +# command line\n[^]*"));
  CHECK_THAT(resolved_text(config), Catch::Matches("[^]*\n  eps: 1e-09 +# file\n[^]*"));
  CHECK_THAT(resolved_text(config), Catch::Matches("[^]*\n  weight_decay: 0.1 +# default\n[^]*"));
}

TEST_CASE("overrides apply in order, as scalars, lists or maps") {
  const Config config =
      parse(kSmallest, {"optimizer.lr=1", "optimizer.lr=1e-4", "data.train=[x.bin, \"y z.bin\"]", "data.eval=*.bin",
                        "optimizer={betas: [0, 0.5], schedule: {warmup: 3}}", "checkpoint.dir=\"a b\"", "device.memory=8 GiB"});
  CHECK(config.optimizer.lr == 1e-4);
  CHECK(config.data.train == std::vector<std::string>{"x.bin", "y z.bin"});
  CHECK(config.data.eval == std::vector<std::string>{"*.bin"});
  CHECK(config.optimizer.beta2 == 0.5);
  CHECK(config.optimizer.schedule.warmup == 3);
  CHECK(config.checkpoint.dir == "a b");
  CHECK(config.device.memory == std::uint64_t{8} << 30);
}

TEST_CASE("an override can take a value back to auto") {
  const Config config =
      parse(kSmallest + "device: {memory: 8 GiB, threads: 2}\n", {"device.memory=auto", "device.threads=auto"});
  CHECK_FALSE(config.device.memory.has_value());
  CHECK_FALSE(config.device.threads.has_value());
}

TEST_CASE("a folder with parameters means pretrained, unless said otherwise") {
  const std::string rest = "data: {train: [a.bin]}\ntrain: {steps: 10}\n";
  CHECK(parse("model: {hf: f}\n" + rest).model.init == Init::pretrained);
  CHECK(parse("model: {hf: f, init: from_scratch}\n" + rest).model.init == Init::from_scratch);
}

TEST_CASE("there are as many sum groups as replicas, unless said otherwise") {
  const Config config = parse(kSmallest, {"parallel.data=4"});
  CHECK(config.batch.sum_groups == 4);
  CHECK(config.origins.at("batch.sum_groups") == Origin::defaulted);
  CHECK(parse(kSmallest).batch.sum_groups == 1);
  CHECK(parse(kSmallest, {"parallel.data=4", "batch.sum_groups=8"}).batch.sum_groups == 8);
  CHECK(parse(kSmallest + "batch: {sum_groups: 6}\n", {"parallel.data=2"}).batch.sum_groups == 6);
}

TEST_CASE("every schedule has a name") {
  for (const char* name : {"auto", "streaming", "spipe", "mobius", "1f1b", "gpipe", "roundpipe", "streaming-dp"}) {
    CHECK(parse(kSmallest, {std::string("parallel.schedule=") + name}).parallel.schedule == name);
  }
}

TEST_CASE("line ends of Windows and a byte order mark change nothing") {
  std::string text = kSmallest;
  for (std::size_t at = 0; (at = text.find('\n', at)) != std::string::npos; at += 2) text.insert(at, 1, '\r');
  CHECK(values_of(parse("\xEF\xBB\xBF" + text)) == values_of(parse(kSmallest)));
}

TEST_CASE("warm-up may be nothing or the whole run") {
  CHECK(parse(kSmallest, {"optimizer.schedule.warmup=0"}).optimizer.schedule.warmup == 0);
  CHECK(parse(kSmallest, {"optimizer.schedule.warmup=10"}).optimizer.schedule.warmup == 10);
}

TEST_CASE("the schema documents every key") {
  for (const KeyInfo& info : schema()) {
    INFO(info.path);
    CHECK_FALSE(info.type.empty());
    CHECK(info.help.size() > 10);
    CHECK(info.help.back() == '.');
  }
}

TEST_CASE("docs/config.md holds the schema's table") {
  const std::string begin = "<!-- schema: begin -->\n";
  const std::string end = "<!-- schema: end -->";
  std::string text = read_text("docs/config.md");
  const std::size_t from = text.find(begin);
  const std::size_t to = text.find(end);
  REQUIRE(from != std::string::npos);
  REQUIRE(to != std::string::npos);
  if (std::getenv("SPIPE_UPDATE_DOCS") != nullptr) {
    text.replace(from + begin.size(), to - from - begin.size(), schema_markdown());
    write_text_atomic("docs/config.md", text);
    return;
  }
  INFO("run this test with SPIPE_UPDATE_DOCS=1 to write the table");
  CHECK(text.substr(from + begin.size(), to - from - begin.size()) == schema_markdown());
}

TEST_CASE("the example of docs/config.md is valid") {
  const std::string text = read_text("docs/config.md");
  const std::size_t from = text.find("```yaml\n");
  REQUIRE(from != std::string::npos);
  const std::size_t start = from + 8;
  CHECK_NOTHROW(parse(text.substr(start, text.find("```", start) - start)));
}

TEST_CASE("a config is read from a file, and keeps its name") {
  const auto file = std::filesystem::temp_directory_path() / ("spipe-config-" + std::to_string(std::rand()) + ".yaml");
  write_text_atomic(file, kSmallest);
  CHECK(load_config(file).file == file);
  CHECK_THROWS_WITH(load_config(file, {"train.steps=0"}), "--set: 'train.steps' must be >= 1, not 0");
  std::filesystem::remove(file);
  CHECK_THROWS_WITH(load_config(file), file.string() + ": cannot open: No such file or directory");
}

TEST_CASE("the numerics block has a text and a hash of it") {
  const NumericsBlock one{{{"batch.micro", "2"}, {"seed", "1"}}};
  const NumericsBlock other{{{"batch.micro", "2"}, {"seed", "2"}}};
  CHECK(one.text() == "batch.micro = 2\nseed = 1\n");
  CHECK(one.hash().size() == 16);
  CHECK(one.hash() == NumericsBlock(one).hash());
  CHECK(one.hash() != other.hash());
}
