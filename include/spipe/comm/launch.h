// How this process was started, and how the ranks of a machine divide its processors. Reads the environment and the kernel
// only: no MPI, so that a refusal can come before anything is started.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace spipe::comm {

enum class Launcher { none, open_mpi, slurm, pmi };

struct LaunchFacts {
  Launcher launcher = Launcher::none;
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;  // on this machine; -1 where the launcher does not say
  int fake_hosts = 1;                  // SPIPE_FAKE_HOSTS: the ranks of a machine act as so many hosts (tests)
  int fake_machines = 1;               // SPIPE_FAKE_MACHINES: as so many machines, which also end by messages only (tests)
};

using Environment = std::function<const char*(const char* name)>;  // null where a variable is not set
// Facts from Open MPI's, Slurm's or PMI's variables; a process started without a launcher is rank 0 of 1. Throws Error for
// variables that contradict each other, and for tasks that srun started without MPI support.
[[nodiscard]] LaunchFacts launch_facts(const Environment& environment);
[[nodiscard]] LaunchFacts launch_facts();  // of this process

// The command line that starts `ranks` ranks of `program`, as whoever asks (root needs a word more) on `cpus` processors.
[[nodiscard]] std::string launch_command(int ranks, std::string_view program, int cpus, bool root);

// What decides a rank's threads.
struct CpuFacts {
  std::vector<std::vector<int>> masks;  // per rank of the machine: the processors it may run on
  std::optional<int> quota;             // whole processors that the container's quota allows
  int launcher_cpus = 0;                // processors that the launcher itself may use; 0: unknown
};
struct ThreadShare {
  int threads = 1;
  std::vector<std::string> warnings;
};
// Threads of rank `self` of the machine: its part of every processor it shares, at least 1; or `asked`, with a warning when the
// processors cannot run that many at once.
[[nodiscard]] ThreadShare share_threads(const CpuFacts& facts, int self, std::optional<int> asked = std::nullopt);

[[nodiscard]] std::vector<int> allowed_cpus(int pid = 0);  // of a process, 0 = this one; empty when it cannot be read

}  // namespace spipe::comm
