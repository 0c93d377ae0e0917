// What Open MPI must find in the environment before MPI_Init, and what it left there for us.
#pragma once

#include <string>

#include "spipe/comm/launch.h"

namespace spipe::comm {

// Our choices for Open MPI, never against the user's own: no shared-memory transport (its files outlive a killed job), and
// the loopback interface when all ranks run on one machine. Call before any thread is started.
void prepare_mpi_environment(const LaunchFacts& facts);
// `chosen` is the user's list of transports ("", "tcp,self", "^openib"): the same without shared memory.
[[nodiscard]] std::string without_shared_memory(const std::string& chosen);
// Open MPI's session folder below mpirun `launcher_pid`; empty unless it certainly is one.
[[nodiscard]] std::string session_folder(const Environment& environment, int launcher_pid);

}  // namespace spipe::comm
