// Checkpoints of a store that is spread over hosts: a writer on each, files of one host only, one checkpoint.
#include <catch2/catch.hpp>

#include "spipe/io/checkpoint.h"
#include "spipe/io/safetensors.h"
#include "src/io/checkpoint_files.h"
#include "test_files.h"
#include "test_models.h"

namespace spipe::io {
namespace {

using test::fill_store;
using test::read_file;
using test::same_state;
using test::TempFolder;
using test::tiny_shape;
using test::TinyStore;

std::vector<int> alternating_hosts(const model::ModelShape& shape, int hosts) {
  std::vector<int> host_of_unit;
  int next = 0;
  for (const model::StoreUnit& unit : shape.store_units) host_of_unit.push_back(unit.elements == 0 ? -1 : next++ % hosts);
  return host_of_unit;
}

// The units of one host, with the values of a whole store.
std::unique_ptr<store::Store> part_of(const model::ModelShape& shape, const store::Store& whole, const std::vector<int>& hosts,
                                      int host) {
  std::vector<bool> here;
  for (const int of_unit : hosts) here.push_back(of_unit == host);
  auto part = std::make_unique<store::Store>(shape, store::make_store_layout(shape, whole.format(), here));
  for (int u = 0; u < shape.store_unit_count(); ++u) {
    const bool empty = shape.store_units[static_cast<std::size_t>(u)].elements == 0;
    CHECK(part->has(u) == (here[static_cast<std::size_t>(u)] || empty));
    if (!part->has(u) || empty) continue;
    for (const store::Plane plane : {store::Plane::compute, store::Plane::master, store::Plane::m, store::Plane::v}) {
      const std::uint64_t bytes = whole.layout().slab_bytes(u, plane);
      if (bytes > 0) std::memcpy(part->slab(u, plane).data, whole.slab(u, plane).data, bytes);
    }
  }
  return part;
}

struct Parts {
  model::ModelShape shape;
  std::vector<int> hosts;
  std::vector<std::unique_ptr<store::Store>> stores;

