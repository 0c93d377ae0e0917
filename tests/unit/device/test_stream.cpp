#include <pthread.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <ctime>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "spipe/device/device.h"

namespace spipe::device {
namespace {

using namespace std::chrono_literals;

struct Fixture {
  std::unique_ptr<Device> device = make_cpu_device({});
  ErrorCollector errors;
  std::unique_ptr<Stream> stream(const std::string& name) { return device->make_stream(name, errors); }
};

std::uint64_t cpu_microseconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1000000 + static_cast<std::uint64_t>(time.tv_nsec) / 1000;
}

}  // namespace

TEST_CASE_METHOD(Fixture, "commands of one stream run in order on one thread of their own") {
  const auto stream = this->stream("compute");
  std::vector<int> order;
  std::vector<std::thread::id> threads;
  for (int i = 0; i < 100; ++i) {
    stream->run([&, i](StreamHandle* handle) {
      order.push_back(handle != nullptr ? i : -1);
      threads.push_back(std::this_thread::get_id());
    });
  }
  stream->drain();
  REQUIRE(order.size() == 100);
  for (int i = 0; i < 100; ++i) {
    REQUIRE(order[i] == i);
    REQUIRE(threads[i] == threads[0]);
  }
  CHECK(threads[0] != std::this_thread::get_id());
}

TEST_CASE_METHOD(Fixture, "a stream's thread carries its name") {
  const auto stream = this->stream("h2d");
  char name[16] = {};
  stream->run([&](StreamHandle*) { pthread_getname_np(pthread_self(), name, sizeof name); });
  stream->drain();
  CHECK(std::string(name) == "h2d");
}

TEST_CASE_METHOD(Fixture, "later work waits for another stream's signal") {
  Counter ready;
  const auto producer = this->stream("producer");
  const auto consumer = this->stream("consumer");
  std::atomic<bool> produced{false};
  bool seen = false;
  consumer->wait(&ready, 3);
  consumer->run([&](StreamHandle*) { seen = produced; });
  producer->signal(&ready, 2);
  producer->run([&](StreamHandle*) {
    std::this_thread::sleep_for(5ms);
    produced = true;
  });
  producer->signal(&ready, 3);
  consumer->drain();
  CHECK(seen);
  CHECK(ready.value() == 3);
}

TEST_CASE_METHOD(Fixture, "a signal comes after the copy before it") {
  const std::size_t bytes = (std::size_t{9} << 20) + 13;  // several pieces and a rest
  std::vector<unsigned char> source(bytes), destination(bytes, 0);
  for (std::size_t i = 0; i < bytes; ++i) {
    source[i] = static_cast<unsigned char>(i * 31 + i / 257);
  }
  Counter done;
  const auto stream = this->stream("d2h");
  stream->copy(destination.data(), source.data(), bytes);
  stream->signal(&done, 1);
  REQUIRE(done.wait(1, errors.stop_flag()));
  CHECK(source == destination);
}

TEST_CASE_METHOD(Fixture, "drain returns at once when nothing is queued") {
  const auto stream = this->stream("idle");
  stream->drain();
  stream->drain();
  CHECK_FALSE(errors.failed());
}

TEST_CASE_METHOD(Fixture, "work may enqueue more work on its own stream") {
  const auto stream = this->stream("compute");
  Counter done;
  stream->run([&](StreamHandle*) { stream->run([&](StreamHandle*) { done.signal(1); }); });
  CHECK(done.wait_for(1, 10000));
}

TEST_CASE_METHOD(Fixture, "after an error the rest of every stream is dropped and drain returns") {
  const auto first = this->stream("first");
  const auto second = this->stream("second");
  Counter never, after;
  bool ran = false;
  second->wait(&never, 1);
  second->run([&](StreamHandle*) { ran = true; });
  first->run([](StreamHandle*) { throw std::runtime_error("task 7 failed"); });
  first->run([&](StreamHandle*) { ran = true; });
  first->signal(&after, 1);
  first->drain();
  second->drain();
  CHECK_FALSE(ran);
  CHECK(after.value() == 0);
  CHECK_FALSE(after.wait(1, errors.stop_flag()));
  CHECK_THROWS_WITH(errors.rethrow(), "task 7 failed");
}

TEST_CASE_METHOD(Fixture, "an error reported elsewhere ends a stream's wait within a moment") {
  const auto stream = this->stream("compute");
  Counter never;
  stream->wait(&never, 1);
  std::this_thread::sleep_for(30ms);  // asleep by now
  errors.report(std::make_exception_ptr(std::runtime_error("elsewhere")));
  const auto start = std::chrono::steady_clock::now();
  stream->drain();
  CHECK(std::chrono::steady_clock::now() - start < 2s);
}

TEST_CASE_METHOD(Fixture, "destroying a stream drops what has not begun, even behind a wait that never ends") {
  Counter never, begun;
  std::atomic<int> ran{0};
  const auto held = std::make_shared<int>(0);  // what queued work holds is freed
  {
    const auto stream = this->stream("doomed");
    stream->run([&](StreamHandle*) {
      begun.signal(1);
      std::this_thread::sleep_for(5ms);
      ++ran;
    });
    stream->wait(&never, 1);
    for (int i = 0; i < 100; ++i) {
      stream->run([&, held](StreamHandle*) { ++ran; });
    }
    begun.wait(1);
  }
  CHECK(ran == 1);  // what had begun was finished
  CHECK(held.use_count() == 1);
  CHECK_FALSE(errors.failed());
}

TEST_CASE_METHOD(Fixture, "idle and waiting streams sleep") {
  Counter never;
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < 8; ++i) {
    streams.push_back(this->stream("s" + std::to_string(i)));
    if (i % 2 == 0) {
      streams.back()->wait(&never, 1);
    }
  }
  std::this_thread::sleep_for(20ms);
  const std::uint64_t before = cpu_microseconds();
  std::this_thread::sleep_for(300ms);
  // Eight threads that spin would use the whole of two cores (600 ms).
  CHECK(cpu_microseconds() - before < 60000);
}

}  // namespace spipe::device
