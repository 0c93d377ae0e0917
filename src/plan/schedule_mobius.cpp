// Mobius: all micro-batches through every stage, the backward of a stage on the rank of its forward, so the ring turns around.
// The last forward stage stays on its device as the first backward stage. With one stage a rank this is GPipe.
#include "assignment.h"

namespace spipe::plan {

Schedule mobius_schedule() {
  return {.name = "mobius", .same_cuts = true, .assign = assign_both_passes, .order = order_by_stages};
}

Schedule gpipe_schedule() {
  return {.name = "gpipe", .same_cuts = true, .stages_per_rank = 1, .assign = assign_both_passes, .order = order_by_stages};
}

}  // namespace spipe::plan