  Parts(const model::ModelShape& of, const store::Store& whole, int count) : shape(of), hosts(alternating_hosts(of, count)) {
    for (int host = 0; host < count; ++host) stores.push_back(part_of(shape, whole, hosts, host));
  }
  [[nodiscard]] std::unique_ptr<CheckpointWriter> writer(const std::filesystem::path& run, std::uint64_t step, int host) const {
    return std::make_unique<CheckpointWriter>(run, step, shape, *stores[static_cast<std::size_t>(host)], "{}\n",
                                              model::hf_config_text(shape.architecture, "float32"),
                                              CheckpointPart{hosts, host, host == 0});
  }
  void write_units(CheckpointWriter& writer, int host) const {
    for (int u = 0; u < shape.store_unit_count(); ++u) {
      if (hosts[static_cast<std::size_t>(u)] == host) writer.unit(u);
    }
  }
  CheckpointInfo save(const std::filesystem::path& run, std::uint64_t step) const {
    const auto leader = writer(run, step, 0);
    std::vector<std::string> others;
    for (int host = 1; host < static_cast<int>(stores.size()); ++host) {
      const auto other = writer(run, step, host);
      write_units(*other, host);
      others.push_back(other->part_manifest());
    }
    write_units(*leader, 0);
    return leader->finish(others);
  }
};

struct ShardLimit {
  explicit ShardLimit(std::uint64_t bytes) { checkpoint_hooks().shard_bytes = bytes; }
  ~ShardLimit() { checkpoint_hooks() = {}; }
  ShardLimit(const ShardLimit&) = delete;
  ShardLimit& operator=(const ShardLimit&) = delete;
};

std::size_t entries(const std::filesystem::path& folder) {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
}

}  // namespace

TEST_CASE("a checkpoint of several hosts loads as a whole, and whole ones load in parts") {
  for (const char* name : {"llama", "gpt2"}) {
    for (const std::uint64_t limit : {std::uint64_t{1} << 30U, std::uint64_t{20'000}}) {
      for (const int count : {2, 3}) {
        INFO(name << ", shards of " << limit << ", " << count << " hosts");
        const ShardLimit shards(limit);
        const model::ModelShape shape = tiny_shape(name, DType::bf16);
        TinyStore whole(shape), read(shape), empty(shape);
        fill_store(shape, whole.store, 1);
        const Parts parts(shape, whole.store, count);
        const TempFolder run;
        const CheckpointInfo info = parts.save(run.path(), 7);
        CHECK(list_checkpoints(run.path()).size() == 1);
        REQUIRE(newest_checkpoint(run.path()).has_value());
        (void)load_checkpoint(info, shape, read.store);
        CHECK(same_state(whole.store, read.store));
        CHECK(std::filesystem::exists(info.path / "model.safetensors.index.json"));
        // The reverse: each host takes its units from it, and nothing else.
        const Parts targets(shape, empty.store, count);
        for (int host = 0; host < count; ++host) {
          store::Store& target = *targets.stores[static_cast<std::size_t>(host)];
          (void)load_checkpoint(info, shape, target);
          for (int u = 0; u < shape.store_unit_count(); ++u) {
            if (targets.hosts[static_cast<std::size_t>(u)] != host) continue;
            const std::uint64_t bytes = whole.store.layout().slab_bytes(u, store::Plane::m);
            CHECK(std::memcmp(target.slab(u, store::Plane::m).data, whole.store.slab(u, store::Plane::m).data, bytes) == 0);
          }
        }
      }
    }
  }
}

TEST_CASE("files hold units of one host only") {
  const auto names = [](const std::vector<Shard>& shards) {
    std::vector<std::string> list;
    for (const Shard& shard : shards) {
      std::string text = std::to_string(shard.host) + ":";
      for (const int unit : shard.units) text += " " + std::to_string(unit);
      list.push_back(text + " " + shard.name);
    }
    return list;
  };
  CHECK(names(cut_shards("model", {5, 5, 0, 5, 5}, {0, 1, -1, 0, 1}, 100)) ==
        std::vector<std::string>{"0: 0 2 3 model-00001-of-00002.safetensors", "1: 1 4 model-00002-of-00002.safetensors"});
  CHECK(names(cut_shards("model", {5, 5, 5, 5}, {1, 1, 1, 0}, 10)) ==
        std::vector<std::string>{"0: 3 model-00001-of-00003.safetensors", "1: 0 1 model-00002-of-00003.safetensors",
                                 "1: 2 model-00003-of-00003.safetensors"});
}

TEST_CASE("a part that is not finished leaves nothing, nor does a leader") {
  const model::ModelShape shape = tiny_shape("llama");
  TinyStore whole(shape);
  fill_store(shape, whole.store, 1);
  const Parts parts(shape, whole.store, 2);
  const TempFolder run;
  (void)parts.save(run.path(), 1);
  const std::size_t before = entries(run.path());
  {
    const auto leader = parts.writer(run.path(), 2, 0);
    const std::filesystem::path folder = run.path() / (std::string(kTemporaryPrefix) + "00000002");
    REQUIRE(std::filesystem::exists(folder));
    {
      const auto other = parts.writer(run.path(), 2, 1);
      parts.write_units(*other, 1);
      CHECK(entries(folder) == 2);
    }
    CHECK(entries(folder) == 0);
    CHECK(entries(run.path()) == before + 1);
  }
  CHECK(entries(run.path()) == before);
  CHECK(newest_checkpoint(run.path())->step == 1);
}

TEST_CASE("a leader does not finish without the other parts, and units go to their own host's writer") {
  const model::ModelShape shape = tiny_shape("llama");
  TinyStore whole(shape);
  const Parts parts(shape, whole.store, 2);
  const TempFolder run;
  const auto leader = parts.writer(run.path(), 1, 0);
  CHECK_THROWS_AS(leader->unit(1), InternalError);
  const auto fresh = parts.writer(run.path(), 1, 0);
  parts.write_units(*fresh, 0);
  CHECK_THROWS_AS(fresh->finish(), InternalError);
  CHECK(list_checkpoints(run.path()).empty());
}

TEST_CASE("units without tensors need no call") {
  model::Architecture architecture = model::architecture_from_hf("tests/golden/data/llama/config.json");
  architecture.tied_embeddings = true;  // the embedding has no tensors of its own
  const model::ModelShape shape = model::make_shape(architecture, {.micro = 1, .seq_len = 8, .head_chunk = 8}, DType::f32);
  TinyStore whole(shape), read(shape);
  fill_store(shape, whole.store, 3);
  const TempFolder run;
  CheckpointWriter writer(run.path(), 1, shape, whole.store, "{}\n", model::hf_config_text(shape.architecture, "float32"));
  int left_out = 0;
  for (int u = 0; u < shape.store_unit_count(); ++u) {
    if (shape.store_units[static_cast<std::size_t>(u)].elements == 0) {
      ++left_out;
    } else {
      writer.unit(u);
    }
  }
  CHECK(left_out > 0);
  (void)load_checkpoint(writer.finish(), shape, read.store);
  CHECK(same_state(whole.store, read.store));
}

}  // namespace spipe::io
