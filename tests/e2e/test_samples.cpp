// log.samples: prompts sampled while a model is trained.
#include <catch2/catch.hpp>
#include <map>

#include "kernels/cpu/cpu_ops.h"
#include "spipe/base/error.h"
#include "spipe/config/config.h"
#include "spipe/data/data.h"
#include "spipe/data/utf8.h"
#include "spipe/exec/generate.h"
#include "spipe/io/checkpoint.h"
#include "tests/support/tiny_run.h"

using namespace spipe;
using namespace spipe::test;

namespace {

class SampleRecorder : public exec::RunListener {
 public:
  void on_samples(std::uint64_t step, const std::vector<exec::Sample>& samples) override { by_step[step] = samples; }
  void on_setup(const exec::RunSetup& setup, const device::DeviceInfo&, const device::DeviceRates&, std::uint64_t) override {
    staging = setup.host.staging;
    total = setup.host.total;
  }
  std::map<std::uint64_t, std::vector<exec::Sample>> by_step;
  std::uint64_t staging = 0, total = 0;
};

struct Sampled {
  SampleRecorder recorder;
  exec::RunSummary summary;
};

// Trains in `folder` on a text of digits, and keeps every checkpoint that samples can be held against.
Sampled train(const Path& folder, std::vector<std::string> settings) {
  const TinyRun run{.model_json = tiny_llama_json()};
  if (!std::filesystem::exists(folder / "model.json")) write_tiny_text_files(folder, run, counting_text(4000));
  for (const char* setting : {"train.steps=24", "train.eval_every=8", "checkpoint.every=8", "checkpoint.keep=9",
                              "optimizer.lr=1e-2", "log.sample_tokens=12"}) {
    settings.insert(settings.begin(), setting);
  }
  exec::RunOptions options;
  options.handle_signals = false;
  options.resume_auto = true;
  options.rates = device::DeviceRates{1e11, 1e10, 1e10, 1e9};
  Sampled sampled;
  sampled.summary = exec::train(config::load_config(folder / "run.yaml", settings), options, sampled.recorder);
  return sampled;
}

const char* const kPrompts = R"(log.samples=["0123", "", "77"])";

// What generation makes of the checkpoint of a step.
std::string generated(const Path& run, std::uint64_t step, const std::string& prompt) {
  const exec::OpenModel open = exec::open_model(run, step);
  ThreadPool pool(1);
  const auto ops = make_cpu_ops(pool);
  const auto tokenizer = data::byte_tokenizer();
  exec::GenerateRequest request{
      .new_tokens = 12, .sampling = {.temperature = 0.8, .top_p = 0.95, .seed = 3}, .end_ids = {256}, .vocab = 257};
  tokenizer->encode(prompt, request.prompt);
  model::Decoder decoder(open.shape.architecture, DType::f32, open.parameters(), *ops, 32);
  data::Utf8Stream text;
  const std::string made = text.feed(tokenizer->decode(exec::generate(decoder, request).tokens));
  return made + text.finish();
}

std::string refusal(const Path& folder, const std::vector<std::string>& settings) {
  try {
    (void)train(folder, settings);
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kUser);
    return error.what();
  }
  return "accepted";
}

}  // namespace

TEST_CASE("samples are what the checkpoint of their step generates, wherever the parameters lie") {
  const std::vector<std::vector<std::string>> ways = {
      {},
      {"optimizer.policy=overlap", "train.grad_clip=0.1"},  // second slots, taken back
      {"optimizer.policy=deferred"},
      {"optimizer.placement=resident", "device.memory=4 MiB"},
      {"device.memory=300 KiB"},
  };
  for (const auto& way : ways) {
    INFO((way.empty() ? std::string("plain") : way.front()));
    const TempFolder folder;
    std::vector<std::string> settings = way;
    settings.emplace_back(kPrompts);
    const Sampled run = train(folder.path(), settings);
    REQUIRE(run.recorder.by_step.size() == 3);  // every eight steps, and at the end
    for (const auto& [step, samples] : run.recorder.by_step) {
      INFO("step " << step);
      REQUIRE(samples.size() == 3);
      CHECK(samples[0].prompt == "0123");
      CHECK(samples[1].prompt.empty());
      CHECK(samples[0].text == generated(folder.path() / "run", step, "0123"));
      CHECK(samples[2].text == generated(folder.path() / "run", step, "77"));
    }
    CHECK(run.recorder.by_step.at(8)[0].text != run.recorder.by_step.at(24)[0].text);
  }
}

TEST_CASE("samples change nothing of the run, and their memory is counted") {
  const TempFolder with, without;
  const Sampled a = train(with.path(), {kPrompts}), b = train(without.path(), {});
  CHECK(b.recorder.by_step.empty());
  CHECK(a.summary.last_loss == b.summary.last_loss);
  CHECK(a.summary.eval_loss == b.summary.eval_loss);
  const auto weights = [](const Sampled& run) { return read_text(run.summary.checkpoint / "model.safetensors"); };
  CHECK(weights(a) == weights(b));
  CHECK(a.recorder.staging > b.recorder.staging);
  CHECK(a.recorder.total - a.recorder.staging == b.recorder.total - b.recorder.staging);
}

TEST_CASE("samples need no evaluation data, and come at the end alone without train.eval_every") {
  const TempFolder folder;
  const Sampled run = train(folder.path(), {kPrompts, "data.eval=[]", "train.eval_every=0"});
  CHECK(run.recorder.by_step.size() == 1);
  CHECK(run.recorder.by_step.contains(24));
  const TempFolder other;
  CHECK(train(other.path(), {kPrompts, "data.eval=[]"}).recorder.by_step.size() == 3);
}

TEST_CASE("samples that a run cannot make are refused in one line before it starts") {
  const TempFolder folder;
  TinyRun small{.model_json = tiny_llama_json()};
  write_tiny_files(folder.path(), small);
  CHECK_THAT(refusal(folder.path(), {kPrompts}), Catch::Contains("a vocabulary of 97"));
  const TempFolder foreign;  // a vocabulary that is large enough, and tokens of another tokenizer
  small.model_json.replace(small.model_json.find("97"), 2, "264");
  write_tiny_files(foreign.path(), small);
  CHECK_THAT(refusal(foreign.path(), {kPrompts}), Catch::Contains("made with another one"));
  CHECK_FALSE(std::filesystem::exists(foreign.path() / "run" / "samples.jsonl"));
}
