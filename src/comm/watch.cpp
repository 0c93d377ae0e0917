#include "watch.h"

#include <fmt/core.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <utility>

#include "spipe/base/error.h"
#include "spipe/base/log.h"
#include "threads.h"

namespace spipe::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kLookEveryMs = 20;               // at the stop word
constexpr milliseconds kClaimPatience{200};    // from another's claim to its cause
constexpr milliseconds kSilencePatience{100};  // for the machine's other ranks to fall silent
constexpr milliseconds kPrintPatience{600};    // for the cause to be printed and told to other machines
constexpr milliseconds kPeerPatience{500};     // for the machine's other ranks to leave before they are killed
constexpr unsigned kLastResortSeconds = 3;     // an ending that hangs itself is ended by SIGALRM
constexpr const char* kResume = "; run again with --resume to go on from the last checkpoint";

constexpr milliseconds kTerminationPatience{500};  // from SIGTERM to an end without a better cause

std::atomic<bool> terminated{false};
static_assert(std::atomic<bool>::is_always_lock_free, "the handler needs a lock-free flag");

void on_termination(int /*number*/) { terminated.store(true, std::memory_order_relaxed); }

void send_kill(int pid, int pidfd) {
  if (pidfd >= 0) {
    (void)::syscall(SYS_pidfd_send_signal, pidfd, SIGKILL, nullptr, 0);
  } else {
    (void)::kill(pid, SIGKILL);
  }
}

// Open MPI's session folder of one mpirun, and the folder above it once that is empty.
void remove_launcher_folder(const std::string& folder) {
  if (folder.empty()) return;
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  std::filesystem::remove(std::filesystem::path(folder).parent_path(), ignored);
}

}  // namespace

void catch_termination() {
  struct sigaction action = {};
  if (::sigaction(SIGTERM, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = on_termination;
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGTERM, &action, nullptr);
}

Watch::Watch(Settings settings)
    : settings_(std::move(settings)), control_(nullptr), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  SPIPE_CHECK(wake_ >= 0, "no eventfd");
  control_.store(&own_, std::memory_order_release);
  if (settings_.launcher_pid > 0) processes_.push_back(open_process(-1, settings_.launcher_pid));
  thread_ = std::thread([this] { run(); });
}

Watch::~Watch() {
  leaving_.store(true, std::memory_order_release);
  wake();
  thread_.join();
  for (const Process& process : processes_) {
    if (process.fd >= 0) ::close(process.fd);
  }
  ::close(wake_);
}

Watch::Process Watch::open_process(int rank, int pid) {
  const int fd = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  return {.rank = rank, .pid = pid, .fd = fd, .gone = false};
}

bool Watch::has_ended(const Process& process) {
  if (process.fd < 0) return ::kill(process.pid, 0) != 0 && errno == ESRCH;
  pollfd entry{.fd = process.fd, .events = POLLIN, .revents = 0};
  return ::poll(&entry, 1, 0) > 0;
}

void Watch::join(ControlBlock* control, std::function<void(const std::string&, int)> relay) {
  const std::lock_guard<std::mutex> guard(lock_);
  relay_ = std::move(relay);
  control_.store(control, std::memory_order_release);
}

void Watch::add_peer(int rank, int pid) {
  {
    const std::lock_guard<std::mutex> guard(lock_);
    processes_.push_back(open_process(rank, pid));
  }
  wake();
}

void Watch::wake() {
  const std::uint64_t one = 1;
  (void)!::write(wake_, &one, sizeof(one));
}

void Watch::heed_remote(const std::string& cause, int code) {
  ControlBlock& block = control();
  block.claim(ControlBlock::kRemote, cause, code);
  wake();
}

void Watch::fail(const std::string& cause, int code) {
  control().claim(static_cast<std::uint32_t>(settings_.rank) + 1, cause, code);
  wake();
  for (;;) ::pause();
}

void Watch::run() {
  name_thread_and_block_signals("spipe-watch");
  while (!leaving_.load(std::memory_order_acquire)) {
    if (control().stop.load(std::memory_order_acquire) != 0) end_process();
    heed_termination();
    if (look()) wait_for_event();
  }
}

void Watch::heed_termination() {
  if (!terminated.load(std::memory_order_relaxed)) return;
  if (terminated_at_ == Clock::time_point{}) terminated_at_ = Clock::now();
  if (Clock::now() - terminated_at_ < kTerminationPatience) return;
  control().claim(static_cast<std::uint32_t>(settings_.rank) + 1,
                  fmt::format("rank {} (pid {}) was asked to end by signal {}{}", settings_.rank, ::getpid(), SIGTERM, kResume),
                  128 + SIGTERM);
}

