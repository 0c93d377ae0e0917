// What is refused, and how: one line with the place, the finding and the way out (CASES O27, O28, O31).
#include <catch2/catch.hpp>
#include <set>

#include "spipe/base/error.h"
#include "spipe/config/config.h"

using namespace spipe;
using namespace spipe::config;

namespace {

const std::string kSmallest = "model: {config: m.json}\ndata: {train: [a.bin]}\ntrain: {steps: 10}\n";  // 3 lines

std::string message_of(const std::string& text, const std::vector<std::string>& overrides = {}) {
  try {
    (void)parse_config(text, "run.yaml", overrides);
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kUser);
    return error.what();
  }
  return "accepted";
}

// The message for a fourth line after the smallest config.
std::string refusal(const std::string& line) { return message_of(kSmallest + line + "\n"); }
// The message for an override of the smallest config.
std::string refused_set(const std::string& text) { return message_of(kSmallest, {text}); }

}  // namespace

TEST_CASE("numbers mean what a person reads, or are refused") {
  for (const char* good : {"1e-5", "1.0e-5", "1E-5", ".00001", "0.00001", "1e-05", "\"1e-5\""}) {
    INFO(good);
    CHECK(parse_config(kSmallest + "optimizer: {lr: " + good + "}", "run.yaml").optimizer.lr == 1e-5);
  }
  for (const char* bad : {"1e-5x", "nan", ".nan", "inf", ".inf", "-.inf", "010",  "1_000", "12:30", "0x10",
                          "+1",    "1e",  "e5",   ".",   "-",    "1e999", "true", "auto",  "1 000", "''"}) {
    INFO(bad);
    const std::string shown = std::string(bad) == "''" ? "" : bad;
    CHECK(refusal(std::string("optimizer: {lr: ") + bad + "}") ==
          "run.yaml:4: 'optimizer.lr' must be a number, not '" + shown + "'; write it in decimal, as in 0.1 or 1e-5");
  }
  CHECK(refusal("optimizer: {lr: -1}") == "run.yaml:4: 'optimizer.lr' must be > 0, not -1");
  CHECK(refusal("optimizer: {lr: 0}") == "run.yaml:4: 'optimizer.lr' must be > 0, not 0");
  CHECK(refusal("optimizer: {lr: [1]}") == "run.yaml:4: 'optimizer.lr' must be a number, not a list");
  CHECK(refusal("optimizer: {lr: {a: 1}}") == "run.yaml:4: 'optimizer.lr' must be a number, not a map");
  CHECK(refused_set("optimizer.lr=1,000") ==
        "--set: 'optimizer.lr' must be a number, not '1,000'; write it in decimal, as in 0.1 or 1e-5");
}

TEST_CASE("integers are plain decimal digits") {
  for (const char* bad : {"1e3", "1000.0", "010", "1_000", "12:30", "0x3e8", "1,000", "ten", "+5"}) {
    INFO(bad);
    CHECK(refused_set(std::string("train.steps=") + bad) == "--set: 'train.steps' must be an integer, not '" +
                                                                std::string(bad) +
                                                                "'; write it in plain decimal digits, as in 1000");
  }
  CHECK(refused_set("train.steps=-4") == "--set: 'train.steps' must be >= 1, not -4");
  CHECK(refused_set("train.steps=99999999999999999999") == "--set: 'train.steps' must be >= 1, not 99999999999999999999");
  CHECK(refused_set("data.seq_len=0") == "--set: 'data.seq_len' must be 1..2147483647, not 0");
  CHECK(refused_set("data.seq_len=2147483648") == "--set: 'data.seq_len' must be 1..2147483647, not 2147483648");
  CHECK(refused_set("train.seed=-1") == "--set: 'train.seed' must be 0..2^64-1, not -1");
  CHECK(refused_set("train.seed=18446744073709551616") == "--set: 'train.seed' must be 0..2^64-1, not 18446744073709551616");
  CHECK(refused_set("device.threads=0") == "--set: 'device.threads' must be 1..4096, not 0");
}

