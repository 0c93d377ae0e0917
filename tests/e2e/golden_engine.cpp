#include "golden_engine.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/exec/executor.h"
#include "spipe/io/checkpoint.h"
#include "spipe/io/safetensors.h"
#include "spipe/model/families.h"
#include "spipe/plan/fit.h"
#include "spipe/plan/verifier.h"

namespace spipe::test {

using nlohmann::json;

namespace {

std::filesystem::path golden_root() {
  const char* folder = std::getenv("SPIPE_GOLDEN_DIR");
  return folder != nullptr ? folder : "tests/golden/data";
}

}  // namespace

std::vector<std::filesystem::path> golden_models() {
  std::vector<std::filesystem::path> models;
  for (const auto& entry : std::filesystem::directory_iterator(golden_root())) {
    if (!std::filesystem::exists(entry.path() / "golden.json")) continue;
    try {
      (void)model::architecture_from_hf(entry.path() / "config.json");
      models.push_back(entry.path());
    } catch (const Error& error) {
      WARN("skipped " << entry.path().filename().string() << ": " << error.what());
    }
  }
  std::sort(models.begin(), models.end());
  return models;
}

namespace {

// One engine around a golden model: everything a run has, without the config and the data files.
class Engine {
 public:
  Engine(const std::filesystem::path& folder, const json& golden, const json& hparams, const EngineCase& of)
      : architecture_(model::architecture_from_hf(folder / "config.json")) {
    const json& batch = golden.at("batch");
    const model::BatchShape shape{batch.at("B"), batch.at("T"), model::default_head_chunk(architecture_, 64)};
    shape_ = model::make_shape(architecture_, shape, DType::f32);
    const store::StoreFormat format = store::store_format(DType::f32);
    const store::StoreLayout layout = store::make_store_layout(shape_, format);
    request_.input.shape = &shape_;
    request_.micro_batches = batch.at("micro");
    request_.store_bytes = layout.bytes;
    request_.device_bytes = of.budget == 1 ? plan::smallest_budget(request_) : of.budget;
    fit_ = plan::fit(request_);
    plan::Limits limits;
    if (request_.device_bytes != 0) limits.device_bytes = request_.device_bytes;
    if (const auto violation = plan::verify(fit_.train, shape_, limits)) FAIL(violation->message);
    device_ = of.make_device ? of.make_device() : device::make_cpu_device({.threads = 2});
    store_ = std::make_unique<store::Store>(shape_, layout);
    io::load_model(folder, shape_, *store_);
    arena_ = device_->make_arena(fit_.arena_bytes);
    parking_.resize(fit_.train.parking_bytes);
    norms_ = std::make_unique<optim::NormTable>(shape_);
    machine_.device = device_.get();
    machine_.arena = arena_.get();
    machine_.shape = &shape_;
    machine_.store = store_.get();
    machine_.parking = parking_;
    machine_.constants = model::fill_constants(shape_, arena_->at(0, shape_.constant_bytes));
    machine_.norms = norms_.get();
    machine_.hyper = {hparams.at("beta1"), hparams.at("beta2"), hparams.at("eps"), hparams.at("weight_decay")};
    machine_.grad_clip = hparams.at("max_grad_norm");
    executor_ = std::make_unique<exec::Executor>(fit_.train, machine_);
  }

  struct Outcome {
    double loss, norm, clip;
  };
  Outcome step(const json& batch, std::size_t step, double lr) {
    std::uint64_t targets = 0;
    for (int m = 0; m < request_.micro_batches; ++m) {
      std::size_t at = 0;
      const json& tokens = batch.at("tokens")[step][static_cast<std::size_t>(m)];
      const json& labels = batch.at("labels")[step][static_cast<std::size_t>(m)];
      for (std::size_t row = 0; row < tokens.size(); ++row) {
        for (std::size_t t = 0; t < tokens[row].size(); ++t, ++at) {
          executor_->tokens(m)[at] = tokens[row][t];
          executor_->targets(m)[at] = t + 1 < labels[row].size() ? labels[row][t + 1].get<std::int32_t>() : -100;
          targets += executor_->targets(m)[at] >= 0 ? 1 : 0;
        }
      }
    }
    exec::StepRequest request;
    request.step = step;
    request.targets = targets;
    request.version = step;
    request.lr = [lr](std::uint64_t) { return lr; };
    const exec::Verdict verdict = executor_->run(request).verdict;
    return {verdict.loss_sum / static_cast<double>(targets), verdict.norm.norm, verdict.clip};
  }

