// optimizer.groups: a list of maps, so no one-value maker of key_makers.h fits.
#pragma once

#include "schema.h"

namespace spipe::config {

[[nodiscard]] Key groups_key();

}  // namespace spipe::config
