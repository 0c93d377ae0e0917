// Random graphs of tasks over four streams, ordered only by counters; meant to be run under the thread sanitizer too.
#include <array>
#include <catch2/catch.hpp>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "spipe/device/device.h"

namespace spipe::device {
namespace {

constexpr std::size_t kStreams = 4;

struct Node {
  std::size_t stream = 0;
  std::uint64_t ordinal = 0;  // 1, 2, ... within its stream = the value it signals
  std::vector<std::size_t> inputs;
};

std::vector<Node> random_graph(std::mt19937_64& random, std::size_t count) {
  std::vector<Node> nodes(count);
  std::array<std::uint64_t, kStreams> ordinals{};
  for (std::size_t i = 0; i < count; ++i) {
    nodes[i].stream = random() % kStreams;
    nodes[i].ordinal = ++ordinals[nodes[i].stream];
    for (std::uint64_t k = random() % 4; i > 0 && k > 0; --k) {
      nodes[i].inputs.push_back(i - 1 - random() % std::min<std::size_t>(i, 20));
    }
  }
  return nodes;
}

std::uint64_t mix(std::size_t node, const std::vector<std::uint64_t>& values, const std::vector<std::size_t>& inputs) {
  std::uint64_t value = node * 0x9e3779b97f4a7c15ULL + 1;
  for (const std::size_t input : inputs) {
    value = (value ^ values[input]) * 0xff51afd7ed558ccdULL;
  }
  return value;
}

std::vector<std::uint64_t> sequential(const std::vector<Node>& nodes) {
  std::vector<std::uint64_t> values(nodes.size(), 0);
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    values[i] = mix(i, values, nodes[i].inputs);
  }
  return values;
}

struct Run {
  std::unique_ptr<Device> device = make_cpu_device({});
  ErrorCollector errors;
  std::array<Counter, kStreams> counters;
  std::vector<std::uint64_t> values, copies;
  std::vector<std::unique_ptr<Stream>> streams;

  explicit Run(std::size_t nodes) : values(nodes, 0), copies(nodes, 0) {
    for (std::size_t s = 0; s < kStreams; ++s) {
      streams.push_back(device->make_stream("stress-" + std::to_string(s), errors));
    }
  }

  // Every node is computed by a task and copied by a copy command behind it; inputs are read from the copies.
  void enqueue(const std::vector<Node>& nodes, std::size_t failing) {
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      const Node& node = nodes[i];
      Stream& stream = *streams[node.stream];
      for (const std::size_t input : node.inputs) {
        if (nodes[input].stream != node.stream) {
          stream.wait(&counters[nodes[input].stream], nodes[input].ordinal);
        }
      }
      stream.run([this, &node, i, failing](StreamHandle*) {
        if (i == failing) {
          throw std::runtime_error("node " + std::to_string(i));
        }
        values[i] = mix(i, copies, node.inputs);
      });
      stream.copy(&copies[i], &values[i], sizeof values[i]);
      stream.signal(&counters[node.stream], node.ordinal);
    }
  }
  void drain() {
    for (const auto& stream : streams) {
      stream->drain();
    }
  }
};

constexpr std::size_t kNone = ~std::size_t{0};

}  // namespace

TEST_CASE("random graphs over four streams give the sequential result") {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    INFO("seed " << seed);
    std::mt19937_64 random(seed);
    const std::vector<Node> nodes = random_graph(random, 1000);
    Run run(nodes.size());
    run.enqueue(nodes, kNone);
    run.drain();
    run.errors.rethrow();
    CHECK(run.copies == sequential(nodes));
  }
}

TEST_CASE("an error in the middle of a random graph stops it and leaves only right values") {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    INFO("seed " << seed);
    std::mt19937_64 random(seed);
    const std::vector<Node> nodes = random_graph(random, 600);
    const std::size_t failing = 200 + random() % 200;
    Run run(nodes.size());
    run.enqueue(nodes, failing);
    run.drain();
    CHECK_THROWS_WITH(run.errors.rethrow(), "node " + std::to_string(failing));
    const std::vector<std::uint64_t> expected = sequential(nodes);
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      const bool behind = nodes[i].stream == nodes[failing].stream && nodes[i].ordinal >= nodes[failing].ordinal;
      REQUIRE((run.values[i] == 0 || run.values[i] == expected[i]));
      REQUIRE((!behind || run.values[i] == 0));
    }
  }
}

TEST_CASE("streams may be destroyed at any moment with queued work") {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    INFO("seed " << seed);
    std::mt19937_64 random(seed);
    const std::vector<Node> nodes = random_graph(random, 300);
    const std::vector<std::uint64_t> expected = sequential(nodes);
    Run run(nodes.size());
    run.enqueue(nodes, kNone);
    run.counters[random() % kStreams].wait_for(random() % 30, 1000);
    run.streams.clear();
    CHECK_FALSE(run.errors.failed());
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      REQUIRE((run.copies[i] == 0 || run.copies[i] == expected[i]));
    }
  }
}

}  // namespace spipe::device