TEST_CASE("booleans are true and false, sizes have units, pairs have two numbers, choices have names") {
  for (const char* bad : {"yes", "no", "on", "off", "True", "1", "auto"}) {
    INFO(bad);
    CHECK(refusal(std::string("log: {jsonl: ") + bad + "}") ==
          "run.yaml:4: 'log.jsonl' must be true or false, not '" + std::string(bad) + "'");
  }
  CHECK(refusal("train2: {recompute: yes}").starts_with("run.yaml:4: unknown key 'train2'"));
  CHECK(refused_set("train.recompute=yes") == "--set: 'train.recompute' must be one of auto | true | false, not 'yes'");
  CHECK(refused_set("device.memory=8G") ==
        "--set: 'device.memory': '8G' is not a size; write a number with KiB, MiB, GiB, TiB (1024) or kB, MB, GB, TB (1000), "
        "as in '8 GiB'");
  CHECK(refused_set("device.memory=0") == "--set: 'device.memory' must be at least one byte, not 0");
  CHECK(refused_set("optimizer.betas=0.9") ==
        "--set: 'optimizer.betas' must be a list of two numbers, not '0.9'; write it as [0.9, 0.95]");
  CHECK(refused_set("optimizer.betas=[0.9]") ==
        "--set: 'optimizer.betas' must be a list of two numbers, not a list; write it as [0.9, 0.95]");
  CHECK(refused_set("optimizer.betas=[0.9, 1]") == "--set: 'optimizer.betas' must be >= 0 and < 1, not 1");
  CHECK(refused_set("optimizer.schedule.type=cosin") ==
        "--set: 'optimizer.schedule.type' must be one of constant | linear | cosine | inverse_sqrt | wsd_linear | wsd_sqrt | "
        "wsd, not "
        "'cosin'");
  CHECK(refused_set("optimizer.schedule.final=1.5") == "--set: 'optimizer.schedule.final' must be 0..1, not 1.5");
}

TEST_CASE("an unknown key is named with its path, line and the nearest known key") {
  CHECK(message_of("model: {config: m}\ndata: {train: a}\ntrain: {steps: 1,\n  learning_rat: 3e-4}\n") ==
        "run.yaml:4: unknown key 'train.learning_rat'; did you mean 'optimizer.lr'?");
  CHECK(refusal("lr: 1") == "run.yaml:4: unknown key 'lr'; did you mean 'optimizer.lr'?");
  CHECK(refusal("optimizer: {lrr: 1}") == "run.yaml:4: unknown key 'optimizer.lrr'; did you mean 'optimizer.lr'?");
  CHECK(refusal("optimiser: {lr: 1}") == "run.yaml:4: unknown key 'optimiser'; did you mean 'optimizer'?");
  CHECK(refusal("optimizer: {warmup: 1}") ==
        "run.yaml:4: unknown key 'optimizer.warmup'; did you mean 'optimizer.schedule.warmup'?");
  CHECK(refusal("schedule: {type: cosine}") ==
        "run.yaml:4: unknown key 'schedule'; did you mean one of 'optimizer.schedule', 'parallel.schedule'?");
  CHECK(refusal("every: 5") == "run.yaml:4: unknown key 'every'; did you mean one of 'checkpoint.every', 'log.every'?");
  CHECK(refusal("batch_size: 5") == "run.yaml:4: unknown key 'batch_size'; did you mean 'batch.global'?");
  CHECK(refusal("log: {xyzzy: 5}") ==
        "run.yaml:4: unknown key 'log.xyzzy'; the keys here are every, jsonl, unit_norms, trace, samples, sample_tokens, "
        "sample_temperature, tensorboard");
  CHECK(refusal("optimizer.lr: 1") == "run.yaml:4: unknown key 'optimizer.lr'; write sections as nested maps, without dots");
  CHECK(refusal("<<: {lr: 1}").starts_with("run.yaml:4: unknown key '<<'"));
}

