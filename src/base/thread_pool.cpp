#include "spipe/base/thread_pool.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "spipe/base/counter.h"
#include "spipe/base/error.h"

namespace spipe {
namespace {

// True on a thread that is inside an item of any pool.
thread_local bool in_item = false;

// OpenMP, when some library brought it into the process, must not start threads of its own from ours. Base does not link it.
void make_openmp_single_threaded() {
  thread_local bool done = false;
  if (done) return;
  done = true;
  using SetThreads = void (*)(int);
  const auto set_threads = reinterpret_cast<SetThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (set_threads != nullptr) set_threads(1);
}

constexpr int kLowPriorityNice = 10;

}  // namespace

struct ThreadPool::Impl {
  Counter generation, finished;  // a job is given out; its workers are done
  int count = 1;
  std::mutex caller;  // one parallel_for at a time

  // The job, written by the caller before it raises `generation`, read by workers after they saw it.
  const ItemFunction* function = nullptr;
  std::int64_t items = 0;
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  std::atomic<int> busy{0};  // workers that have not finished this generation
  bool stop = false;

  std::vector<std::thread> workers;

  void run_items(int worker) noexcept {
    in_item = true;
    while (!failed.load(std::memory_order_relaxed)) {
      const std::int64_t item = next.fetch_add(1, std::memory_order_relaxed);
      if (item >= items) break;
      try {
        (*function)(item, worker);
      } catch (...) {
        if (!failed.exchange(true, std::memory_order_acq_rel)) error = std::current_exception();
      }
    }
    in_item = false;
  }

  void work(int worker, bool low_priority) {
    pthread_setname_np(pthread_self(), ("pool-" + std::to_string(worker)).c_str());
    if (low_priority) setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kLowPriorityNice);
    make_openmp_single_threaded();
    for (std::uint64_t turn = 1;; ++turn) {
      generation.wait(turn);
      if (stop) return;
      run_items(worker);
      if (busy.fetch_sub(1, std::memory_order_acq_rel) == 1) finished.signal(turn);
    }
  }

  void end() {
    stop = true;
    generation.signal(generation.value() + 1);
    for (std::thread& thread : workers) thread.join();
  }
};

ThreadPool::ThreadPool(int threads, bool low_priority) : impl_(std::make_unique<Impl>()) {
  SPIPE_CHECK(threads >= 1, "a thread pool needs at least one thread");
  impl_->count = threads;
  // Signals are the main thread's business.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::optional<std::string> failure;
  try {
    for (int worker = 1; worker < threads; ++worker) {
      impl_->workers.emplace_back([impl = impl_.get(), worker, low_priority] { impl->work(worker, low_priority); });
    }
  } catch (const std::exception& error) {
    failure = error.what();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (failure) {
    const std::size_t started = impl_->workers.size();
    impl_->end();
    throw Error(
        "cannot start " + std::to_string(threads) + " threads: only " + std::to_string(started + 1) + " run (" + *failure + ")",
        {}, "raise 'ulimit -u' or ask for fewer threads");
  }
}

ThreadPool::~ThreadPool() { impl_->end(); }

int ThreadPool::threads() const { return impl_->count; }

void ThreadPool::parallel_for(std::int64_t items, ItemFunction f) {
  SPIPE_CHECK(!in_item, "parallel_for inside an item of a parallel_for");
  if (items <= 0) return;
  make_openmp_single_threaded();
  Impl& pool = *impl_;
  const std::lock_guard<std::mutex> lock(pool.caller);
  pool.function = &f;
  pool.items = items;
  pool.next.store(0, std::memory_order_relaxed);
  pool.failed.store(false, std::memory_order_relaxed);
  if (pool.count == 1 || items == 1) {
    pool.run_items(0);
  } else {
    pool.busy.store(pool.count - 1, std::memory_order_relaxed);
    const std::uint64_t turn = pool.generation.value() + 1;
    pool.generation.signal(turn);
    pool.run_items(0);
    pool.finished.wait(turn);
  }
  if (pool.failed.load(std::memory_order_relaxed)) std::rethrow_exception(std::exchange(pool.error, nullptr));
}

}  // namespace spipe
