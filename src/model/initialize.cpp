// Initial parameters: biases 0, norm weights 1, matrices and tables normal with the family's deviation.
#include <algorithm>
#include <cmath>
#include <span>

#include "spipe/base/file.h"
#include "spipe/base/random.h"
#include "spipe/model/layers.h"

namespace spipe::model {

namespace {

bool ends_with_any(const std::string& name, std::initializer_list<const char*> endings) {
  return std::any_of(endings.begin(), endings.end(), [&name](const char* ending) { return name.ends_with(ending); });
}

// What is added to the residual stream, in every family's names.
bool is_residual_projection(const std::string& name) {
  return ends_with_any(name, {".c_proj.weight", ".o_proj.weight", ".down_proj.weight", ".out_proj.weight", ".fc2.weight"});
}

double deviation_of(const Architecture& architecture, const Parameter& parameter) {
  const double residual_scale = 1.0 / std::sqrt(2.0 * static_cast<double>(architecture.layers));
  if (architecture.init == InitKind::family) {
    // GPT-2: residual projections start smaller, by the number of additions (2 per layer).
    const bool scaled = architecture.family == Family::gpt2 && parameter.name.ends_with(".c_proj.weight");
    return architecture.init_std * (scaled ? residual_scale : 1.0);
  }
  if (ends_with_any(parameter.name, {"wpe.weight", "embed_positions.weight"})) return architecture.init_std;
  if (ends_with_any(parameter.name, {"wte.weight", "embed_tokens.weight"})) {
    return architecture.tied_embeddings ? 1.0 / std::sqrt(static_cast<double>(architecture.hidden_size)) : 1.0;
  }
  const bool in_out = architecture.conv1d && parameter.name != "lm_head.weight";
  const double inputs = static_cast<double>(parameter.shape[in_out ? 0 : 1]);
  return (is_residual_projection(parameter.name) ? residual_scale : 1.0) / std::sqrt(inputs);
}

}  // namespace

void initialize_parameter(const Architecture& architecture, const Parameter& parameter, std::uint64_t seed, std::uint64_t first,
                          std::span<float> out) {
  if (parameter.shape.rank() < 2) {
    std::ranges::fill(out, parameter.name.ends_with(".bias") ? 0.0F : 1.0F);
    return;
  }
  const double deviation = deviation_of(architecture, parameter);
  const PhiloxKey key = make_key(seed, static_cast<std::uint64_t>(RandomPurpose::init));
  const std::uint64_t stream = hash64(std::as_bytes(std::span(parameter.name)));
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<float>(deviation * normal_at(key, stream, first + i));
}

}  // namespace spipe::model
