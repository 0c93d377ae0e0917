// A rank of the tests that need real processes: `test_rank MODE [argument]` under mpirun. Prints one line per finding; ends
// with 0 only when all of its own checks held.
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <exception>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "spipe/base/log.h"
#include "spipe/comm/region.h"
#include "spipe/comm/world.h"

namespace {

using spipe::Counter;
using spipe::comm::After;
using spipe::comm::HostRegion;
using spipe::comm::RegionLayout;
using spipe::comm::World;
using std::chrono::milliseconds;

void say(const std::string& line) {
  const std::string text = line + "\n";
  (void)!::write(STDOUT_FILENO, text.data(), text.size());
}

std::atomic<int> asked_to_save{0};

void expect(bool held, const std::string& what) {
  if (!held) throw spipe::Error("does not hold: " + what);
}

std::uint8_t content(std::uint64_t message, std::uint64_t i) {
  return static_cast<std::uint8_t>((message * 131 + i * 7 + (i >> 12U)) & 0xFFU);
}

void facts(World& world) {
  std::string hosts;
  for (int rank = 0; rank < world.size(); ++rank) hosts += std::to_string(world.host_of(rank));
  say(fmt::format("rank {} of {} local {} of {} host {} of {} map {} threads {}", world.rank(), world.size(),
                  world.local_rank(), world.local_size(), world.host(), world.hosts(), hosts, world.threads().threads));
  for (const std::string& warning : world.threads(4).warnings) say(fmt::format("rank {} warning {}", world.rank(), warning));
  expect(world.pid_of(world.rank()) == ::getpid(), "the own pid");
}

void collectives(World& world) {
  // Parts of every size, the empty one included.
  std::vector<std::byte> own(static_cast<std::size_t>(world.rank()) * 1000, static_cast<std::byte>(world.rank()));
  const auto parts = world.all_gather(own);
  expect(parts.size() == static_cast<std::size_t>(world.size()), "a part per rank");
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    expect(parts[rank] == std::vector<std::byte>(rank * 1000, static_cast<std::byte>(rank)), "gathered parts");
  }
  const int root = world.size() - 1;
  std::vector<std::byte> bytes;
  if (world.rank() == root) bytes.assign(3'000'001, std::byte{42});
  world.broadcast(bytes, root);
  expect(bytes == std::vector<std::byte>(3'000'001, std::byte{42}), "broadcast bytes");
  world.barrier();
}

// Counters carry a baton around the host's ranks; each writes a word of the shared area before it passes the baton on.
void region(World& world) {
  RegionLayout layout;
  layout.add_counters("baton", static_cast<std::uint64_t>(world.local_size()));
  layout.add("words", 1'000'000);
  HostRegion shared(world, layout);
  const auto baton = shared.counters("baton");
  const auto words = shared.bytes("words");
  expect(std::ranges::all_of(words, [](std::byte byte) { return byte == std::byte{0}; }), "a region starts as zeros");
  world.barrier();  // nobody writes before everybody has looked
  const auto self = static_cast<std::size_t>(world.local_rank());
  const auto ranks = static_cast<std::size_t>(world.local_size());
  constexpr std::uint64_t kRounds = 200;
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    const std::uint64_t before = self == 0 ? round - 1 : round;
    expect(baton[(self + ranks - 1) % ranks].wait(before, world.stop()), "the baton came");
    std::uint64_t count = 0;
    std::memcpy(&count, words.data(), sizeof(count));
    expect(count == (round - 1) * ranks + self, "writes before a signal are seen after the wait");
    ++count;
    std::memcpy(words.data(), &count, sizeof(count));
    baton[self].signal(round);
  }
  world.barrier();
  std::uint64_t count = 0;
  std::memcpy(&count, words.data(), sizeof(count));
  expect(count == kRounds * ranks, "one host's ranks share one region, no other's");
}

struct Planned {
  int from = 0, to = 0;
  std::uint64_t tag = 0, bytes = 0, content = 0;
};

