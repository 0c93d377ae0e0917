// SPipe: forward and backward stages are cut and placed independently. Both passes walk the ring in one direction, so the rank
// that ends its forward first is the one that starts the backward, and the turn costs no bubble.
#include "assignment.h"

namespace spipe::plan {

Schedule spipe_schedule() { return {.name = "spipe", .assign = assign_along_the_ring, .order = order_by_stages}; }

}  // namespace spipe::plan
