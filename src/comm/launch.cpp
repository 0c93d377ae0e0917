#include "spipe/comm/launch.h"

#include <fmt/core.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <map>

#include "spipe/base/error.h"

namespace spipe::comm {
namespace {

// A variable as a number >= `least`; nothing when it is not set.
std::optional<int> number(const Environment& environment, const char* name, int least) {
  const char* const text = environment(name);
  if (text == nullptr || *text == '\0') return std::nullopt;
  const std::string_view view(text);
  int value = 0;
  const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), value);
  if (error != std::errc{} || end != view.data() + view.size() || value < least) {
    throw Error(fmt::format("{}='{}' is not a number of {} or more", name, view, least), "environment");
  }
  return value;
}

LaunchFacts facts_of(const Environment& environment, Launcher launcher, const char* rank, const char* size,
                     const char* local_rank, const char* local_size) {
  LaunchFacts facts{.launcher = launcher,
                    .rank = number(environment, rank, 0).value_or(0),
                    .size = number(environment, size, 1).value_or(1),
                    .local_rank = number(environment, local_rank, 0).value_or(-1),
                    .local_size = number(environment, local_size, 1).value_or(-1)};
  if (facts.rank >= facts.size) {
    throw Error(fmt::format("{}={} but {}={}", rank, facts.rank, size, facts.size), "environment",
                "ranks count from 0: was a variable set by hand?");
  }
  return facts;
}

// Tasks on node `node` of Slurm's list, "4(x2),3": two nodes of 4, one of 3. -1 where the list does not say.
int slurm_tasks_of_node(std::string_view list, int node) {
  while (!list.empty()) {
    const std::string_view entry = list.substr(0, list.find(','));
    list.remove_prefix(std::min(list.size(), entry.size() + 1));
    int tasks = 0, nodes = 1;
    const char* const end = entry.data() + entry.size();
    const char* at = std::from_chars(entry.data(), end, tasks).ptr;
    if (std::string_view(at, end).starts_with("(x")) at = std::from_chars(at + 2, end, nodes).ptr + 1;
    if (at != end || tasks < 1 || nodes < 1) return -1;
    if (node < nodes) return tasks;
    node -= nodes;
  }
  return -1;
}

int slurm_local_size(const Environment& environment) {
  const char* const list = environment("SLURM_STEP_TASKS_PER_NODE");
  const std::optional<int> node = number(environment, "SLURM_NODEID", 0);
  return list == nullptr || !node ? -1 : slurm_tasks_of_node(list, *node);
}

}  // namespace

LaunchFacts launch_facts(const Environment& environment) {
  LaunchFacts facts;
  if (environment("OMPI_COMM_WORLD_RANK") != nullptr) {
    facts = facts_of(environment, Launcher::open_mpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE");
  } else if (environment("SLURM_STEP_ID") != nullptr && environment("SLURM_STEP_NUM_TASKS") != nullptr &&
             environment("SLURM_PROCID") != nullptr) {
    // A batch script has SLURM_PROCID too, but is no step: only srun's tasks are ranks.
    facts = facts_of(environment, Launcher::slurm, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
                     "SPIPE_NO_SUCH_VARIABLE");
    facts.local_size = slurm_local_size(environment);
    if (facts.size > 1 && environment("PMIX_RANK") == nullptr && environment("PMI_RANK") == nullptr) {
      throw Error(fmt::format("srun started {} tasks without MPI support", facts.size), "environment",
                  "use 'srun --mpi=pmix' ('srun --mpi=list' shows what this cluster has), or mpirun inside the allocation");
    }
  } else if (environment("PMI_RANK") != nullptr && environment("PMI_SIZE") != nullptr) {
    facts = facts_of(environment, Launcher::pmi, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS");
  }
  facts.fake_hosts = number(environment, "SPIPE_FAKE_HOSTS", 1).value_or(1);
  facts.fake_machines = number(environment, "SPIPE_FAKE_MACHINES", 1).value_or(1);
  return facts;
}

LaunchFacts launch_facts() {
  return launch_facts([](const char* name) -> const char* { return std::getenv(name); });
}

std::string launch_command(int ranks, std::string_view program, int cpus, bool root) {
  return fmt::format("mpirun -np {} --bind-to none{}{} {}", ranks, ranks > cpus ? " --oversubscribe" : "",
                     root ? " --allow-run-as-root" : "", program);
}

ThreadShare share_threads(const CpuFacts& facts, int self, std::optional<int> asked) {
  const int ranks = static_cast<int>(facts.masks.size());
  SPIPE_CHECK(self >= 0 && self < ranks, "no such rank on this machine");
  std::map<int, int> users;  // of each processor
  for (const auto& mask : facts.masks) {
    for (const int cpu : mask) ++users[cpu];
  }
  const std::vector<int>& own = facts.masks[static_cast<std::size_t>(self)];
  const int own_cpus = std::max(1, static_cast<int>(own.size()));
  double part = 0;
  for (const int cpu : own) part += 1.0 / users[cpu];
  // Sums of thirds fall just below whole numbers.
  int threads = static_cast<int>(part + 1e-6);
  if (facts.quota) threads = std::min(threads, *facts.quota / ranks);
  ThreadShare share{.threads = asked.value_or(std::max(1, threads)), .warnings = {}};
  const int usable = std::min(own_cpus, facts.quota.value_or(own_cpus));
  if (share.threads > usable) {
    const bool bound = own_cpus < facts.launcher_cpus;
    share.warnings.push_back(fmt::format(
        "{} threads asked for, but this rank may use {} processor{}{}", share.threads, usable, usable == 1 ? "" : "s",
        bound ? fmt::format("; start mpirun with --bind-to none or --map-by slot:PE={}", share.threads) : std::string{}));
  } else if (const int fair = facts.launcher_cpus / ranks; own_cpus < fair) {
    share.warnings.push_back(
        fmt::format("the launcher bound this rank to {} of {} processors, {} could be its part; start mpirun "
                    "with --bind-to none",
                    own_cpus, facts.launcher_cpus, fair));
  } else if (static_cast<std::size_t>(ranks) > users.size() && !users.empty()) {
    share.warnings.push_back(
        fmt::format("{} ranks share {} processor{} of this machine", ranks, users.size(), users.size() == 1 ? "" : "s"));
  }
  return share;
}

std::vector<int> allowed_cpus(int pid) {
  for (int cpus = 1024; cpus <= 1 << 20; cpus *= 2) {  // the kernel refuses masks smaller than its own
    cpu_set_t* const set = CPU_ALLOC(static_cast<std::size_t>(cpus));
    const std::size_t size = CPU_ALLOC_SIZE(static_cast<std::size_t>(cpus));
    const bool read = sched_getaffinity(pid, size, set) == 0;
    const int reason = errno;
    std::vector<int> found;
    for (int cpu = 0; read && cpu < cpus; ++cpu) {
      if (CPU_ISSET_S(static_cast<std::size_t>(cpu), size, set)) found.push_back(cpu);
    }
    CPU_FREE(set);
    if (read || reason != EINVAL) return found;
  }
  return {};
}

}  // namespace spipe::comm
