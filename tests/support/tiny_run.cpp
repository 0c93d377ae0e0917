#include "tiny_run.h"

#include <fmt/core.h>
#include <unistd.h>

#include <cstdlib>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/base/random.h"
#include "spipe/config/config.h"
#include "spipe/data/data.h"

namespace spipe::test {

TempFolder::TempFolder() {
  std::string name = (std::filesystem::temp_directory_path() / "spipe-test-XXXXXX").string();
  SPIPE_CHECK(mkdtemp(name.data()) != nullptr, "no temporary folder");
  path_ = name;
}

TempFolder::~TempFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string tiny_llama_json() {
  return R"({"model_type": "llama", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
             "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": false})";
}

std::string tiny_tied_llama_json() {
  std::string json = tiny_llama_json();
  json.replace(json.find("false"), 5, "true");
  return json;
}

std::string tiny_gpt2_json() {
  return R"({"model_type": "gpt2", "vocab_size": 97, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64,
             "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5})";
}

std::string tiny_config_text(const std::filesystem::path& folder) {
  const std::string dir = folder.string();
  return fmt::format(
      "model: {{config: {0}/model.json}}\n"
      "data: {{train: [{0}/train.bin], eval: [{0}/heldout.bin], seq_len: 16}}\n"
      "batch: {{global: 6, micro: 2}}\n"
      "train: {{steps: 6, seed: 3, grad_clip: 1.0, precision: fp32}}\n"
      "optimizer: {{lr: 3e-3, schedule: {{type: cosine, warmup: 2}}}}\n"
      "device: {{threads: 2}}\n"
      "checkpoint: {{dir: {0}/run}}\n"
      "log: {{every: 1}}\n",
      dir);
}

namespace {

void write_tokens(const std::filesystem::path& file, std::uint64_t seed, std::uint64_t count) {
  data::TokenFileWriter writer(file, 97, 1, -1);
  const PhiloxKey key = make_key(seed, 77);
  std::vector<std::int32_t> tokens;
  for (std::uint64_t i = 0; i < count; ++i) {
    // Some order to learn: half of the tokens repeat the one before plus one.
    const auto random = static_cast<std::int32_t>(uniform_at(key, 0, i) * 97);
    tokens.push_back(i % 2 == 1 ? (tokens.back() + 1) % 97 : random);
  }
  writer.document(tokens);
  writer.finish();
}

class Recorder : public exec::RunListener {
 public:
  explicit Recorder(TinyResult& result) : result_(result) {}
  void on_setup(const exec::RunSetup& setup, const device::DeviceInfo&, const device::DeviceRates&, std::uint64_t) override {
    result_.device_bytes = setup.fit.train.device_bytes();
    result_.plan_summary = plan::summary(setup.fit.train);
  }
  void on_step(const exec::StepRecord& record) override {
    result_.losses.push_back(record.loss);
    result_.norms.push_back(record.grad_norm);
    result_.skipped.push_back(record.skipped);
    result_.skipped_for.push_back(record.skipped_for);
    if (record.loss_scale) result_.scales.push_back(*record.loss_scale);
  }

 private:
  TinyResult& result_;
};

}  // namespace

void write_tiny_files(const std::filesystem::path& folder, const TinyRun& run) {
  if (std::filesystem::exists(folder / "model.json")) return;
  write_text_atomic(folder / "model.json", run.model_json);
  write_tokens(folder / "train.bin", run.data_seed, run.tokens);
  write_tokens(folder / "heldout.bin", run.data_seed + 1, 300);
  write_text_atomic(folder / "run.yaml", tiny_config_text(folder));
}

void write_tiny_text_files(const std::filesystem::path& folder, TinyRun run, const std::string& text) {
  run.model_json.replace(run.model_json.find("97"), 2, "264");
  write_tiny_files(folder, run);
  write_text_atomic(folder / "text.txt", text);
  data::TokenizeOptions options;
  options.inputs = {folder / "text.txt"};
  for (const char* name : {"train.bin", "heldout.bin"}) {
    options.output = folder / name;
    (void)data::tokenize(*data::byte_tokenizer(), options);
  }
}

std::string counting_text(std::size_t characters) {
  std::string text;
  for (std::size_t i = 0; i < characters; ++i) text.push_back(static_cast<char>('0' + i % 10));
  return text;
}

TinyResult run_tiny(const std::filesystem::path& folder, const TinyRun& run) {
  write_tiny_files(folder, run);
  TinyResult result;
  Recorder recorder(result);
  exec::RunOptions options = run.options;
  options.handle_signals = false;
  options.rates = device::DeviceRates{1e11, 1e10, 1e10, 1e9};
  result.summary = exec::train(config::load_config(folder / "run.yaml", run.settings), options, recorder);
  result.fetched = result.summary.bytes_fetched;
  for (const auto& entry : std::filesystem::directory_iterator(result.summary.checkpoint)) {
    if (entry.path().extension() == ".safetensors") result.files[entry.path().filename().string()] = read_text(entry.path());
  }
  return result;
}

}  // namespace spipe::test