// Messages between all pairs, both directions at once, 0 B to 64 MiB, submitted in a random order of its own on each rank;
// every third send waits for a counter that is raised later.
void messages(World& world, std::uint64_t seed) {
  std::vector<Planned> all;
  std::mt19937_64 plan_random(seed);
  const std::vector<std::uint64_t> sizes{0, 1, 255, 4096, (4U << 20U) - 1, 4U << 20U, (4U << 20U) + 1, 9'999'999};
  for (int from = 0; from < world.size(); ++from) {
    for (int to = 0; to < world.size(); ++to) {
      if (from == to) continue;
      for (int i = 0; i < 24; ++i) {
        // Few tags, so that several messages share one and must keep their order.
        all.push_back({from, to, (plan_random() % 5) << 40U, sizes[plan_random() % sizes.size()], all.size()});
      }
      const bool large = from + to == 1;  // between ranks 0 and 1, both ways
      if (large) all.push_back({from, to, 7, std::uint64_t{64} << 20U, all.size()});
    }
  }
  struct Ends {
    Planned plan;
    std::vector<std::byte> bytes;
    Counter ready, done;
    bool waits = false;
  };
  std::deque<Ends> ends;
  std::vector<Ends*> order;
  for (const Planned& plan : all) {
    if (plan.from != world.rank() && plan.to != world.rank()) continue;
    Ends& end = ends.emplace_back();
    end.plan = plan;
    end.bytes.resize(plan.bytes);
    end.waits = plan.from == world.rank() && plan.content % 3 == 0;
    if (plan.from == world.rank() && !end.waits) {
      for (std::uint64_t i = 0; i < plan.bytes; ++i) end.bytes[i] = static_cast<std::byte>(content(plan.content, i));
    }
    order.push_back(&end);
  }
  // A random order that keeps those of one (peer, direction, tag) as planned.
  std::mt19937_64 own_random(seed * 1000 + static_cast<std::uint64_t>(world.rank()));
  std::vector<Ends*> shuffled = order;
  std::ranges::shuffle(shuffled, own_random);
  const auto same_queue = [](const Ends& a, const Ends& b) {
    return a.plan.from == b.plan.from && a.plan.to == b.plan.to && a.plan.tag == b.plan.tag;
  };
  for (std::size_t i = 0; i < shuffled.size(); ++i) {
    for (std::size_t j = i + 1; j < shuffled.size(); ++j) {
      if (same_queue(*shuffled[i], *shuffled[j]) && shuffled[j]->plan.content < shuffled[i]->plan.content) {
        std::swap(shuffled[i], shuffled[j]);
      }
    }
  }
  for (Ends* end : shuffled) {
    const bool sends = end->plan.from == world.rank();
    const spipe::comm::Message message{.peer = sends ? end->plan.to : end->plan.from,
                                       .tag = end->plan.tag,
                                       .bytes = end->bytes,
                                       .after = end->waits ? std::vector<After>{{&end->ready, 3}} : std::vector<After>{},
                                       .done = &end->done,
                                       .done_value = 1};
    sends ? world.send(message) : world.receive(message);
  }
  std::ranges::shuffle(order, own_random);
  for (Ends* end : order) {
    if (!end->waits) continue;
    expect(end->done.value() == 0, "a send waits for its counter");
    for (std::uint64_t i = 0; i < end->plan.bytes; ++i) end->bytes[i] = static_cast<std::byte>(content(end->plan.content, i));
    end->ready.signal(3);
  }
  std::uint64_t received = 0;
  for (Ends* end : order) {
    expect(end->done.wait(1, world.stop()), "every message is done");
    if (end->plan.to != world.rank()) continue;
    received += end->plan.bytes;
    std::uint64_t wrong = 0;
    for (std::uint64_t i = 0; i < end->plan.bytes; ++i) {
      wrong += end->bytes[i] != static_cast<std::byte>(content(end->plan.content, i)) ? 1 : 0;
    }
    expect(wrong == 0, "the bytes that were sent");
  }
  expect(world.traffic().received_bytes == received, "the count of received bytes");
}

// Many messages on the way all the time, and counters between the host's ranks, until somebody dies.
void busy(World& world) {
  RegionLayout layout;
  layout.add_counters("step", 1);
  layout.add("area", 16U << 20U);
  HostRegion shared(world, layout);
  say(fmt::format("rank {} pid {} runs", world.rank(), ::getpid()));
  std::vector<std::byte> out(3U << 20U), in(3U << 20U);
  Counter sent, received;
  const int next = (world.rank() + 1) % world.size();
  const int previous = (world.rank() + world.size() - 1) % world.size();
  for (std::uint64_t step = 1;; ++step) {
    if (world.size() > 1) {
      world.receive({.peer = previous, .tag = 1, .bytes = in, .done = &received, .done_value = step});
      world.send({.peer = next, .tag = 1, .bytes = out, .done = &sent, .done_value = step});
      if (!sent.wait(step, world.stop()) || !received.wait(step, world.stop())) break;
    }
    if (step % 100 == 0) spipe::log_info(fmt::format("rank {} step {}", world.rank(), step));
    std::this_thread::sleep_for(milliseconds(2));
  }
  std::this_thread::sleep_for(std::chrono::seconds(60));  // only the watch can end us
}

