// What a crash, a full disk or a size limit at any point of a save leaves behind: the checkpoints that were there before.
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "spipe/io/checkpoint.h"
#include "src/io/checkpoint_files.h"
#include "test_files.h"
#include "test_models.h"
#include "test_parts.h"

namespace spipe::io {
namespace {

using test::contains;
using test::fill_store;
using test::Parts;
using test::same_state;
using test::TempFolder;
using test::tiny_shape;
using test::TinyStore;

void save(const std::filesystem::path& run, std::uint64_t step, const model::ModelShape& shape, const store::Store& store) {
  CheckpointWriter writer(run, step, shape, store, "{}\n", model::hf_config_text(shape.architecture, "float32"));
  for (int u = 0; u < shape.store_unit_count(); ++u) writer.unit(u);
  (void)writer.finish();
}

int points_left = 0;
void die_at_point(const char* /*point*/) {
  if (--points_left == 0) _exit(9);
}
void throw_at_point(const char* point) {
  if (--points_left == 0) throw Error("injected at " + std::string(point));
}

// Runs `action` in a child process; its exit code, or minus its signal. Actions return a code and must not use assertions.
int in_child(const std::function<int()>& action) {
  const pid_t child = fork();
  if (child == 0) {
    int code = 99;
    try {
      code = action();
    } catch (...) {
    }
    _exit(code);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// One run folder with a checkpoint of step 1, and a store with other values that is to become step 2; both on `hosts` hosts.
struct Scene {
  model::ModelShape shape = tiny_shape("gpt2", DType::bf16);
  TinyStore first{shape}, second{shape}, read{shape};
  TempFolder run;
  int hosts = 1;
  explicit Scene(int hosts_of_the_job = 1) : hosts(hosts_of_the_job) {
    checkpoint_hooks().shard_bytes = 40'000;  // several shards, so that there are points between them
    fill_store(shape, first.store, 1);
    fill_store(shape, second.store, 2);
    save_step(1);
  }
  ~Scene() { checkpoint_hooks() = {}; }
  Scene(const Scene&) = delete;
  Scene& operator=(const Scene&) = delete;

  void save_step(std::uint64_t step) const {
    const store::Store& store = step == 1 ? first.store : second.store;
    if (hosts == 1) {
      save(run.path(), step, shape, store);
    } else {
      (void)Parts(store, shape, hosts).save(run.path(), step);
    }
  }
  // Which step loads, with the right bytes; 0 when none does.
  std::uint64_t surviving_step() {
    const auto found = newest_checkpoint(run.path());
    if (!found) return 0;
    (void)load_checkpoint(*found, shape, read.store);
    return same_state(read.store, found->step == 1 ? first.store : second.store) ? found->step : 0;
  }
  [[nodiscard]] int leftovers() const {
    int count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(run.path())) {
      count += entry.path().filename().string().starts_with(".tmp-") ? 1 : 0;
    }
    return count;
  }
};

// Dies at each point of a save in turn; all hosts die together, as a job does. Returns the number of points.
int kill_at_every_point(int hosts) {
  Scene scene(hosts);
  checkpoint_hooks().fault = die_at_point;
  bool old_survived = false, new_survived = false, left_something = false;
  int points = 0;
  for (int point = 1;; ++point) {
    points_left = point;
    const int code = in_child([&] {
      scene.save_step(2);
      return 0;
    });
    INFO(hosts << " hosts, point " << point);
    REQUIRE((code == 9 || code == 0));
    const std::uint64_t step = scene.surviving_step();
    REQUIRE((step == 1 || step == 2));
    if (code == 0) {
      CHECK(step == 2);
      points = point - 1;
      break;
    }
    (step == 1 ? old_survived : new_survived) = true;
    left_something = left_something || scene.leftovers() > 0;
    prune_checkpoints(scene.run.path(), 5);
    CHECK(scene.leftovers() == 0);
    CHECK(scene.surviving_step() == step);
  }
  CHECK(old_survived);
  CHECK(new_survived);
  CHECK(left_something);
  return points;
}

TEST_CASE("killed at any point of a save, the run keeps a whole checkpoint and cleans up (CASES O41)") {
  const int alone = kill_at_every_point(1);
  CHECK(alone > 15);
  CHECK(kill_at_every_point(2) > alone);  // the points between the hosts' parts
}

// Throws at each point of a save in turn, in whichever writer gets there. Returns the number of points.
int throw_at_every_point(int hosts) {
  Scene scene(hosts);
  checkpoint_hooks().fault = throw_at_point;
  int errors = 0;
  for (int point = 1;; ++point) {
    points_left = point;
    try {
      scene.save_step(2);
      break;
    } catch (const Error& error) {
      ++errors;
      INFO(hosts << " hosts: " << error.what());
      CHECK(scene.leftovers() == 0);
      const std::uint64_t step = scene.surviving_step();
      CHECK((step == 1 || (step == 2 && contains(error.what(), "after"))));
    }
  }
  CHECK(scene.surviving_step() == 2);
  return errors;
}

TEST_CASE("an error at any point of a save removes the half-written folder and leaves the older checkpoint") {
  const int alone = throw_at_every_point(1);
  CHECK(alone > 15);
  CHECK(throw_at_every_point(2) > alone);
}

// Only one host dies; the leader, on another, hears of it and gives up.
TEST_CASE("killed at any point of its part, a host leaves nothing that the leader does not clean up") {
  Scene scene(2);
  const Parts parts(scene.second.store, scene.shape, 2);
  int points = 0;
  for (int point = 1;; ++point) {
    auto leader = parts.writer(scene.run.path(), 2, 0);
    parts.write_units(*leader, 0);
    checkpoint_hooks().fault = die_at_point;
    points_left = point;
    const int code = in_child([&] {
      const auto other = parts.writer(scene.run.path(), 2, 1);
      parts.write_units(*other, 1);
      (void)other->part_manifest();
      return 0;
    });
    checkpoint_hooks().fault = nullptr;
    INFO("point " << point);
    REQUIRE((code == 9 || code == 0));
    CHECK(scene.leftovers() == 1);
    leader.reset();
    CHECK(scene.leftovers() == 0);
    CHECK(scene.surviving_step() == 1);
    if (code == 0) {
      points = point - 1;
      break;
    }
  }
  CHECK(points > 5);
}

TEST_CASE("a limit on file sizes is an error that names file and bytes, not a lost checkpoint (CASES O42)") {
  Scene scene;
  for (const rlim_t limit : {rlim_t{0}, rlim_t{100}, rlim_t{20'000}, rlim_t{100'000}}) {
    const int code = in_child([&] {
      signal(SIGXFSZ, SIG_IGN);
      const rlimit bytes{limit, limit};
      if (setrlimit(RLIMIT_FSIZE, &bytes) != 0) return 77;
      try {
        save(scene.run.path(), 2, scene.shape, scene.second.store);
      } catch (const Error& error) {
        return contains(error.what(), "cannot write") && contains(error.what(), " bytes") &&
                       contains(error.what(), ".tmp-step-")
                   ? 3
                   : 4;
      }
      return 0;
    });
    CHECK(code == 3);
    CHECK(scene.leftovers() == 0);
    CHECK(scene.surviving_step() == 1);
  }
}

TEST_CASE("a full disk leaves the previous checkpoint (CASES O42)") {
  const model::ModelShape shape = tiny_shape("gpt2", DType::bf16);
  TinyStore store(shape), read(shape);
  fill_store(shape, store.store, 1);
  const TempFolder folder;
  const std::uint64_t needed = CheckpointWriter::predicted_bytes(shape, store.store.format());
  const auto on_small_disk = [&](std::uint64_t disk_bytes, const std::function<int(const std::filesystem::path&)>& action) {
    return in_child([&] {
      const std::string size = "size=" + std::to_string(disk_bytes);
      if (unshare(CLONE_NEWNS) != 0 || mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
          mount("tmpfs", folder.path().c_str(), "tmpfs", 0, size.c_str()) != 0) {
        return 77;
      }
      return action(folder.path());
    });
  };
  const auto first_survives = [&](const std::filesystem::path& run) {
    const auto found = newest_checkpoint(run);
    if (!found || found->step != 1) return false;
    (void)load_checkpoint(*found, shape, read.store);
    return same_state(store.store, read.store);
  };
  // Room for one and a half: the second save is refused before anything is written.
  const int refused = on_small_disk(needed * 3 / 2, [&](const std::filesystem::path& run) {
    save(run, 1, shape, store.store);
    try {
      save(run, 2, shape, store.store);
    } catch (const Error& error) {
      if (!contains(error.what(), "a checkpoint needs")) return 4;
      return first_survives(run) ? 3 : 5;
    }
    return 0;
  });
  if (refused == 77) {
    WARN("skipped: this environment lets no process mount a tmpfs");
    return;
  }
  CHECK(refused == 3);
  // The disk fills up while the second save is under way.
  const int filled = on_small_disk(needed * 5 / 2, [&](const std::filesystem::path& run) {
    save(run, 1, shape, store.store);
    try {
      CheckpointWriter writer(run, 2, shape, store.store, "{}\n", "{}\n");
      writer.unit(0);
      test::write_file(run / "ballast", std::string(free_disk_bytes(run) - 8192, 'x'));
      for (int u = 1; u < shape.store_unit_count(); ++u) writer.unit(u);
      (void)writer.finish();
    } catch (const Error& error) {
      if (!contains(error.what(), "cannot write") || !contains(error.what(), "disk space")) return 4;
      return first_survives(run) && free_disk_bytes(run) > 8192 ? 3 : 5;
    }
    return 0;
  });
  CHECK(filled == 3);
}

}  // namespace
}  // namespace spipe::io
