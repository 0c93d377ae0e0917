// Parameter groups: tensors, picked by their names, whose update has settings of its own.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spipe/model/shape.h"

namespace spipe::optim {

struct ParameterGroup {
  std::string pattern;                 // of Hugging Face names: * stands for any characters (dots too), ? for one
  std::optional<double> weight_decay;  // of all its tensors, vectors too; unset: the run's, on matrices
  double lr_scale = 1;                 // times the learning rate, of the step and of the decay
  bool frozen = false;                 // never updated; its gradient counts neither in the norm nor as non-finite
};

// What decides the update of a tensor beside the run's settings; neighbours with equal ones are updated together.
struct ParameterRule {
  double weight_decay = 0, lr_scale = 1;
  bool frozen = false;
  bool operator==(const ParameterRule&) const = default;
};

[[nodiscard]] bool name_matches(std::string_view pattern, std::string_view name);

// Sets the group of every parameter of the shape: the first one whose pattern matches its name. Throws Error (exit code 2, at
// `where`) for a group that gets no tensor, and when nothing is left to train.
void assign_groups(model::ModelShape& shape, std::span<const ParameterGroup> groups, const std::string& where);

// `weight_decay`: the run's.
[[nodiscard]] ParameterRule rule_of(const model::Parameter& parameter, std::span<const ParameterGroup> groups,
                                    double weight_decay);
[[nodiscard]] inline bool is_frozen(const model::Parameter& parameter, std::span<const ParameterGroup> groups) {
  return parameter.group >= 0 && groups[static_cast<std::size_t>(parameter.group)].frozen;
}
[[nodiscard]] bool has_frozen(const model::StoreUnit& unit, std::span<const ParameterGroup> groups);

// The settings of a group, as in "weight decay 0.1, lr x 0.5" or "frozen"; of the numerics block and the start-up table.
[[nodiscard]] std::string settings_text(const ParameterGroup& group);

}  // namespace spipe::optim
