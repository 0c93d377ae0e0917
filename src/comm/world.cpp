#include "spipe/comm/world.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

#include "collectives.h"
#include "comm_thread.h"
#include "control.h"
#include "environment.h"
#include "shared_memory.h"
#include "spipe/base/host.h"
#include "spipe/base/log.h"
#include "watch.h"

namespace spipe::comm {
namespace {

constexpr std::chrono::seconds kJoinPatience{30};
constexpr std::chrono::milliseconds kTellPatience{300};
constexpr std::chrono::milliseconds kLeavePatience{20};  // for those who were told to leave by themselves

// What each rank tells the others at the start. `machine` is equal for ranks that can share memory: the same kernel, the same
// process numbers, the same user.
struct Identity {
  std::array<char, 192> machine{};
  std::array<char, 256> name{};
  std::int32_t pid = 0, control_fd = -1, quota = 0, launcher_cpus = 0;
};

template <std::size_t N>
void put(std::array<char, N>& to, const std::string& text) {
  std::copy_n(text.data(), std::min(text.size(), N - 1), to.data());
}

std::string machine_key(const std::string& name, const LaunchFacts& facts) {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id") >> std::ws, boot);
  std::error_code none;
  const std::string processes = std::filesystem::read_symlink("/proc/self/ns/pid", none).string();
  const int fake = facts.local_size > 0 ? facts.local_rank * facts.fake_machines / facts.local_size : 0;
  return fmt::format("{}/{}/{}/{}", boot.empty() ? name : boot, processes, ::geteuid(), fake);
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown";
}

std::vector<std::byte> bytes_of(const Identity& identity, const std::vector<int>& mask) {
  std::vector<std::byte> bytes(sizeof(Identity) + mask.size() * sizeof(int));
  std::memcpy(bytes.data(), &identity, sizeof(Identity));
  if (!mask.empty()) std::memcpy(bytes.data() + sizeof(Identity), mask.data(), mask.size() * sizeof(int));
  return bytes;
}

std::pair<Identity, std::vector<int>> identity_of(const std::vector<std::byte>& bytes) {
  SPIPE_CHECK(bytes.size() >= sizeof(Identity), "a rank of another version of the program");
  Identity identity;
  std::memcpy(&identity, bytes.data(), sizeof(Identity));
  std::vector<int> mask((bytes.size() - sizeof(Identity)) / sizeof(int));
  if (!mask.empty()) std::memcpy(mask.data(), bytes.data() + sizeof(Identity), mask.size() * sizeof(int));
  return {identity, mask};
}

}  // namespace

struct World::Impl {
  LaunchFacts facts;
  std::vector<int> hosts_of_ranks;
  std::vector<std::vector<int>> ranks_of_hosts;
  std::vector<int> pids;
  std::vector<std::string> names;
  std::vector<int> machine_ranks, other_ranks;  // of this machine, of others
  CpuFacts cpus;                                // of this machine
  SharedMemory control_memory;
  std::unique_ptr<Watch> watch;      // none without a launcher
  std::unique_ptr<CommThread> comm;  // none for one rank
  ControlBlock alone;                // instead of the watch's
  bool finished = false;