TEST_CASE("an override by --set is checked like the file") {
  CHECK(refused_set("optimizer.lrr=1") == "--set: unknown key 'optimizer.lrr'; did you mean 'optimizer.lr'?");
  CHECK(refused_set("qqqqqq.wwwwww=1") ==
        "--set: unknown key 'qqqqqq.wwwwww'; the top-level keys are model, data, batch, train, optimizer, parallel, device, "
        "checkpoint, "
        "log");
  CHECK(refused_set("optimizer.lr") == "--set: 'optimizer.lr' is not KEY=VALUE; write it as in --set optimizer.lr=1e-4");
  CHECK(refused_set("=1") == "--set: '=1' is not KEY=VALUE; write it as in --set optimizer.lr=1e-4");
  CHECK(refused_set("optimizer.lr=") ==
        "--set: 'optimizer.lr' must be a number, not ''; write it in decimal, as in 0.1 or 1e-5");
  CHECK(refused_set("optimizer.lr=null") == "--set: 'optimizer.lr' has no value (null); give it one or remove the key");
  CHECK(refused_set("data.train=[a").starts_with("--set: not valid YAML: "));
  CHECK(refused_set("optimizer={lr: 1, lr: 2}") == "--set: key 'lr' is given twice, first on line 1; remove one of them");
  CHECK(refused_set("optimizer=3") ==
        "--set: 'optimizer' must be a map of keys, not '3'; its keys are type, lr, betas, eps, weight_decay, momentum, "
        "nesterov, moments, master, groups, schedule, policy, speculate, placement");
}

