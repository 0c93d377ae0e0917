// RoundPipe: stages go round robin over the ranks; the last units run forward only inside the first backward stage.
#include "assignment.h"

namespace spipe::plan {

Schedule roundpipe_schedule() {
  return {.name = "roundpipe", .fuse_last = true, .assign = assign_along_the_ring, .order = order_by_stages};
}

}  // namespace spipe::plan