bool Watch::look() {
  std::vector<Process> ended;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    for (Process& process : processes_) {
      if (process.gone || !has_ended(process)) continue;
      process.gone = true;
      ended.push_back(process);
    }
  }
  for (const Process& process : ended) on_death(process);
  return ended.empty();
}

void Watch::wait_for_event() {
  std::vector<pollfd> entries{{.fd = wake_, .events = POLLIN, .revents = 0}};
  {
    const std::lock_guard<std::mutex> guard(lock_);
    for (const Process& process : processes_) {
      if (process.fd >= 0 && !process.gone) entries.push_back({.fd = process.fd, .events = POLLIN, .revents = 0});
    }
  }
  (void)::poll(entries.data(), entries.size(), kLookEveryMs);
  std::uint64_t count = 0;
  (void)!::read(wake_, &count, sizeof(count));
}

void Watch::on_death(const Process& process) {
  ControlBlock& block = control();
  const bool launcher = process.rank < 0;
  if (!launcher && block.state(process.rank).finished.load(std::memory_order_acquire) != 0) return;
  if (launcher) remove_launcher_folder(settings_.launcher_folder);  // first: the launcher's library may end us soon
  const std::string who =
      launcher ? fmt::format("the launcher (pid {})", process.pid) : fmt::format("rank {} (pid {})", process.rank, process.pid);
  const std::string cause = fmt::format("{} {}{}", who, how_it_ended(process.pid, process.fd), kResume);
  const auto me = static_cast<std::uint32_t>(settings_.rank) + 1;
  const int code = static_cast<int>(ExitCode::kInternal);
  if (block.claim(me, cause, code)) return;
  // Somebody claimed before. Usually the cause follows at once; a claimer that died in between is replaced.
  const Clock::time_point deadline = Clock::now() + kClaimPatience;
  while (block.stop.load(std::memory_order_acquire) == 0 && Clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  if (!launcher) block.claim_after(static_cast<std::uint32_t>(process.rank) + 1, me, cause, code);
}

std::vector<Watch::Process> Watch::peers() {
  std::vector<Process> others;
  const std::lock_guard<std::mutex> guard(lock_);
  for (const Process& process : processes_) {
    if (process.rank >= 0) others.push_back(process);
  }
  return others;
}

// A launcher that sees a rank end kills the others within milliseconds. So everybody falls silent first, the cause is printed,
// and only then they leave.
void Watch::print_last(const std::string& cause) {
  ControlBlock& block = control();
  const std::vector<Process> others = peers();
  const auto silent = [&](const Process& process) { return block.state(process.rank).silent != 0 || has_ended(process); };
  const Clock::time_point deadline = Clock::now() + kSilencePatience;
  while (!std::ranges::all_of(others, silent) && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  log_last_error(cause);
}

// Helps those of this machine's ranks that cannot end themselves (stopped, or without a watch thread that runs).
void Watch::outlive_peers() {
  const std::vector<Process> others = peers();
  const Clock::time_point deadline = Clock::now() + kPeerPatience;
  while (!std::ranges::all_of(others, has_ended) && Clock::now() < deadline) std::this_thread::sleep_for(milliseconds(2));
  for (const Process& process : others) {
    if (!has_ended(process)) send_kill(process.pid, process.fd);
  }
}

void Watch::end_process() {
  // Whatever hangs below (a full pipe, a lock held by a stopped thread) must not keep the process.
  sigset_t alarm_only;
  sigemptyset(&alarm_only);
  sigaddset(&alarm_only, SIGALRM);
  ::signal(SIGALRM, SIG_DFL);
  ::pthread_sigmask(SIG_UNBLOCK, &alarm_only, nullptr);
  ::alarm(kLastResortSeconds);
  ControlBlock& block = control();
  const int code = block.code.load(std::memory_order_relaxed);
  const std::uint32_t owner = block.claimed.load(std::memory_order_acquire);
  if (owner == static_cast<std::uint32_t>(settings_.rank) + 1) {
    const std::string cause = block.cause_text();
    print_last(cause);
    if (relay_) relay_(cause, code);  // while the launcher sees nothing yet, and so disturbs nobody
    block.printed.store(1, std::memory_order_release);
    outlive_peers();
  } else if (owner == ControlBlock::kRemote) {
    close_log();
  } else {
    close_log();
    if (&block != &own_) block.state(settings_.rank).silent.store(1, std::memory_order_release);
    const Clock::time_point deadline = Clock::now() + kPrintPatience;
    while (block.printed.load(std::memory_order_acquire) == 0 && Clock::now() < deadline) {
      std::this_thread::sleep_for(milliseconds(1));
    }
  }
  ::_exit(code != 0 ? code : static_cast<int>(ExitCode::kInternal));
}

}  // namespace spipe::comm
