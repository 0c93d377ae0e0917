// A fixed set of worker threads for data-parallel loops. Work items are handed out by an atomic counter, so who computes
// an item depends on timing; results must not (DESIGN section 5: tiles are functions of the shape).
#pragma once

#include <cstdint>
#include <memory>

namespace spipe {

// A non-owning reference to a callable void(item, worker); no allocation.
class ItemFunction {
 public:
  template <typename F>
  ItemFunction(const F& f)  // NOLINT(google-explicit-constructor): call sites pass lambdas
      : object_(&f),
        call_([](const void* object, std::int64_t item, int worker) { (*static_cast<const F*>(object))(item, worker); }) {}
  void operator()(std::int64_t item, int worker) const { call_(object_, item, worker); }

 private:
  const void* object_;
  void (*call_)(const void*, std::int64_t, int);
};

class ThreadPool {
 public:
  // `threads` >= 1 counts the caller of parallel_for: threads - 1 workers are started. Idle workers spin for some
  // microseconds, then sleep. Sets OpenMP's thread count to 1 on each of its threads (libraries are called single-threaded).
  // `low_priority` lowers the workers' scheduling priority (update workers).
  explicit ThreadPool(int threads, bool low_priority = false);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] int threads() const;
  // Runs f(item, worker) for item in [0, items); worker in [0, threads()). Returns when all are done. One caller at a time
  // (a second concurrent caller waits). If an item throws, the rest are skipped and the first exception is rethrown here.
  void parallel_for(std::int64_t items, ItemFunction f);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace spipe