TEST_CASE("duplicates, tabs, emptiness, lists for maps and the rest of YAML are refused with their line") {
  CHECK(refusal("optimizer:\n  lr: 1\n  eps: 1e-8\n  lr: 2") ==
        "run.yaml:7: key 'lr' is given twice, first on line 5; remove one of them");
  CHECK(refusal("train: {steps: 3}") == "run.yaml:4: key 'train' is given twice, first on line 3; remove one of them");
  CHECK(refusal("optimizer:\n\tlr: 1") == "run.yaml:5: a tab in the indentation; indent with spaces");
  CHECK(refusal("optimizer:\n  \tlr: 1") == "run.yaml:5: a tab in the indentation; indent with spaces");
  CHECK(message_of("") == "run.yaml: the file is empty");
  CHECK(message_of("# nothing\n\n") == "run.yaml: the file is empty");
  CHECK(message_of("---\n") == "run.yaml: the file is empty");
  const std::string top = "; its keys are model, data, batch, train, optimizer, parallel, device, checkpoint, log";
  CHECK(message_of("- a\n- b\n") == "run.yaml:1: the top level must be a map of keys, not a list" + top);
  CHECK(message_of("hello\n") == "run.yaml:1: the top level must be a map of keys, not 'hello'" + top);
  CHECK(refusal("log: [every, 3]") ==
        "run.yaml:4: 'log' must be a map of keys, not a list; its keys are every, jsonl, unit_norms, trace, samples, "
        "sample_tokens, sample_temperature, tensorboard");
  CHECK(refusal("log:") ==
        "run.yaml:4: 'log' must be a map of keys, not nothing (null); its keys are every, jsonl, unit_norms, trace, samples, "
        "sample_tokens, sample_temperature, tensorboard");
  CHECK(refusal("log: {every: null}") == "run.yaml:4: 'log.every' has no value (null); give it one or remove the key");
  CHECK(refusal("log: &x {every: 1}") ==
        "run.yaml:4: an anchor ('&name') is not supported; write the value out where it is used");
  CHECK(refusal("checkpoint: {dir: *.bin}") ==
        "run.yaml:4: not valid YAML: the referenced anchor is not defined; quote text that begins with '*'");
  CHECK(refusal("log: {every: !!int 3}") == "run.yaml:4: the tag 'tag:yaml.org,2002:int' is not supported");
  CHECK(refusal("---\nlog: {every: 3}") == "run.yaml: a second document ('---') is not supported");
  CHECK(refusal("? [a]\n: b") == "run.yaml:4: a key must be a word, not a list");
  CHECK(refusal("log: {every: 3").starts_with("run.yaml:"));
  CHECK(message_of(std::string(100'000, '[')).starts_with("run.yaml:"));  // no stack overflow
}

TEST_CASE("what is required is asked for") {
  CHECK(message_of("data: {train: [a]}\ntrain: {steps: 1}\n") ==
        "run.yaml: 'model.config' is missing; name a model file (or a folder with 'model.hf')");
  CHECK(message_of("model: {config: m}\ntrain: {steps: 1}\n") ==
        "run.yaml: 'data.train' is missing; name the token files to train on");
  CHECK(message_of("model: {config: m}\ndata: {train: [a]}\n") ==
        "run.yaml: 'train.steps' is missing; say how many steps to train");
  CHECK(message_of("model: {config: m}\ndata: {train:}\n") ==
        "run.yaml:2: 'data.train' has no value (null); give it one or remove the key");
  CHECK(message_of("model: {config: m}\ndata: {train: []}\n") ==
        "run.yaml:2: 'data.train' is an empty list; name at least one file");
  CHECK(message_of("model: {config: m}\ndata: {train: [a, [b]]}\n") ==
        "run.yaml:2: 'data.train' must be a list of paths, not a list");
  CHECK(message_of("model: {config: m}\ndata: {train: [a, '']}\n") == "run.yaml:2: 'data.train' holds an empty path");
  CHECK(message_of("model: {config: ''}\n") == "run.yaml:1: 'model.config' is empty; give a path or remove the key");
}

TEST_CASE("rules between keys name both values and the way out") {
  CHECK(refusal("batch: {global: 64, micro: 3}") ==
        "run.yaml:4: batch.global 64 is not a multiple of batch.micro 3; the nearest multiples are 63 and 66");
  CHECK(refusal("batch: {global: 2, micro: 3}") ==
        "run.yaml:4: batch.global 2 is not a multiple of batch.micro 3; the nearest multiple is 3");
  CHECK(refusal("batch: {micro: 5}")
            .starts_with("run.yaml: batch.global 64 is not a multiple of batch.micro 5"));  // the default's fault
  CHECK(refusal("batch:\n  global: 8\n  micro: 2\n  sum_groups: 5") ==
        "run.yaml:7: batch.sum_groups 5 is more than the 4 micro-batches of a step (batch.global 8 / batch.micro 2); use at "
        "most 4");
  CHECK(refusal("batch: {global: 8, micro: 2, sum_groups: 4}") == "accepted");
  CHECK(refused_set("optimizer.schedule.warmup=11") ==
        "--set: optimizer.schedule.warmup 11 is more than train.steps 10; use at most 10");
  CHECK(refusal("optimizer: {schedule: {type: wsd_sqrt}}") ==
        "run.yaml:4: optimizer.schedule.type wsd_sqrt needs optimizer.schedule.decay; give the number of steps of the final "
        "decay, at "
        "least 1");
  CHECK(refusal("optimizer: {schedule: {decay: 2}}") ==
        "run.yaml:4: optimizer.schedule.decay is only for the wsd schedules, not for cosine; remove it or use wsd_linear or "
        "wsd_sqrt");
  CHECK(refusal("optimizer: {schedule: {type: wsd, warmup: 4, decay: 7}}") ==
        "run.yaml:4: optimizer.schedule.warmup 4 and optimizer.schedule.decay 7 do not fit into train.steps 10; use a decay of "
        "at most 6");
  CHECK(refused_set("train.eval_every=5") ==
        "--set: train.eval_every is given but data.eval is not; name held-out token files in data.eval");
  CHECK(message_of(kSmallest, {"batch.global=12", "batch.sum_groups=4", "parallel.data=3"}) ==
        "--set: batch.sum_groups 4 is not a multiple of parallel.data 3; every replica takes whole groups: use 3 or remove "
        "batch.sum_groups");
  CHECK(message_of(kSmallest, {"batch.global=6", "parallel.data=7"}) ==
        "--set: parallel.data 7 is more than the 6 micro-batches of a step (batch.global 6 / batch.micro 1); use at most 6");
  for (const char* key : {"pace_jitter", "pace_slow_rank", "pace_slow_factor"}) {
    const std::string name = std::string("device.") + key;
    const std::string value = std::string(key) == "pace_jitter" ? "0.5" : "2";
    CHECK(refusal("device: {" + std::string(key) + ": " + value + "}") ==
          "run.yaml:4: " + name + " is given but device.pace is not; name a hardware file in device.pace");
  }
  CHECK(refusal("device: {pace: m.yaml, pace_slow_factor: 2}") ==
        "run.yaml:4: device.pace_slow_factor is given but device.pace_slow_rank is not; say which rank is slow");
  CHECK(refusal("device: {pace: m.yaml, pace_slow_rank: 2}") ==
        "run.yaml:4: device.pace_slow_rank is given but device.pace_slow_factor is 1; say how many times slower it is");
  CHECK(refused_set("model.hf=x") == "--set: model.config and model.hf are both given; keep one of them");
  CHECK(refused_set("model.init=pretrained") ==
        "--set: model.init pretrained needs model.hf; model.config holds no parameters");
}

TEST_CASE("what is planned but not built is known, and refused by name") {
  const auto planned = [](const std::string& key, const std::string& value, const std::string& hint) {
    CHECK(refused_set(key + "=" + value) == "--set: '" + key + ": " + value + "' is not built yet in this version; " + hint);
  };
  for (const char* type : {"lamb", "adafactor", "muon"}) planned("optimizer.type", type, "use adamw, adam, sgd or lion");
  planned("device.type", "cuda", "use cpu or auto");
  planned("log.tensorboard", "true", "use log.jsonl");
}

TEST_CASE("what an update rule would ignore is refused, and a split master without bf16") {
  CHECK(refused_set("optimizer.type=adamv") == "--set: 'optimizer.type' must be one of adamw | adam | sgd | lion, not 'adamv'");
  CHECK(refusal("optimizer: {momentum: 0.8}") ==
        "run.yaml:4: optimizer.momentum is SGD's, and optimizer.type is adamw; remove it");
  CHECK(refusal("optimizer: {type: lion, nesterov: true}") ==
        "run.yaml:4: optimizer.nesterov is SGD's, and optimizer.type is lion; remove it");
  CHECK(refusal("optimizer: {type: lion, eps: 1e-6}") ==
        "run.yaml:4: optimizer.eps is AdamW's and Adam's, and optimizer.type is lion; remove it");
  CHECK(refusal("optimizer: {type: sgd, betas: [0.9, 0.99]}") ==
        "run.yaml:4: optimizer.betas is not SGD's, and optimizer.type is sgd; remove it");
  CHECK(refusal("optimizer: {type: sgd, momentum: 0, nesterov: true}") ==
        "run.yaml:4: optimizer.nesterov needs a momentum, and optimizer.momentum is 0; remove it");
  CHECK(refusal("optimizer: {type: sgd, momentum: 1}") == "run.yaml:4: 'optimizer.momentum' must be >= 0 and < 1, not 1");
  CHECK(refusal("optimizer: {momentun: 0.9}") ==
        "run.yaml:4: unknown key 'optimizer.momentun'; did you mean 'optimizer.momentum'?");
  CHECK(refused_set("optimizer.moments=fp16") == "--set: 'optimizer.moments' must be one of fp32 | bf16, not 'fp16'");
  for (const char* precision : {"auto", "fp32", "fp16"}) {
    INFO(precision);
    CHECK(message_of(kSmallest, {"optimizer.master=split", std::string("train.precision=") + precision}) ==
          "--set: optimizer.master split needs train.precision bf16, whose compute copy is the upper half; use "
          "optimizer.master fp32, or train.precision bf16");
  }
  CHECK(message_of(kSmallest, {"optimizer.master=split", "train.precision=bf16", "optimizer.type=sgd",
                               "optimizer.nesterov=true", "optimizer.momentum=0.5", "optimizer.moments=bf16"}) == "accepted");
}

TEST_CASE("loss scales are powers of two in order") {
  CHECK(message_of(kSmallest, {"train.spike_warmup=200"}) ==
        "--set: train.spike_warmup 200 is more than train.spike_window 128; no step would ever be called a spike: use at most "
        "the window");
  CHECK(refused_set("train.skip_spikes=-1").starts_with("--set: 'train.skip_spikes' must be >= 0"));
  CHECK(refused_set("train.spike_window=1").starts_with("--set: 'train.spike_window' must be 2.."));
  CHECK(refused_set("optimizer.groups=decay") ==
        "--set: 'optimizer.groups' must be a list of maps, not 'decay'; write it as [{pattern: \"*.bias\", weight_decay: "
        "0}]");
  CHECK(refused_set("optimizer.groups=[{weight_decay: 0}]") ==
        "--set: 'optimizer.groups[0]' has no pattern; name tensors, as in pattern: \"*.bias\"");
  CHECK(refused_set("optimizer.groups=[{pattern: a}, {pattern: b, weight_decai: 0}]") ==
        "--set: unknown key 'optimizer.groups[1].weight_decai'; did you mean 'weight_decay'?");
  CHECK(refused_set("optimizer.groups=[{pattern: a, lr_scale: 0}]") ==
        "--set: 'optimizer.groups[0].lr_scale' must be > 0, not 0");
  CHECK(refused_set("optimizer.groups=[{pattern: a, frozen: true, weight_decay: 0}]") ==
        "--set: 'optimizer.groups[0]' is frozen, so it has no weight_decay or lr_scale; remove them, or frozen");
  CHECK(refused_set("train.loss_scale=1000") ==
        "--set: 'train.loss_scale' must be a power of two, not 1000; the nearest below is 512");
  CHECK(refused_set("train.loss_scale=on") ==
        "--set: 'train.loss_scale' must be a number, not 'on'; write it in decimal, as in 0.1 or 1e-5");
  CHECK(refused_set("train.loss_scale=0.5").starts_with("--set: 'train.loss_scale' must be 1.."));
  CHECK(refused_set("train.loss_scale_backoff=1") == "--set: 'train.loss_scale_backoff' must be > 0 and <= 0.5, not 1");
  CHECK(refused_set("train.loss_scale_hysteresis=0").starts_with("--set: 'train.loss_scale_hysteresis' must be 1.."));
  CHECK(refused_set("train.loss_scale_initial=33554432") ==
        "--set: train.loss_scale_initial 33554432 is not between train.loss_scale_min and train.loss_scale_max; use "
        "1..16777216");
  CHECK(message_of(kSmallest, {"train.loss_scale_min=8", "train.loss_scale_max=4"}) ==
        "--set: train.loss_scale_min 8 is more than train.loss_scale_max 4; lower the one or raise the other");
  CHECK(refused_set("train.init_scale=2") == "--set: unknown key 'train.init_scale'; did you mean 'train.loss_scale_initial'?");
}

TEST_CASE("ranks, replicas, schedules and paces have their bounds") {
  CHECK(refused_set("parallel.pipeline=0") == "--set: 'parallel.pipeline' must be 1..65536, not 0");
  CHECK(refused_set("parallel.data=0") == "--set: 'parallel.data' must be 1..65536, not 0");
  CHECK(refused_set("parallel.data=auto").starts_with("--set: 'parallel.data' must be an integer, not 'auto'"));
  CHECK(
      refused_set("parallel.schedule=sspipe") ==
      "--set: 'parallel.schedule' must be one of auto | streaming | spipe | mobius | 1f1b | gpipe | roundpipe | streaming-dp, "
      "not 'sspipe'");
  CHECK(refusal("device: {pace: {flops: 1e12}}") == "run.yaml:4: 'device.pace' must be a path, not a map");
  CHECK(refused_set("device.pace=") == "--set: 'device.pace' is empty; give a path or remove the key");
  CHECK(refused_set("device.pace_jitter=1.5") == "--set: 'device.pace_jitter' must be 0..1, not 1.5");
  CHECK(refused_set("device.pace_slow_rank=-1") == "--set: 'device.pace_slow_rank' must be 0..65535, not -1");
  CHECK(refused_set("device.pace_slow_factor=0.5") == "--set: 'device.pace_slow_factor' must be >= 1, not 0.5");
  CHECK(refused_set("device.paced=m.yaml") == "--set: unknown key 'device.paced'; did you mean 'device.pace'?");
}

TEST_CASE("every key of the schema refuses null, and most refuse a map") {
  for (const KeyInfo& info : schema()) {
    INFO(info.path);
    CHECK_FALSE(refused_set(info.path + "=null") == "accepted");
    CHECK_FALSE(refused_set(info.path + "={a: 1}") == "accepted");
  }
}