int run(World& world, const std::string& mode, const std::string& argument) {
  const int number = argument.empty() ? 0 : static_cast<int>(std::strtol(argument.c_str(), nullptr, 10));
  if (mode == "facts") {
    facts(world);
  } else if (mode == "collectives") {
    collectives(world);
  } else if (mode == "region") {
    region(world);
  } else if (mode == "messages") {
    messages(world, static_cast<std::uint64_t>(number));
  } else if (mode == "busy") {
    busy(world);
  } else if (mode == "rate") {  // MiB/s of `number` messages of 64 MiB from rank 0 to rank 1
    std::vector<std::byte> bytes(64U << 20U);
    Counter done;
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < number && world.rank() < 2; ++i) {
      const spipe::comm::Message message{
          .peer = 1 - world.rank(), .tag = 1, .bytes = bytes, .done = &done, .done_value = static_cast<std::uint64_t>(i) + 1};
      world.rank() == 0 ? world.send(message) : world.receive(message);
      expect(done.wait(static_cast<std::uint64_t>(i) + 1, world.stop()), "a message arrives");
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    say(fmt::format("rank {} {:.0f} MiB/s", world.rank(), 64.0 * number / seconds.count()));
  } else if (mode == "latency") {  // microseconds of `number` round trips of 8 bytes between ranks 0 and 1
    std::vector<std::byte> bytes(8);
    Counter done;
    const auto begin = std::chrono::steady_clock::now();
    for (std::uint64_t i = 0; i < 2 * static_cast<std::uint64_t>(number) && world.rank() < 2; ++i) {
      const spipe::comm::Message message{
          .peer = 1 - world.rank(), .tag = i, .bytes = bytes, .done = &done, .done_value = i + 1};
      (i % 2 == 0) == (world.rank() == 0) ? world.send(message) : world.receive(message);
      expect(done.wait(i + 1, world.stop()), "a message arrives");
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    say(fmt::format("rank {} {:.0f} us a round trip", world.rank(), 1e6 * seconds.count() / number));
  } else if (mode == "idle") {  // `number` seconds of nothing
    std::this_thread::sleep_for(std::chrono::seconds(number));
    say(fmt::format("rank {} used {:.3f} s", world.rank(), static_cast<double>(std::clock()) / CLOCKS_PER_SEC));
  } else if (mode == "throw") {  // rank `number` meets an error of the user, the others wait for it
    if (world.rank() == number) throw spipe::Error("no such file", "data.bin", "make it");
    world.barrier();
  } else if (mode == "await-usr2") {
    std::signal(SIGUSR2, [](int) { asked_to_save.fetch_add(1); });
    say(fmt::format("rank {} waits", world.rank()));
    for (int i = 0; asked_to_save.load() == 0 && i < 3000; ++i) std::this_thread::sleep_for(milliseconds(10));
    expect(asked_to_save.load() == 1, "one SIGUSR2");
    say(fmt::format("rank {} got SIGUSR2", world.rank()));
    world.finish();
    return static_cast<int>(spipe::ExitCode::kSaved);
  } else if (mode == "late") {  // ranks leave far apart in time
    world.finish();
    std::this_thread::sleep_for(milliseconds(200 * world.rank()));
    return 0;
  } else if (mode == "vanish") {  // rank `number` leaves without a word
    if (world.rank() == number) std::_Exit(0);
    world.barrier();
  } else if (mode == "mismatch") {
    std::vector<std::byte> bytes(world.rank() == 0 ? 10 : 20);
    Counter done;
    const spipe::comm::Message message{.peer = 1 - world.rank(), .tag = 1, .bytes = bytes, .done = &done, .done_value = 1};
    world.rank() == 0 ? world.send(message) : world.receive(message);
    done.wait(1, world.stop());
  } else {
    throw spipe::Error("no such mode '" + mode + "'");
  }
  world.finish();
  say(fmt::format("rank {} done", world.rank()));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  spipe::init_logging(spipe::LogLevel::info);
  try {
    World world;
    try {
      return run(world, argc > 1 ? argv[1] : "facts", argc > 2 ? argv[2] : "");
    } catch (const spipe::Error& error) {
      world.fail(error.what(), error.code());
    } catch (const std::exception& error) {
      world.fail(error.what(), spipe::ExitCode::kInternal);
    }
  } catch (const std::exception& error) {
    spipe::log_error(error.what());
    return 2;
  }
}
