#include "rank_runs.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <stdexcept>

#include "spipe/base/error.h"
#include "spipe/config/config.h"
#include "spipe/io/safetensors.h"

namespace spipe::test {
namespace {

class Recorder : public exec::RunListener {
 public:
  explicit Recorder(RankRuns::Result& result) : result_(result), outcome_(result.outcome) {}
  void on_setup(const exec::RunSetup& setup, const device::DeviceInfo&, const device::DeviceRates&, std::uint64_t) override {
    for (const plan::UpdateWay& way : setup.fit.train.options.updates) result_.speculating += way.speculate ? 1 : 0;
  }
  void on_step(const exec::StepRecord& record) override {
    outcome_.losses.push_back(record.loss);
    outcome_.norms.push_back(std::isfinite(record.grad_norm) ? record.grad_norm : -1);
    add_unit_norms(record);
    result_.taken_back += record.taken_back;
    outcome_.clips.push_back(record.clip);
    outcome_.scales.push_back(record.loss_scale);
    outcome_.skipped.push_back(record.skipped);
  }
  void on_evaluation(std::uint64_t, double loss, std::uint64_t) override { outcome_.evaluations.push_back(loss); }

 private:
  // Whose squares add up to that of the whole.
  void add_unit_norms(const exec::StepRecord& record) {
    double squares = 0;
    for (const auto& [unit, norm] : record.unit_norms) {
      outcome_.unit_norms.push_back(std::isfinite(norm) ? norm : -1);
      squares += norm * norm;
    }
    const double whole = record.grad_norm * record.grad_norm;
    if (std::isfinite(whole) && !(std::abs(squares - whole) <= 1e-12 * whole)) {
      throw std::logic_error("the norms of the units are not those of the whole");
    }
  }

  RankRuns::Result& result_;
  Outcome& outcome_;
};

std::map<std::string, std::string> tensors_of(const std::filesystem::path& checkpoint) {
  std::map<std::string, std::string> tensors;
  for (const auto& entry : std::filesystem::directory_iterator(checkpoint)) {
    if (entry.path().extension() != ".safetensors") continue;
    const io::SafetensorsFile file(entry.path());
    for (const io::TensorInfo& tensor : file.tensors()) {
      const auto data = file.data(tensor);
      tensors[tensor.name] = std::string(reinterpret_cast<const char*>(data.data()), data.size());
    }
  }
  return tensors;
}

template <typename T>
void append_to(std::vector<T>& all, const std::vector<T>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

}  // namespace

void Outcome::append(const Outcome& later) {
  append_to(losses, later.losses);
  append_to(norms, later.norms);
  append_to(clips, later.clips);
  append_to(unit_norms, later.unit_norms);
  append_to(scales, later.scales);
  append_to(skipped, later.skipped);
  append_to(evaluations, later.evaluations);
  tensors = later.tensors;
}

RankRuns::RankRuns(comm::World& world, const std::vector<std::string>& models) : world_(world) {
  if (world.rank() == 0) {
    folder_ = std::make_unique<TempFolder>();
    path_ = folder_->path().string();
    for (const std::string& model : models) {
      std::filesystem::create_directory(folder_->path() / model);
      TinyRun run;
      const bool tied = model == "gpt2";
      run.model_json = tied ? tiny_gpt2_json() : tiny_llama_json();
      const std::string layers = tied ? "\"n_layer\": 3" : "\"num_hidden_layers\": 3";
      run.model_json.replace(run.model_json.find(layers) + layers.size() - 1, 1, "5");
      write_tiny_files(folder_->path() / model, run);
    }
  }
  std::vector<std::byte> bytes(path_.size());
  std::memcpy(bytes.data(), path_.data(), path_.size());
  world.broadcast(bytes, 0);
  path_ = std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

RankRuns::Result RankRuns::train(const std::string& model, const std::vector<std::string>& settings, exec::RunOptions options,
                                 comm::World& world, bool keep) {
  Result result;
  Recorder recorder(result);
  options.handle_signals = false;
  options.rates = device::DeviceRates{1e11, 1e10, 1e10, 1e9};
  std::vector<std::string> all = {"batch.micro=1", "device.threads=1"};
  if (model == "bf16" || model == "fp16") all.push_back("train.precision=" + model);
  append_to(all, settings);
  const config::Config config = config::load_config(std::filesystem::path(path_) / model / "run.yaml", all);
  result.summary = exec::train(config, options, recorder, world);
  if (world.rank() == 0) {
    result.outcome.tensors = tensors_of(result.summary.checkpoint);
    if (!keep) std::filesystem::remove_all(config.checkpoint.dir);
  }
  return result;
}

std::uint64_t RankRuns::smallest_budget(const std::string& model, std::vector<std::string> settings) {
  settings.emplace_back("device.memory=1");
  try {
    (void)train(model, settings, {}, world_);
  } catch (const Error& error) {
    const std::string text = error.what();
    const auto works = text.find("smallest that works is");
    if (works == std::string::npos) throw;
    return std::stoull(text.substr(text.find('(', works) + 1));
  }
  throw std::logic_error("a budget of one byte was accepted");
}

}  // namespace spipe::test
