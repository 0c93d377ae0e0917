#include "golden_model.h"

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <nlohmann/json.hpp>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/io/safetensors.h"
#include "spipe/model/families.h"

namespace spipe::test {
namespace {

using nlohmann::json;

std::vector<float> values_of(const io::SafetensorsFile& file, const io::TensorInfo& tensor) {
  std::vector<float> values(tensor.elements());
  file.read_f32(tensor, values.data());
  return values;
}

// "clip.step2.X" and "grad.X" with X as our code names it.
std::string canonical_reference(const model::Architecture& architecture, const std::string& name) {
  std::size_t at = 0;
  if (name.starts_with("grad.")) at = 5;
  if (name.starts_with("clip.step") || name.starts_with("noclip.step")) at = name.find('.', name.find('.') + 1) + 1;
  return at == 0 ? name : name.substr(0, at) + model::canonical_tensor_name(architecture, name.substr(at));
}

void read_batch(const json& batch, GoldenModel& model) {
  model.micro = batch.at("micro");
  model.sequences = batch.at("B");
  model.seq_len = batch.at("T");
  for (std::size_t step = 0; step < batch.at("tokens").size(); ++step) {
    for (std::size_t m = 0; m < static_cast<std::size_t>(model.micro); ++m) {
      std::vector<std::int32_t> tokens, targets;
      for (std::size_t b = 0; b < static_cast<std::size_t>(model.sequences); ++b) {
        const auto row = batch.at("tokens")[step][m][b].get<std::vector<std::int32_t>>();
        const auto labels = batch.at("labels")[step][m][b].get<std::vector<std::int32_t>>();
        tokens.insert(tokens.end(), row.begin(), row.end());
        targets.insert(targets.end(), labels.begin() + 1, labels.end());
        targets.push_back(-100);
      }
      model.tokens.push_back(std::move(tokens));
      model.targets.push_back(std::move(targets));
    }
  }
}

GoldenCase read_case(const std::string& name, const json& golden, const model::Architecture& architecture) {
  const json& train = golden.at("train").at(name);
  const json& h = train.at("hparams");
  GoldenCase c{.name = name,
               .beta1 = h.at("beta1"),
               .beta2 = h.at("beta2"),
               .eps = h.at("eps"),
               .weight_decay = h.at("weight_decay"),
               .max_grad_norm = h.at("max_grad_norm")};
  for (const json& step : train.at("steps"))
    c.steps.push_back({step.at("loss"), step.at("lr"), step.at("grad_norm"), step.at("clip_coef")});
  c.saved_steps = train.at("saved_steps").get<std::vector<int>>();
  for (const int step : c.saved_steps) {
    const std::string key = "step" + std::to_string(step);
    for (const auto& item : golden.at("float32_error").at(name + "." + key + ".update").items()) {
      c.update_error[key][model::canonical_tensor_name(architecture, item.key())] = item.value();
    }
  }
  return c;
}

}  // namespace

double GoldenModel::targets_of(std::size_t step) const {
  std::ptrdiff_t count = 0;
  for (std::size_t m = 0; m < static_cast<std::size_t>(micro); ++m) {
    const std::vector<std::int32_t>& row = targets[step * static_cast<std::size_t>(micro) + m];
    count += std::count_if(row.begin(), row.end(), [](std::int32_t t) { return t >= 0; });
  }
  return static_cast<double>(count);
}

bool GoldenModel::zero_gradient(const std::string& tensor, std::size_t element) const {
  return std::any_of(zero_gradients.begin(), zero_gradients.end(),
                     [&](const Slice& s) { return s.tensor == tensor && element >= s.begin && element < s.end; });
}

std::vector<std::filesystem::path> golden_folders() {
  const char* const given = std::getenv("SPIPE_GOLDEN_DIR");
  std::vector<std::filesystem::path> folders;
  for (const auto& entry : std::filesystem::directory_iterator(given != nullptr ? given : "tests/golden/data")) {
    if (std::filesystem::exists(entry.path() / "golden.json")) folders.push_back(entry.path());
  }
  std::sort(folders.begin(), folders.end());
  return folders;
}

std::optional<GoldenModel> read_golden(const std::filesystem::path& folder) {
  GoldenModel model;
  const json golden = json::parse(read_text(folder / "golden.json"));
  model.name = folder.filename().string();
  try {
    model.architecture = model::architecture_from_hf(folder / "config.json");
  } catch (const Error& error) {
    if (error.finding().find("model_type") == std::string::npos) throw;
    std::cout << "golden model " << model.name << " skipped: " << error.what() << "\n";
    return std::nullopt;
  }
  read_batch(golden.at("batch"), model);
  for (const json& position : golden.at("forward").at("positions")) {
    model.positions.push_back(position[0].get<std::int64_t>() * model.seq_len + position[1].get<std::int64_t>());
  }
  model.loss_sums = golden.at("forward").at("loss_sum").get<std::vector<double>>();
  model.global_norm = golden.at("grad").at("global_norm");
  for (const auto& item : golden.at("train").items()) model.cases.push_back(read_case(item.key(), golden, model.architecture));
  for (const json& slice : golden.at("zero_gradient_slices")) {
    model.zero_gradients.push_back({model::canonical_tensor_name(model.architecture, slice[0]), slice[1], slice[2]});
  }

  const io::SafetensorsFile weights(folder / "model.safetensors"), reference(folder / "golden.safetensors");
  for (const io::TensorInfo& tensor : weights.tensors()) {
    const std::string name = model::canonical_tensor_name(model.architecture, tensor.name);
    if (!name.empty()) model.parameters[name] = values_of(weights, tensor);
  }
  for (const io::TensorInfo& tensor : reference.tensors()) {
    if (tensor.name.starts_with("batch.")) continue;
    model.reference[canonical_reference(model.architecture, tensor.name)] = values_of(reference, tensor);
  }
  return model;
}

}  // namespace spipe::test