  [[nodiscard]] const model::ModelShape& shape() const { return shape_; }
  [[nodiscard]] store::Store& store() { return *store_; }
  [[nodiscard]] const plan::Plan& plan() const { return fit_.train; }

 private:
  model::Architecture architecture_;
  model::ModelShape shape_;
  plan::FitRequest request_;
  plan::FitResult fit_;
  std::unique_ptr<device::Device> device_;
  std::unique_ptr<store::Store> store_;
  std::unique_ptr<device::Arena> arena_;
  std::vector<std::byte> parking_;
  std::unique_ptr<optim::NormTable> norms_;
  exec::Machine machine_;
  std::unique_ptr<exec::Executor> executor_;
};

// Hub-style GPT-2 files lack our "transformer." prefix; the golden files of such a model use its own names.
std::string name_in_file(const io::SafetensorsFile& file, const std::string& name) {
  constexpr std::string_view kPrefix = "transformer.";
  if (file.find(name) == nullptr && name.starts_with(kPrefix)) return name.substr(kPrefix.size());
  return name;
}

bool in_slices(const json& slices, const std::string& name, std::uint64_t i) {
  for (const json& slice : slices) {
    if (slice[0] == name && i >= slice[1].get<std::uint64_t>() && i < slice[2].get<std::uint64_t>()) return true;
  }
  return false;
}

// Worst ratio of a tensor's update error to its tolerance.
double worst_update(Engine& engine, const io::SafetensorsFile& reference, const io::SafetensorsFile& start, const json& golden,
                    const std::string& key, std::string& worst_name) {
  double worst = 0;
  for (int s = 0; s < engine.shape().store_unit_count(); ++s) {
    for (const model::Parameter& p : engine.shape().store_units[static_cast<std::size_t>(s)].parameters) {
      const std::string name = name_in_file(start, p.name);
      const io::TensorInfo* info = reference.find(key + "." + name);
      REQUIRE(info != nullptr);
      std::vector<float> want(p.elements()), before(p.elements());
      reference.read_f32(*info, want.data());
      start.read_f32(*start.find(name), before.data());
      const float* got = engine.store().master(s) + p.offset;
      double error = 0, update = 0;
      for (std::uint64_t i = 0; i < p.elements(); ++i) {
        if (in_slices(golden.at("zero_gradient_slices"), name, i)) continue;
        error += std::pow(double{got[i]} - double{want[i]}, 2);
        update += std::pow(double{want[i]} - double{before[i]}, 2);
      }
      const double measured = golden.at("float32_error").at(key + ".update").at(name);
      const double ratio = std::sqrt(error / update) / std::max(1e-3, 10 * measured);
      if (ratio > worst) {
        worst = ratio;
        worst_name = p.name;
      }
    }
  }
  return worst;
}

}  // namespace

void check_engine(const std::filesystem::path& folder, const EngineCase& of) {
  const json golden = json::parse(read_text(folder / "golden.json"));
  const json& training = golden.at("train").at(of.name);
  const json& hparams = training.at("hparams");
  const io::SafetensorsFile reference(folder / "golden.safetensors");
  const io::SafetensorsFile start(folder / "model.safetensors");
  Engine engine(folder, golden, hparams, of);
  INFO(folder.filename().string() << " " << of.name << " " << plan::summary(engine.plan()));
  CHECK((engine.plan().options.residency == plan::Residency::streamed) == (of.budget == 1));
  for (std::size_t step = 0; step < std::min(of.steps, training.at("steps").size()); ++step) {
    const json& want = training.at("steps")[step];
    const auto got = engine.step(golden.at("batch"), step, hparams.at("lr")[step]);
    INFO("step " << step + 1);
    CHECK(std::abs(got.loss / want.at("loss").get<double>() - 1) < 2e-6);
    CHECK(std::abs(got.norm / want.at("grad_norm").get<double>() - 1) < 1e-5);
    CHECK(std::abs(got.clip / want.at("clip_coef").get<double>() - 1) < 1e-5);
    for (const json& saved : training.at("saved_steps")) {
      if (saved.get<std::size_t>() != step + 1) continue;
      std::string worst_name;
      const double ratio =
          worst_update(engine, reference, start, golden, of.name + ".step" + std::to_string(step + 1), worst_name);
      INFO("worst tensor " << worst_name);
      CHECK(ratio < 1);
    }
  }
}

}  // namespace spipe::test
