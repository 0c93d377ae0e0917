#include "src/device/cpu/cpu_stream.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <utility>

#include "spipe/base/error.h"

namespace spipe::device {
namespace {

constexpr std::uint32_t kStopPollMilliseconds = 20;           // how late a sleeping wait notices an error of another stream
constexpr std::uint64_t kCopyPiece = std::uint64_t{4} << 20;  // how late a copy notices it

template <typename... Ts>
struct Overloaded : Ts... {
  using Ts::operator()...;
};
template <typename... Ts>
Overloaded(Ts...) -> Overloaded<Ts...>;

}  // namespace

CpuStream::CpuStream(std::string name, ErrorCollector& errors) : handle_{std::move(name)}, errors_(errors) {
  // Signals are the main thread's business.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::error_code failure;
  try {
    thread_ = std::thread([this] { loop(); });
  } catch (const std::system_error& error) {
    failure = error.code();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (failure) {
    throw Error("cannot start the thread of stream '" + handle_.name + "' (" + failure.message() + ")", "cpu device",
                "raise 'ulimit -u' or ask for fewer threads");
  }
}

CpuStream::~CpuStream() {
  {
    const std::lock_guard lock(mutex_);
    closing_.store(true, std::memory_order_release);
  }
  work_arrived_.notify_one();
  thread_.join();
}

void CpuStream::run(std::function<void(StreamHandle*)> work) { enqueue(Run{std::move(work)}); }

void CpuStream::wait(const Counter* counter, std::uint64_t value) { enqueue(Wait{counter, value}); }

void CpuStream::signal(Counter* counter, std::uint64_t value) { enqueue(Signal{counter, value}); }

void CpuStream::copy(void* destination, const void* source, std::uint64_t bytes) { enqueue(Copy{destination, source, bytes}); }

void CpuStream::drain() {
  SPIPE_CHECK(std::this_thread::get_id() != thread_.get_id(), "a stream cannot wait for itself");
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return queue_.empty() && !busy_; });
}

void CpuStream::enqueue(Command command) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(command));
  }
  work_arrived_.notify_one();
}

void CpuStream::loop() {
  pthread_setname_np(pthread_self(), handle_.name.substr(0, 15).c_str());
  std::unique_lock lock(mutex_);
  while (true) {
    work_arrived_.wait(lock, [this] { return !queue_.empty() || closing_.load(std::memory_order_relaxed); });
    if (closing_.load(std::memory_order_relaxed)) {
      break;
    }
    {
      Command command = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      lock.unlock();
      execute(command);
    }  // what the command holds is freed before the stream counts as idle
    lock.lock();
    busy_ = false;
    if (queue_.empty()) {
      idle_.notify_all();
    }
  }
  queue_.clear();
}

// After an error every command becomes nothing, so that queues drain at once and whoever waits for a signal leaves by the
// collector's stop flag.
void CpuStream::execute(Command& command) {
  if (stopping()) {
    return;
  }
  try {
    std::visit(
        Overloaded{[this](Run& run) { run.work(&handle_); },  //
                   [this](Wait& wait) { wait_or_stop(wait); }, [](Signal& signal) { signal.counter->signal(signal.value); },
                   [this](Copy& copy) { copy_or_stop(copy); }},
        command);
  } catch (...) {
    errors_.report(std::current_exception());
  }
}

void CpuStream::wait_or_stop(const Wait& wait) const {
  while (!wait.counter->reached(wait.value) && !stopping()) {
    wait.counter->wait_for(wait.value, kStopPollMilliseconds);
  }
}

void CpuStream::copy_or_stop(const Copy& copy) const {
  auto* destination = static_cast<std::byte*>(copy.destination);
  const auto* source = static_cast<const std::byte*>(copy.source);
  for (std::uint64_t done = 0; done < copy.bytes && !stopping(); done += kCopyPiece) {
    std::memcpy(destination + done, source + done, std::min(kCopyPiece, copy.bytes - done));
  }
}

}  // namespace spipe::device
