// Hardware files and timelines.
#include <catch2/catch.hpp>

#include "spipe/base/error.h"
#include "spipe/plan/hardware.h"
#include "spipe/plan/timeline.h"

using namespace spipe;
using namespace spipe::plan;

TEST_CASE("a hardware file is read, units of bytes and all") {
  const Hardware h = parse_hardware(
      "name: box\nhosts: 2\nranks_per_host: 4\ndevice:\n  matmul_flops: 62e12\n  memory: 32 GiB\n"
      "link:\n  h2d: 12 GB\n  d2h: 1.1e10\n  ranks_per_link: 2\nhost: {update: 1.9e9}\nunit_times: [[0.5, 1], [1, 2]]\n",
      "box.yaml");
  CHECK(h.name == "box");
  CHECK(h.ranks() == 8);
  CHECK(h.matmul_flops == 62e12);
  CHECK(h.memory_bytes == (std::uint64_t{32} << 30));
  CHECK(h.h2d_bytes_per_s == 12e9);
  CHECK(h.d2h_bytes_per_s == 1.1e10);
  CHECK(h.ranks_per_link == 2);
  CHECK(h.update_params_per_s == 1.9e9);
  REQUIRE(h.unit_times.size() == 2);
  CHECK(h.unit_times[1].backward_s == 2);
  const Hardware again = parse_hardware(hardware_text(h), "again");
  CHECK(hardware_text(again) == hardware_text(h));
  CHECK(again.memory_bytes == h.memory_bytes);
  CHECK(again.unit_times[0].forward_s == 0.5);
}

TEST_CASE("mistakes in a hardware file are named with their line") {
  const auto message = [](const char* text) -> std::string {
    try {
      (void)parse_hardware(text, "x.yaml");
    } catch (const Error& e) {
      return e.what();
    }
    return "accepted";
  };
  CHECK(message("device:\n  matmul_flop: 1\n") == "x.yaml:2: unknown key 'matmul_flop'; did you mean 'matmul_flops'?");
  CHECK_THAT(message("hosts: 2\nlink:\n  h2d: fast\n"), Catch::StartsWith("x.yaml:3: 'fast' of h2d"));
  CHECK_THAT(message("hosts: 1.5\n"), Catch::StartsWith("x.yaml:1: '1.5' of hosts is no count"));
  CHECK_THAT(message("link: 3\n"), Catch::StartsWith("x.yaml:1: 'link' is a section"));
  CHECK_THAT(message("link:\n  h2d: -1\n"), Catch::StartsWith("x.yaml:2: '-1' of h2d"));
  CHECK_THAT(message("link: [\n"), Catch::StartsWith("x.yaml"));
  CHECK_THAT(message("just text\n"), Catch::StartsWith("x.yaml: no settings found"));
}

TEST_CASE("the hardware files in the tree are complete") {
  for (const char* name : {"v100x4", "rtx3090x4", "rtx4090x8", "h200", "h200x8", "this-machine"}) {
    INFO(name);
    const Hardware h = load_hardware(std::string("configs/hardware/") + name + ".yaml");
    CHECK(h.name == name);
    CHECK(h.matmul_flops > 0);
    CHECK(h.h2d_bytes_per_s > 0);
    CHECK(h.d2h_bytes_per_s > 0);
    CHECK(h.update_params_per_s > 0);
    CHECK(h.memory_bytes > 0);
    CHECK(h.host_bytes > 0);
  }
}

TEST_CASE("timelines: one slice a task, names and times, no stray markup") {
  Task task;
  task.id = 3;
  task.kind = TaskKind::forward;
  task.flags = kRecompute;
  task.rank = 1;
  task.unit = 2;
  task.micro_batch = 5;
  Task update;
  update.kind = TaskKind::optimize;
  update.stream = StreamKind::cpu;
  update.unit = 2;
  const std::vector<TimelineSlice> slices = {slice_of(task, 10.5, 11), slice_of(update, 10, 10.25)};
  const std::string json = chrome_trace(slices);
  CHECK_THAT(json,
             Catch::Contains(R"("name":"recompute u2 m5","cat":"forward","pid":1,"tid":0,"ts":500000.000,"dur":500000.000)"));
  CHECK_THAT(json, Catch::Contains(R"("name":"optimize u2")"));
  CHECK_THAT(json, Catch::Contains(R"("args":{"name":"rank 1"})"));
  const std::string html = timeline_html(slices, {"4 < 5 ranks", "a & b"});
  CHECK_THAT(html, Catch::Contains("4 &lt; 5 ranks"));
  CHECK_THAT(html, Catch::Contains("a &amp; b"));
  CHECK_THAT(html, Catch::Contains("recompute u2 m5, stage 0"));
  CHECK_THAT(html, Catch::Contains("r1 compute"));
  CHECK_THAT(html, !Catch::Contains("<script"));
}
