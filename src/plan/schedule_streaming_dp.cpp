// Streaming data parallelism: every rank streams every unit for its own micro-batches; gradients meet at each unit's home.
#include "assignment.h"

namespace spipe::plan {

Schedule streaming_dp_schedule() {
  return {
      .name = "streaming-dp", .fuse_last = true, .replicate = true, .assign = assign_along_the_ring, .order = order_by_stages};
}

}  // namespace spipe::plan
