#pragma once

namespace spipe::comm {

// Throws Error with MPI's own words when `status` is not success.
void check_mpi(int status, const char* call);

}  // namespace spipe::comm
