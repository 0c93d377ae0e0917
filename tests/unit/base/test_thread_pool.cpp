#include <dlfcn.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <numeric>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "spipe/base/error.h"
#include "spipe/base/thread_pool.h"

using namespace spipe;

TEST_CASE("every item runs once, by a worker in range") {
  for (const int threads : {1, 2, 3, 7}) {
    ThreadPool pool(threads);
    CHECK(pool.threads() == threads);
    for (const std::int64_t items : {0, 1, 2, 5, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(items));
      std::atomic<bool> in_range{true};
      pool.parallel_for(items, [&](std::int64_t item, int worker) {
        ++runs.at(static_cast<std::size_t>(item));
        if (worker < 0 || worker >= threads) in_range = false;
      });
      int total = 0;
      for (const auto& count : runs) total += count == 1 ? 1 : -1000;
      CHECK(total == items);
      CHECK(in_range);
    }
  }
}

TEST_CASE("one thread means the caller's, in order") {
  ThreadPool pool(1);
  const auto caller = std::this_thread::get_id();
  std::vector<std::int64_t> order;
  pool.parallel_for(5, [&](std::int64_t item, int) {
    CHECK(std::this_thread::get_id() == caller);
    order.push_back(item);
  });
  CHECK(order == std::vector<std::int64_t>{0, 1, 2, 3, 4});
}

TEST_CASE("all threads of a pool take part, each under one worker number") {
  ThreadPool pool(3);
  std::atomic<int> arrived{0};
  std::array<std::thread::id, 3> ids;
  // Each item waits for all three, so no thread can take two.
  pool.parallel_for(3, [&](std::int64_t, int worker) {
    ids.at(static_cast<std::size_t>(worker)) = std::this_thread::get_id();
    ++arrived;
    while (arrived < 3) std::this_thread::yield();
  });
  CHECK(std::set<std::thread::id>(ids.begin(), ids.end()).size() == 3);
  CHECK(ids[0] == std::this_thread::get_id());
}

TEST_CASE("thousands of small loops in a row, with sleeps between, all complete") {
  ThreadPool pool(3);
  std::int64_t sum = 0;
  for (int turn = 0; turn < 3000; ++turn) {
    std::array<std::int64_t, 4> parts{};
    pool.parallel_for(4, [&](std::int64_t item, int) { parts.at(static_cast<std::size_t>(item)) = item + turn; });
    sum += std::accumulate(parts.begin(), parts.end(), std::int64_t{0});
    if (turn % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  CHECK(sum == 4 * (2999LL * 3000 / 2) + 6 * 3000);
}

TEST_CASE("the first exception comes back to the caller, the rest is skipped, and the pool lives on") {
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    for (int turn = 0; turn < 20; ++turn) {
      std::atomic<std::int64_t> ran{0};
      CHECK_THROWS_WITH(pool.parallel_for(1'000'000,
                                          [&](std::int64_t item, int) {
                                            ++ran;
                                            if (item == 10) throw std::runtime_error("item 10");
                                          }),
                        "item 10");
      // How many others run meanwhile is a matter of timing.
      if (threads == 1) CHECK(ran == 11);
      std::atomic<int> after{0};
      pool.parallel_for(100, [&](std::int64_t, int) { ++after; });
      CHECK(after == 100);
    }
  }
}

TEST_CASE("an item must not start a loop, on any pool") {
  ThreadPool single(1), pool(2);
  CHECK_THROWS_AS(pool.parallel_for(2, [&](std::int64_t, int) { pool.parallel_for(2, [](std::int64_t, int) {}); }),
                  InternalError);
  CHECK_THROWS_AS(single.parallel_for(1, [&](std::int64_t, int) { single.parallel_for(1, [](std::int64_t, int) {}); }),
                  InternalError);
  CHECK_THROWS_AS(pool.parallel_for(2, [&](std::int64_t, int) { single.parallel_for(2, [](std::int64_t, int) {}); }),
                  InternalError);
  int ran = 0;
  single.parallel_for(1, [&](std::int64_t, int) { ++ran; });  // usable again after the refusals
  CHECK(ran == 1);
}

TEST_CASE("concurrent callers take turns") {
  ThreadPool pool(2);
  std::array<std::atomic<int>, 2> inside{};
  std::atomic<bool> overlapped{false};
  std::atomic<std::int64_t> total{0};
  const auto call = [&](std::size_t me) {
    for (int turn = 0; turn < 200; ++turn) {
      pool.parallel_for(2, [&](std::int64_t, int) {
        ++inside.at(me);
        if (inside.at(1 - me) != 0) overlapped = true;
        std::this_thread::yield();
        ++total;
        --inside.at(me);
      });
    }
  };
  std::thread first(call, 0), second(call, 1);
  first.join();
  second.join();
  CHECK(total == 800);
  CHECK_FALSE(overlapped);
}

TEST_CASE("pools with low priority work too, and idle pools end") {
  std::atomic<int> ran{0};
  {
    ThreadPool pool(2, true);
    pool.parallel_for(10, [&](std::int64_t, int) { ++ran; });
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  { const ThreadPool never_used(3); }
  CHECK(ran == 10);
}

TEST_CASE("OpenMP, where a process has it, is single-threaded on every thread of a pool") {
  void* openmp = dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (openmp == nullptr) {
    WARN("libgomp.so.1 is not here: not tested");
    return;
  }
  const auto max_threads = reinterpret_cast<int (*)()>(dlsym(openmp, "omp_get_max_threads"));
  const auto set_threads = reinterpret_cast<void (*)(int)>(dlsym(openmp, "omp_set_num_threads"));
  REQUIRE(max_threads != nullptr);
  REQUIRE(set_threads != nullptr);
  set_threads(5);
  std::array<std::atomic<int>, 2> seen{};
  std::thread caller([&] {  // a thread that has called no pool before
    ThreadPool pool(2);
    std::atomic<int> arrived{0};
    pool.parallel_for(2, [&](std::int64_t, int worker) {
      seen.at(static_cast<std::size_t>(worker)) = max_threads();
      ++arrived;
      while (arrived < 2) std::this_thread::yield();
    });
  });
  caller.join();
  CHECK(seen[0] == 1);
  CHECK(seen[1] == 1);
}