  [[nodiscard]] ControlBlock& control() { return watch ? watch->control() : alone; }
  void start();
  void meet();
  void number_hosts(const std::vector<std::string>& machines);
  void share_control(const std::vector<Identity>& identities);
};

World::World() : World(launch_facts()) {}

World::World(const LaunchFacts& facts) : impl_(std::make_unique<Impl>()) {
  impl_->facts = facts;
  try {
    impl_->start();
    impl_->meet();
  } catch (const Error& error) {
    if (facts.size == 1) throw;
    impl_->watch->fail(error.what(), static_cast<int>(error.code()));  // one line for the whole job
  }
}

World::~World() {
  if (size() == 1 || impl_->finished) return;
  fail("the program left without finishing", ExitCode::kInternal);
}

void World::Impl::start() {
  if (facts.launcher != Launcher::none) {
    std::signal(SIGPIPE, SIG_IGN);  // output to a launcher that has died must not end us before we have said why
    catch_termination();
    const int launcher = ::getppid();
    const auto variables = [](const char* name) -> const char* { return std::getenv(name); };
    if (facts.size > 1) prepare_mpi_environment(facts);
    watch = std::make_unique<Watch>(Watch::Settings{.rank = facts.rank,
                                                    .launcher_pid = launcher > 1 ? launcher : 0,
                                                    .launcher_folder = session_folder(variables, launcher)});
  }
  if (facts.size > 1) {
    comm = std::make_unique<CommThread>([this](const std::string& cause, int code) { watch->heed_remote(cause, code); },
                                        [this](const std::string& what) {
                                          watch->fail(fmt::format("rank {}: {}", facts.rank, what),
                                                      static_cast<int>(ExitCode::kInternal));
                                        });
    for (int waited = 0; !comm->wait_until_up(kJoinPatience);) {
      waited += static_cast<int>(kJoinPatience.count());
      log_warning(
          fmt::format("rank {} still waits for other ranks to join after {} s: is one missing, or is the network wrong? "
                      "(Open MPI: --mca btl_tcp_if_include names the interface to use)",
                      facts.rank, waited));
    }
    int rank = 0, size = 0;
    comm->call([&](Transport& transport) {
      rank = transport.rank();
      size = transport.size();
    });
    if (rank == facts.rank && size == facts.size) return;
    throw Error(
        fmt::format("the launcher's variables say rank {} of {}, MPI says rank {} of {}", facts.rank, facts.size, rank, size),
        "environment", "start it with the mpirun of the MPI it was built with, and set none of its variables by hand");
  }
}

// Everybody's identity; from here on the machine's ranks share a control block and watch each other.
void World::Impl::meet() {
  Identity own;
  const std::string name = host_name();
  put(own.machine, machine_key(name, facts));
  put(own.name, name);
  own.pid = ::getpid();
  own.quota = cpu_quota().value_or(0);
  if (facts.launcher == Launcher::open_mpi) own.launcher_cpus = static_cast<int>(allowed_cpus(::getppid()).size());
  if (facts.size > 1) {
    control_memory = SharedMemory::create("spipe-control", ControlBlock::bytes(facts.size));
    own.control_fd = control_memory.fd();
  }
  std::vector<std::vector<std::byte>> blobs{bytes_of(own, allowed_cpus())};
  if (comm) {
    const std::vector<std::byte> mine = blobs.front();
    comm->call([&](Transport& transport) { blobs = comm::all_gather(transport, facts.size, mine); });
  }
  std::vector<Identity> identities;
  std::vector<std::string> machines;
  for (const std::vector<std::byte>& blob : blobs) {
    auto [identity, mask] = identity_of(blob);
    const int rank = static_cast<int>(identities.size());
    const bool here = std::strcmp(identity.machine.data(), own.machine.data()) == 0;
    (here ? machine_ranks : other_ranks).push_back(rank);
    if (here) cpus.masks.push_back(std::move(mask));
    pids.push_back(identity.pid);
    names.emplace_back(identity.name.data());
    machines.emplace_back(identity.machine.data());
    identities.push_back(identity);
  }
  if (own.quota > 0) cpus.quota = own.quota;
  cpus.launcher_cpus = own.launcher_cpus;
  if (facts.size > 1) share_control(identities);
  number_hosts(machines);
}

void World::Impl::number_hosts(const std::vector<std::string>& machines) {
  std::map<std::string, int> ranks_of_machine;
  for (const std::string& machine : machines) ++ranks_of_machine[machine];
  for (const auto& [machine, ranks] : ranks_of_machine) {
    if (facts.fake_hosts <= ranks) continue;
    throw Error(fmt::format("SPIPE_FAKE_HOSTS={} but a machine has {} rank{}", facts.fake_hosts, ranks, ranks == 1 ? "" : "s"),
                "environment");
  }
  std::map<std::string, int> seen;
  std::map<std::pair<std::string, int>, int> numbers;
  for (std::size_t rank = 0; rank < machines.size(); ++rank) {
    const std::string& machine = machines[rank];
    const int group = seen[machine]++ * facts.fake_hosts / ranks_of_machine[machine];
    const int host = numbers.emplace(std::pair(machine, group), static_cast<int>(numbers.size())).first->second;
    if (static_cast<std::size_t>(host) == ranks_of_hosts.size()) ranks_of_hosts.emplace_back();
    ranks_of_hosts[static_cast<std::size_t>(host)].push_back(static_cast<int>(rank));
    hosts_of_ranks.push_back(host);
  }
}

void World::Impl::share_control(const std::vector<Identity>& identities) {
  const Identity& first = identities[static_cast<std::size_t>(machine_ranks.front())];
  if (machine_ranks.front() != facts.rank) {
    control_memory = SharedMemory::open("spipe-control", first.pid, first.control_fd, ControlBlock::bytes(facts.size));
  }
  // Zero bytes are a block's initial state.
  auto* const block = reinterpret_cast<ControlBlock*>(control_memory.base());
  watch->join(block, [this](const std::string& cause, int code) {
    if (other_ranks.empty()) return;
    comm->transport().tell_abort(other_ranks, cause, code, kTellPatience);
    std::this_thread::sleep_for(kLeavePatience);
  });
  for (const int rank : machine_ranks) {
    if (rank != facts.rank) watch->add_peer(rank, pids[static_cast<std::size_t>(rank)]);
  }
  comm->call([](Transport& transport) { comm::barrier(transport); });
  control_memory.close_fd();
}

int World::rank() const { return impl_->facts.rank; }
int World::size() const { return impl_->facts.size; }
int World::hosts() const { return static_cast<int>(impl_->ranks_of_hosts.size()); }

int World::host_of(int rank) const {
  SPIPE_CHECK(rank >= 0 && rank < size(), "no such rank");
  return impl_->hosts_of_ranks[static_cast<std::size_t>(rank)];
}

const std::vector<int>& World::ranks_of_host(int host) const {
  SPIPE_CHECK(host >= 0 && host < hosts(), "no such host");
  return impl_->ranks_of_hosts[static_cast<std::size_t>(host)];
}

int World::local_rank() const {
  const std::vector<int>& ranks = ranks_of_host(host());
  return static_cast<int>(std::ranges::find(ranks, rank()) - ranks.begin());
}

int World::pid_of(int rank) const {
  SPIPE_CHECK(rank >= 0 && rank < size(), "no such rank");
  return impl_->pids[static_cast<std::size_t>(rank)];
}

const std::string& World::machine_name_of(int rank) const {
  SPIPE_CHECK(rank >= 0 && rank < size(), "no such rank");
  return impl_->names[static_cast<std::size_t>(rank)];
}

ThreadShare World::threads(std::optional<int> asked) const {
  const auto self = std::ranges::find(impl_->machine_ranks, rank());
  return share_threads(impl_->cpus, static_cast<int>(self - impl_->machine_ranks.begin()), asked);
}

void World::barrier() {
  if (size() > 1) impl_->comm->call([](Transport& transport) { comm::barrier(transport); });
}

std::vector<std::vector<std::byte>> World::all_gather(std::span<const std::byte> bytes) {
  std::vector<std::vector<std::byte>> parts;
  if (size() == 1) {
    parts.emplace_back(bytes.begin(), bytes.end());
  } else {
    impl_->comm->call([&](Transport& transport) { parts = comm::all_gather(transport, size(), bytes); });
  }
  return parts;
}

void World::broadcast(std::vector<std::byte>& bytes, int root) {
  SPIPE_CHECK(root >= 0 && root < size(), "no such rank");
  if (size() > 1) impl_->comm->call([&](Transport& transport) { comm::broadcast(transport, bytes, root); });
}

void World::send(const Message& message) {
  SPIPE_CHECK(message.peer >= 0 && message.peer < size() && message.peer != rank(), "a message needs another rank");
  impl_->comm->transport().submit(message, true);
}

void World::receive(const Message& message) {
  SPIPE_CHECK(message.peer >= 0 && message.peer < size() && message.peer != rank(), "a message needs another rank");
  impl_->comm->transport().submit(message, false);
}

Traffic World::traffic() const { return impl_->comm ? impl_->comm->transport().traffic() : Traffic{}; }

void World::fail(const std::string& cause, ExitCode code) {
  const std::string line = size() > 1 ? fmt::format("rank {}: {}", rank(), cause) : cause;
  if (impl_->watch) impl_->watch->fail(line, static_cast<int>(code));
  log_last_error(line);
  ::_exit(static_cast<int>(code));
}

void World::finish() {
  if (impl_->comm) {
    barrier();
    impl_->control().state(rank()).finished.store(1, std::memory_order_release);
    impl_->comm->finalize();
  }
  impl_->finished = true;
}

const std::atomic<std::uint32_t>* World::stop() const { return &impl_->control().stop; }

}  // namespace spipe::comm
