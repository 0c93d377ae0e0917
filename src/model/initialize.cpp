// Initial parameters: biases 0, norm weights 1, matrices and tables normal with the family's deviation.
#include <algorithm>
#include <cmath>
#include <span>

#include "spipe/base/file.h"
#include "spipe/base/random.h"
#include "spipe/model/layers.h"

namespace spipe::model {

void initialize_parameter(const Architecture& architecture, const Parameter& parameter, std::uint64_t seed, float* out) {
  const std::uint64_t elements = parameter.elements();
  if (parameter.shape.rank() < 2) {
    std::fill_n(out, elements, parameter.name.ends_with(".bias") ? 0.0F : 1.0F);
    return;
  }
  double deviation = architecture.init_std;
  // GPT-2: what is added to the residual stream starts smaller, by the number of additions (2 per layer).
  if (architecture.family == Family::gpt2 && parameter.name.ends_with(".c_proj.weight")) {
    deviation /= std::sqrt(2.0 * static_cast<double>(architecture.layers));
  }
  const PhiloxKey key = make_key(seed, static_cast<std::uint64_t>(RandomPurpose::init));
  const std::uint64_t stream = hash64(std::as_bytes(std::span(parameter.name)));
  for (std::uint64_t i = 0; i < elements; ++i) out[i] = static_cast<float>(deviation * normal_at(key, stream, i));
}

}  // namespace spipe::model
