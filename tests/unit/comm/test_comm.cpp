// What comm decides without any other process: the facts of a launch, the division of processors, Open MPI's environment,
// layouts of shared regions, who may name the first cause, and how a process ended.
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <csignal>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>

#include "control.h"
#include "environment.h"
#include "spipe/base/error.h"
#include "spipe/comm/launch.h"
#include "spipe/comm/region.h"
#include "spipe/comm/world.h"
#include "watch.h"

namespace comm = spipe::comm;
using Catch::Contains;

namespace {

comm::Environment fake(std::map<std::string, std::string> variables) {
  return [variables = std::move(variables)](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  };
}

}  // namespace

TEST_CASE("a process without a launcher is rank 0 of 1") {
  const comm::LaunchFacts facts = comm::launch_facts(fake({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}}));  // a batch script
  CHECK(facts.launcher == comm::Launcher::none);
  CHECK(facts.rank == 0);
  CHECK(facts.size == 1);
  CHECK(facts.fake_hosts == 1);
}

TEST_CASE("mpirun's, srun's and PMI's variables are understood") {
  const auto open_mpi = comm::launch_facts(fake({{"OMPI_COMM_WORLD_RANK", "5"},
                                                 {"OMPI_COMM_WORLD_SIZE", "8"},
                                                 {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                                 {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                                                 {"SPIPE_FAKE_HOSTS", "2"}}));
  CHECK(open_mpi.launcher == comm::Launcher::open_mpi);
  CHECK(open_mpi.rank == 5);
  CHECK(open_mpi.size == 8);
  CHECK(open_mpi.local_rank == 1);
  CHECK(open_mpi.local_size == 4);
  CHECK(open_mpi.fake_hosts == 2);
  const auto slurm = comm::launch_facts(
      fake({{"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_PROCID", "3"}, {"PMIX_RANK", "3"}}));
  CHECK(slurm.launcher == comm::Launcher::slurm);
  CHECK(slurm.rank == 3);
  CHECK(slurm.size == 4);
  CHECK(slurm.local_size == -1);
  const auto slurm_nodes = [](const char* tasks, const char* node) {
    return comm::launch_facts(fake({{"SLURM_STEP_ID", "0"},
                                    {"SLURM_STEP_NUM_TASKS", "11"},
                                    {"SLURM_STEP_TASKS_PER_NODE", tasks},
                                    {"SLURM_NODEID", node},
                                    {"SLURM_PROCID", "3"},
                                    {"PMIX_RANK", "3"}}))
        .local_size;
  };
  CHECK(slurm_nodes("11", "0") == 11);
  CHECK(slurm_nodes("4(x2),3", "1") == 4);
  CHECK(slurm_nodes("4(x2),3", "2") == 3);
  CHECK(slurm_nodes("4(x2),3", "3") == -1);  // no such node
  CHECK(slurm_nodes("4(x2", "0") == -1);
  CHECK(slurm_nodes("four", "0") == -1);
  const auto pmi = comm::launch_facts(fake({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}));
  CHECK(pmi.launcher == comm::Launcher::pmi);
  CHECK(pmi.rank == 1);
}

TEST_CASE("a launch that cannot work is refused with a way out") {
  CHECK_THROWS_WITH(comm::launch_facts(fake({{"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_PROCID", "3"}})),
                    Contains("srun started 4 tasks without MPI support") && Contains("--mpi=pmix"));
  CHECK_THROWS_WITH(comm::launch_facts(fake({{"OMPI_COMM_WORLD_RANK", "4"}, {"OMPI_COMM_WORLD_SIZE", "4"}})),
                    Contains("OMPI_COMM_WORLD_RANK=4 but OMPI_COMM_WORLD_SIZE=4"));
  for (const char* bad : {"0", "two", "-1", "2x"}) {
    CHECK_THROWS_WITH(comm::launch_facts(fake({{"SPIPE_FAKE_HOSTS", bad}})), Contains("SPIPE_FAKE_HOSTS='"));
  }
}

TEST_CASE("the command line for several ranks tells root and crowded machines what they need") {
  CHECK(comm::launch_command(2, "spipe-train run.yaml", 2, false) == "mpirun -np 2 --bind-to none spipe-train run.yaml");
  CHECK(comm::launch_command(4, "spipe-train run.yaml", 2, true) ==
        "mpirun -np 4 --bind-to none --oversubscribe --allow-run-as-root spipe-train run.yaml");
}

TEST_CASE("unbound ranks divide the processors of the machine") {
  const std::vector<int> all{0, 1, 2, 3, 4, 5, 6, 7};
  for (const int ranks : {1, 2, 3, 4, 8}) {
    const comm::CpuFacts facts{
        .masks = std::vector(static_cast<std::size_t>(ranks), all), .quota = std::nullopt, .launcher_cpus = 8};
    CHECK(comm::share_threads(facts, ranks - 1).threads == 8 / ranks);
    CHECK(comm::share_threads(facts, 0).warnings.empty());
  }
  const comm::CpuFacts crowded{.masks = std::vector(3, std::vector{0, 1}), .quota = std::nullopt, .launcher_cpus = 2};
  CHECK(comm::share_threads(crowded, 2).threads == 1);
  REQUIRE(comm::share_threads(crowded, 2).warnings.size() == 1);
  CHECK_THAT(comm::share_threads(crowded, 2).warnings[0], Contains("3 ranks share 2 processors"));
}

TEST_CASE("bound ranks keep their own processors, and binding to one core is told") {
  const comm::CpuFacts halves{.masks = {{0, 1, 2, 3}, {4, 5, 6, 7}}, .quota = std::nullopt, .launcher_cpus = 8};
  CHECK(comm::share_threads(halves, 1).threads == 4);
  CHECK(comm::share_threads(halves, 1).warnings.empty());
  const comm::CpuFacts cores{.masks = {{0}, {4}}, .quota = std::nullopt, .launcher_cpus = 8};
  CHECK(comm::share_threads(cores, 0).threads == 1);
  REQUIRE(comm::share_threads(cores, 0).warnings.size() == 1);
  CHECK_THAT(comm::share_threads(cores, 0).warnings[0], Contains("1 of 8 processors") && Contains("--bind-to none"));
  const comm::ThreadShare asked = comm::share_threads(cores, 0, 4);
  CHECK(asked.threads == 4);  // an explicit setting wins
  REQUIRE(asked.warnings.size() == 1);
  CHECK_THAT(asked.warnings[0], Contains("4 threads") && Contains("--map-by slot:PE=4"));
}

TEST_CASE("the container's quota bounds the sum of the ranks' threads") {
  const std::vector<int> all{0, 1, 2, 3, 4, 5, 6, 7};
  const comm::CpuFacts facts{.masks = {all, all}, .quota = 4, .launcher_cpus = 8};
  CHECK(comm::share_threads(facts, 0).threads == 2);
  const comm::CpuFacts tight{.masks = {all, all}, .quota = 1, .launcher_cpus = 8};
  CHECK(comm::share_threads(tight, 0).threads == 1);
}

TEST_CASE("Open MPI's shared-memory transport is excluded whatever the user chose") {
  CHECK(comm::without_shared_memory("") == "^vader,sm,uct,openib,ofi");
  CHECK(comm::without_shared_memory("^openib") == "^vader,sm,openib");
  CHECK(comm::without_shared_memory("^vader,tcp") == "^vader,sm,tcp");
  CHECK(comm::without_shared_memory("self,vader,tcp") == "self,tcp");
  CHECK(comm::without_shared_memory("vader,self") == "self,tcp");
  CHECK(comm::without_shared_memory("vader") == "tcp");
  CHECK(comm::without_shared_memory("self,openib") == "self,openib");
}

TEST_CASE("only Open MPI's own session folder of the launcher is ever removed") {
  const auto folder = [](const char* path) { return comm::session_folder(fake({{"PMIX_SERVER_TMPDIR", path}}), 77); };
  CHECK(folder("/tmp/ompi.host.0/pid.77") == "/tmp/ompi.host.0/pid.77");
  CHECK(folder("/tmp/ompi.host.0/pid.78").empty());
  CHECK(folder("/tmp/ompi.host.0").empty());
  CHECK(folder("/home/me/pid.77").empty());
  CHECK(folder("ompi.host.0/pid.77").empty());
  CHECK(comm::session_folder(fake({}), 77).empty());
}

TEST_CASE("parts of a region start at pages, in order, each on its own") {
  comm::RegionLayout layout;
  CHECK(layout.add_counters("events", 3) == 0);
  CHECK(layout.add("bytes", 4097) == 4096);
  CHECK(layout.add("empty", 0) == 3 * 4096);
  CHECK(layout.add("last", 1) == 3 * 4096);
  CHECK(layout.bytes() == 4 * 4096);
  CHECK(layout.find("bytes").bytes == 4097);
  CHECK_THROWS_AS(layout.add("bytes", 1), spipe::InternalError);
  CHECK_THROWS_AS(layout.find("none"), spipe::InternalError);
}

TEST_CASE("one process alone has a world, a region and its collectives, without MPI") {
  comm::World world(comm::LaunchFacts{});
  CHECK(world.size() == 1);
  CHECK(world.hosts() == 1);
  CHECK(world.local_rank() == 0);
  CHECK(world.pid_of(0) == ::getpid());
  CHECK(world.threads().threads >= 1);
  CHECK(world.stop()->load() == 0);
  world.barrier();
  const std::vector<std::byte> own(5, std::byte{1});
  CHECK(world.all_gather(own) == std::vector<std::vector<std::byte>>{own});
  comm::RegionLayout layout;
  layout.add_counters("events", 2);
  layout.add("bytes", 10);
  comm::HostRegion region(world, layout);
  REQUIRE(region.counters("events").size() == 2);
  region.counters("events")[1].signal(7);
  CHECK(region.counters("events")[1].value() == 7);
  CHECK(region.counters("events")[0].value() == 0);
  CHECK(region.bytes("bytes").size() == 10);
  CHECK_THROWS_AS(region.counters("bytes"), spipe::InternalError);
  CHECK_THROWS_AS(world.send({.peer = 0, .tag = 1}), spipe::InternalError);
  world.finish();
}

TEST_CASE("a region larger than the machine is refused before anything is taken") {
  comm::World world(comm::LaunchFacts{});
  comm::RegionLayout layout;
  layout.add("huge", std::uint64_t{1} << 50U);
  CHECK_THROWS_WITH(comm::HostRegion(world, layout), Contains("1125899906842624 bytes") && Contains("available"));
}

TEST_CASE("the first failure of a job is its cause, and a claimer that died without a word is replaced") {
  comm::ControlBlock block;
  CHECK(block.claim(3, "first", 2));
  CHECK_FALSE(block.claim(1, "second", 1));
  CHECK(block.cause_text() == "first");
  CHECK(block.code.load() == 2);
  CHECK(block.stop.load() == 1);
  CHECK_FALSE(block.claim_after(3, 1, "late", 1));  // the cause was told
  comm::ControlBlock mute;
  mute.claimed.store(3);  // rank 2 died here
  CHECK_FALSE(mute.claim(1, "second", 1));
  CHECK_FALSE(mute.claim_after(4, 1, "second", 1));
  CHECK(mute.claim_after(3, 1, "second", 1));
  CHECK(mute.cause_text() == "second");
  comm::ControlBlock wordy;
  CHECK(wordy.claim(1, std::string(5000, 'x'), 1));
  CHECK(wordy.cause_text().size() == comm::ControlBlock::kCauseBytes - 1);
}

TEST_CASE("how a process ended is known while it is unburied") {
  const auto child = [](int number, bool by_signal) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      if (by_signal) ::kill(::getpid(), number);
      ::_exit(number);
    }
    siginfo_t info;
    ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT);
    return pid;
  };
  const pid_t killed = child(SIGKILL, true);
  CHECK(comm::how_it_ended(killed, -1) == "was killed by signal 9");
  ::waitpid(killed, nullptr, 0);
  CHECK(comm::how_it_ended(killed, -1) == "died");  // buried, and nobody remembers
  const pid_t left = child(3, false);
  CHECK(comm::how_it_ended(left, -1) == "ended with code 3");
  ::waitpid(left, nullptr, 0);
}
