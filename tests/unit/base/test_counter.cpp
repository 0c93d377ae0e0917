#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <new>
#include <thread>

#include "spipe/base/counter.h"

using namespace spipe;
using Clock = std::chrono::steady_clock;

namespace {

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }
void sleep_ms(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

}  // namespace

TEST_CASE("a counter only rises") {
  Counter counter;
  CHECK(counter.value() == 0);
  counter.signal(5);
  counter.signal(3);
  CHECK(counter.value() == 5);
  CHECK(counter.reached(5));
  CHECK_FALSE(counter.reached(6));
  CHECK(counter.wait(4));
}

TEST_CASE("a sleeper wakes when its value comes, not before") {
  Counter counter;
  std::atomic<bool> woke{false};
  std::thread sleeper([&] { woke = counter.wait(2); });
  counter.signal(1);
  sleep_ms(20);
  CHECK_FALSE(woke);
  counter.signal(2);
  sleeper.join();
  CHECK(woke);
}

TEST_CASE("a stop flag ends a wait soon") {
  const Counter counter;
  std::atomic<std::uint32_t> stop{0};
  bool reached = true;
  std::thread sleeper([&] { reached = counter.wait(1, &stop); });
  sleep_ms(5);
  const auto start = Clock::now();
  stop = 1;
  sleeper.join();
  CHECK_FALSE(reached);
  CHECK(seconds_since(start) < 5);  // 50 ms, on a loaded machine more
}

TEST_CASE("a deadline ends a wait, not early") {
  Counter counter;
  const auto start = Clock::now();
  CHECK_FALSE(counter.wait_for(1, 30));
  CHECK(seconds_since(start) >= 0.029);
  counter.signal(1);
  CHECK(counter.wait_for(1, 0));
}

TEST_CASE("values around 2^32 wake sleepers though the futex sees the low half only") {
  Counter counter;
  counter.signal(1);
  std::thread sleeper([&] { counter.wait((std::uint64_t{1} << 32) + 1); });
  sleep_ms(5);
  counter.signal((std::uint64_t{1} << 32) + 1);  // same low half
  sleeper.join();
  CHECK(counter.value() == (std::uint64_t{1} << 32) + 1);
}

TEST_CASE("two threads hand each other thousands of turns without losing a wake-up") {
  Counter ping, pong;
  constexpr std::uint64_t kTurns = 5000;
  const auto start = Clock::now();
  std::thread other([&] {
    for (std::uint64_t turn = 1; turn <= kTurns; ++turn) {
      ping.wait(turn);
      pong.signal(turn);
    }
  });
  for (std::uint64_t turn = 1; turn <= kTurns; ++turn) {
    ping.signal(turn);
    pong.wait(turn);
  }
  other.join();
  CHECK(seconds_since(start) < 60);  // one lost wake-up in ten would cost 25 s more
}

TEST_CASE("counters work between processes in shared memory") {
  void* memory = mmap(nullptr, 2 * sizeof(Counter), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  auto* counters = static_cast<Counter*>(memory);
  auto* request = new (&counters[0]) Counter;
  auto* reply = new (&counters[1]) Counter;
  const pid_t child = fork();
  if (child == 0) {
    const bool got = request->wait_for(1, 20'000);
    usleep(20'000);  // lets the parent fall asleep
    if (got) reply->signal(7);
    _exit(got ? 0 : 1);
  }
  request->signal(1);
  CHECK(reply->wait_for(7, 20'000));
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
  munmap(memory, 2 * sizeof(Counter));
}
