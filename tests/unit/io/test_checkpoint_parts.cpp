// Checkpoints of a store that is spread over hosts: a writer on each, files of one host only, one checkpoint.
#include <catch2/catch.hpp>
#include <map>

#include "spipe/io/checkpoint.h"
#include "spipe/io/safetensors.h"
#include "src/io/checkpoint_files.h"
#include "test_files.h"
#include "test_models.h"
#include "test_parts.h"

namespace spipe::io {
namespace {

using test::contains;
using test::error_line;
using test::fill_store;
using test::Parts;
using test::read_file;
using test::same_state;
using test::ShardLimit;
using test::TempFolder;
using test::tiny_shape;
using test::TinyStore;
using test::write_file;

constexpr std::uint64_t kOneFile = std::uint64_t{1} << 30U;

std::size_t entries(const std::filesystem::path& folder) {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
}

std::map<std::string, std::string> contents(const std::filesystem::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    files[entry.path().filename().string()] = read_file(entry.path());
  }
  return files;
}

CheckpointInfo save_whole(const std::filesystem::path& run, std::uint64_t step, const model::ModelShape& shape,
                          const store::Store& store) {
  CheckpointWriter writer(run, step, shape, store, "{}\n", model::hf_config_text(shape.architecture, "float32"));
  for (int u = 0; u < shape.store_unit_count(); ++u) writer.unit(u);
  return writer.finish();
}

// Writes the file of `folder` that holds the tensor again, with the same bytes, the tensor being flat.
void reshape_tensor(const std::filesystem::path& folder, const std::string& name) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    const SafetensorsFile file(entry.path());
    if (file.find(name) == nullptr) continue;
    std::vector<TensorInfo> tensors = file.tensors();
    for (TensorInfo& tensor : tensors) {
      if (tensor.name == name) tensor.shape = {tensor.elements()};
    }
    const std::filesystem::path changed = folder / "changed";
    SafetensorsWriter writer(changed, tensors);
    for (const TensorInfo& tensor : file.tensors()) writer.write(tensor.name, file.data(tensor));
    writer.finish();
    std::filesystem::rename(changed, entry.path());
    return;
  }
  FAIL("no tensor " << name);
}

std::filesystem::path temporary_folder(const std::filesystem::path& run, const std::string& digits) {
  return run / (kTemporaryPrefix + digits);
}

// A model with a unit without tensors: the embedding, whose table is a unit of its own.
model::ModelShape tied_shape(DType compute = DType::f32) {
  model::Architecture architecture = model::architecture_from_hf("tests/golden/data/llama/config.json");
  architecture.tied_embeddings = true;
  return model::make_shape(architecture, {.micro = 1, .seq_len = 8, .head_chunk = 8}, compute);
}

}  // namespace

TEST_CASE("a checkpoint of several hosts loads as a whole, and any checkpoint loads in parts") {
  for (const char* name : {"llama", "gpt2"}) {
    for (const DType compute : {DType::f32, DType::bf16}) {
      for (const std::uint64_t limit : {kOneFile, std::uint64_t{20'000}}) {
        for (const int count : {2, 3}) {
          INFO(name << " " << dtype_name(compute) << ", shards of " << limit << ", " << count << " hosts");
          const ShardLimit shards(limit);
          const model::ModelShape shape = tiny_shape(name, compute);
          TinyStore whole(shape), read(shape);
          fill_store(shape, whole.store, 1);
          const Parts source(whole.store, shape, count);
          const TempFolder run;
          const CheckpointInfo in_parts = source.save(run.path(), 7);
          const CheckpointInfo in_one = save_whole(run.path(), 6, shape, whole.store);
          CHECK(std::filesystem::exists(in_parts.path / "model.safetensors.index.json"));
          CHECK(list_checkpoints(run.path()).size() == 2);
          REQUIRE(newest_checkpoint(run.path()).has_value());
          CHECK(newest_checkpoint(run.path())->step == 7);
          CHECK(load_checkpoint(in_parts, shape, read.store) == "{}\n");
          CHECK(same_state(whole.store, read.store));
          for (const CheckpointInfo& info : {in_parts, in_one}) {
            // Also by another number of hosts than wrote it.
            for (const int readers : {count, 5 - count}) {
              const Parts target(shape, readers);
              for (int host = 0; host < readers; ++host) {
                CHECK_FALSE(target.same_as(whole.store));
                CHECK(load_checkpoint(info, shape, target.store_of(host)) == "{}\n");
              }
              CHECK(target.same_as(whole.store));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("a checkpoint of several hosts is a model folder") {
  for (const std::uint64_t limit : {kOneFile, std::uint64_t{1}}) {
    const ShardLimit shards(limit);
    const model::ModelShape shape = tiny_shape("gpt2");
    TinyStore whole(shape), read(shape);
    fill_store(shape, whole.store, 2);
    const TempFolder run;
    const CheckpointInfo info = Parts(whole.store, shape, 2).save(run.path(), 1);
    load_model(info.path, shape, read.store);
    const Parts target(shape, 3);
    for (int host = 0; host < 3; ++host) load_model(info.path, shape, target.store_of(host));
    for (int u = 0; u < shape.store_unit_count(); ++u) {
      const std::uint64_t bytes = whole.store.layout().slab_bytes(u, store::Plane::compute);
      if (bytes == 0) continue;
      CHECK(std::memcmp(read.store.master(u), whole.store.master(u), bytes) == 0);
      CHECK(std::memcmp(target.store_of(target.host(u)).master(u), whole.store.master(u), bytes) == 0);
    }
  }
}

TEST_CASE("files hold units of one host only, and units without bytes are in none") {
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
        std::vector<std::string>{"0: 0 3 model-00001-of-00002.safetensors", "1: 1 4 model-00002-of-00002.safetensors"});
  CHECK(names(cut_shards("model", {5, 5, 5, 5}, {1, 1, 1, 0}, 10)) ==
        std::vector<std::string>{"0: 3 model-00001-of-00003.safetensors", "1: 0 1 model-00002-of-00003.safetensors",
                                 "1: 2 model-00003-of-00003.safetensors"});
  // Hosts without units have no files; one host alone is numbered as if there were no others.
  CHECK(names(cut_shards("model", {0, 5, 5}, {-1, 2, 2}, 10)) == std::vector<std::string>{"2: 1 2 model.safetensors"});
  CHECK_THROWS_AS(cut_shards("model", {5, 5}, {0, -1}, 10), InternalError);
  CHECK_THROWS_AS(cut_shards("model", {5, 5}, {0}, 10), InternalError);
}

TEST_CASE("a job of one host writes the same bytes with and without a list of hosts") {
  for (const std::uint64_t limit : {kOneFile, std::uint64_t{20'000}, std::uint64_t{1}}) {
    const ShardLimit shards(limit);
    const model::ModelShape shape = tied_shape(DType::bf16);
    TinyStore whole(shape);
    fill_store(shape, whole.store, 4);
    const TempFolder one, listed, apart;
    const auto expected = contents(save_whole(one.path(), 3, shape, whole.store).path);
    CHECK(contents(Parts(whole.store, shape, 1).save(listed.path(), 3).path) == expected);
    CHECK(contents(Parts(whole.store, shape, 2).save(apart.path(), 3).path) != expected);
  }
}

TEST_CASE("the order in which the leader hears of the parts leaves no trace") {
  const model::ModelShape shape = tiny_shape("llama");
  TinyStore whole(shape);
  fill_store(shape, whole.store, 1);
  const Parts parts(whole.store, shape, 3);
  const TempFolder first, second;
  const auto files = contents(parts.save(first.path(), 1).path);
  CHECK(files == contents(parts.save(second.path(), 1, true).path));
  CHECK(files.contains("model-00003-of-00003.safetensors"));
  CHECK(files.contains("optimizer-00003-of-00003.safetensors"));
}

TEST_CASE("a leader without units of its own makes the checkpoint of the others") {
  const model::ModelShape shape = tied_shape();
  TinyStore whole(shape), read(shape);
  fill_store(shape, whole.store, 1);
  std::vector<int> hosts = test::alternating_hosts(shape, 1);
  for (int& host : hosts) host = host < 0 ? -1 : 1;
  const TempFolder run;
  const CheckpointInfo info = Parts(whole.store, shape, hosts, 3).save(run.path(), 1);
  CHECK(std::filesystem::exists(info.path / "model.safetensors"));
  (void)load_checkpoint(info, shape, read.store);
  CHECK(same_state(whole.store, read.store));
}

TEST_CASE("the predicted bytes hold for every number of hosts and files") {
  for (const char* name : {"llama", "gpt2"}) {
    for (const int count : {1, 2, 3}) {
      const ShardLimit shards(1);  // one unit a file: the most files there can be
      const model::ModelShape shape = tiny_shape(name, DType::bf16);
      TinyStore whole(shape);
      const TempFolder run;
      const CheckpointInfo info = Parts(whole.store, shape, count).save(run.path(), 1);
      std::uint64_t on_disk = 4096;  // the folder
      for (const auto& [file, text] : contents(info.path)) on_disk += (text.size() + 4095) / 4096 * 4096;
      const std::uint64_t predicted = CheckpointWriter::predicted_bytes(shape, whole.store.format());
      CHECK(on_disk <= predicted);
      CHECK(predicted < 2 * on_disk);
    }
  }
}

TEST_CASE("a part that is not finished leaves nothing, nor does a leader") {
  const model::ModelShape shape = tiny_shape("llama");
  TinyStore whole(shape);
  fill_store(shape, whole.store, 1);
  const Parts parts(whole.store, shape, 2);
  const TempFolder run;
  (void)parts.save(run.path(), 1);
  const std::size_t before = entries(run.path());
  {
    const auto leader = parts.writer(run.path(), 2, 0);
    const std::filesystem::path folder = temporary_folder(run.path(), "00000002");
    REQUIRE(std::filesystem::exists(folder));
    write_file(folder / "of the leader", "x");
    {
      const auto other = parts.writer(run.path(), 2, 1);
      parts.write_units(*other, 1);
      CHECK(entries(folder) == 3);
    }
    CHECK(entries(folder) == 1);
    CHECK(entries(run.path()) == before + 1);
  }
  CHECK(entries(run.path()) == before);
  CHECK(newest_checkpoint(run.path())->step == 1);
}

TEST_CASE("when the leader gives up, the others fail at their next file and leave nothing") {
  const ShardLimit shards(1);
  const model::ModelShape shape = tiny_shape("llama");
  TinyStore whole(shape);
  const Parts parts(whole.store, shape, 2);
  const TempFolder run;
  (void)parts.save(run.path(), 1);
  const std::size_t before = entries(run.path());
  auto leader = parts.writer(run.path(), 2, 0);
  auto other = parts.writer(run.path(), 2, 1);
  parts.write_units(*other, 1, 0, 2);
  parts.write_units(*leader, 0, 0, 2);
  leader.reset();
  CHECK(entries(run.path()) == before);
  CHECK(contains(error_line([&] { parts.write_units(*other, 1, 2); }), ".tmp-step-00000002"));
  other.reset();
  CHECK(entries(run.path()) == before);
  // The step is saved anew.
  CHECK(parts.save(run.path(), 2).step == 2);
  CHECK(newest_checkpoint(run.path())->step == 2);
}

TEST_CASE("hosts that do not share the run folder are told so, and the older checkpoint stays") {
  const model::ModelShape shape = tiny_shape("llama");
  TinyStore whole(shape);
  fill_store(shape, whole.store, 1);
  const Parts parts(whole.store, shape, 2);
  const TempFolder run, elsewhere;
  (void)parts.save(run.path(), 1);
  auto leader = parts.writer(run.path(), 2, 0);
  const auto refused = [&] { (void)parts.writer(elsewhere.path(), 2, 1); };
  CHECK(contains(error_line(refused), "is not here"));
  CHECK(contains(error_line(refused), "shared"));
  CHECK(entries(elsewhere.path()) == 0);

  // A folder of that name is there by chance: the leader misses the files.
  std::filesystem::create_directory(temporary_folder(elsewhere.path(), "00000002"));
  const auto other = parts.writer(elsewhere.path(), 2, 1);
  parts.write_units(*other, 1);
  const std::string text = other->part_manifest();
  parts.write_units(*leader, 0);
  CHECK(contains(error_line([&] { (void)leader->finish({text}); }), "it is not here"));
  leader.reset();

  // Or finds others.
  leader = parts.writer(run.path(), 2, 0);
  parts.write_units(*leader, 0);
  write_file(temporary_folder(run.path(), "00000002") / "model-00002-of-00002.safetensors", "short");
  CHECK(contains(error_line([&] { (void)leader->finish({text}); }), "5 are here"));
  leader.reset();
  CHECK(entries(run.path()) == 2);
  CHECK(newest_checkpoint(run.path())->step == 1);
}

TEST_CASE("a leader finishes with every other part, once each") {
  const model::ModelShape shape = tiny_shape("llama");
  TinyStore whole(shape);
  const Parts parts(whole.store, shape, 3);
  const TempFolder run;
  const auto leader = parts.writer(run.path(), 1, 0);
  std::vector<std::string> texts;
  for (int host = 1; host < 3; ++host) {
    const auto other = parts.writer(run.path(), 1, host);
    parts.write_units(*other, host);
    CHECK_THROWS_AS(other->finish(), InternalError);
    texts.push_back(other->part_manifest());
    CHECK_THROWS_AS(other->part_manifest(), InternalError);
  }
  parts.write_units(*leader, 0);
  CHECK_THROWS_AS(leader->part_manifest(), InternalError);
  // The last one has as many files as wanted, one of them of another checkpoint.
  std::string foreign = texts[1];
  const std::string name = "model-00003-of-00003", other_name = "model-00003-of-00004";
  REQUIRE(foreign.find(name) != std::string::npos);
  foreign.replace(foreign.find(name), name.size(), other_name);
  const std::filesystem::path made = temporary_folder(run.path(), "00000001");
  std::filesystem::copy_file(made / (name + ".safetensors"), made / (other_name + ".safetensors"));
  const std::vector<std::vector<std::string>> wrong{
      {}, {texts[0]}, {texts[1]}, {texts[0], texts[0]}, {texts[0], "{}"}, {texts[0], foreign}};
  for (std::size_t i = 0; i < wrong.size(); ++i) {
    const TempFolder again;
    const auto fresh = parts.writer(again.path(), 1, 0);
    parts.write_units(*fresh, 0);
    for (const auto& file : std::filesystem::directory_iterator(made)) {
      std::filesystem::copy_file(file, temporary_folder(again.path(), "00000001") / file.path().filename(),
                                 std::filesystem::copy_options::overwrite_existing);
    }
    CHECK_THROWS_AS(fresh->finish(wrong[i]), InternalError);
    CHECK(list_checkpoints(again.path()).empty());
  }
  std::filesystem::remove(made / (other_name + ".safetensors"));
  CHECK(leader->finish(texts).step == 1);
}

TEST_CASE("a writer takes every unit of its host once, in ascending order, and no others") {
  const model::ModelShape shape = tiny_shape("llama");
  TinyStore whole(shape);
  const Parts parts(whole.store, shape, 2);
  const TempFolder run;
  const auto leader = parts.writer(run.path(), 1, 0);
  REQUIRE(parts.host(0) == 0);
  REQUIRE(parts.host(1) == 1);
  REQUIRE(parts.host(2) == 0);
  CHECK_THROWS_AS(leader->unit(1), InternalError);   // of another host
  CHECK_THROWS_AS(leader->unit(2), InternalError);   // leaves one out
  CHECK_THROWS_AS(leader->unit(-1), InternalError);  // is none
  CHECK_THROWS_AS(leader->unit(shape.store_unit_count()), InternalError);
  leader->unit(0);
  CHECK_THROWS_AS(leader->unit(0), InternalError);  // twice
  CHECK_THROWS_WITH(leader->finish(), Catch::Contains("store unit 2 was left out"));
  leader->unit(2);
  CHECK_THROWS_AS(leader->unit(0), InternalError);
  const auto other = parts.writer(run.path(), 1, 1);
  CHECK_THROWS_WITH(other->part_manifest(), Catch::Contains("store unit 1 was left out"));
  CHECK_THROWS_WITH(leader->finish(), Catch::Contains("the part of host 1 is missing"));
  CHECK(list_checkpoints(run.path()).empty());
}

TEST_CASE("units without tensors may be passed or not") {
  const model::ModelShape shape = tied_shape();
  TinyStore whole(shape), read(shape);
  fill_store(shape, whole.store, 3);
  const TempFolder with, without;
  const auto expected = contents(save_whole(with.path(), 1, shape, whole.store).path);
  CheckpointWriter writer(without.path(), 1, shape, whole.store, "{}\n", model::hf_config_text(shape.architecture, "float32"));
  int left_out = 0;
  for (int u = 0; u < shape.store_unit_count(); ++u) {
    if (shape.store_units[static_cast<std::size_t>(u)].elements == 0) {
      ++left_out;
    } else {
      writer.unit(u);
    }
  }
  CHECK(left_out > 0);
  const CheckpointInfo info = writer.finish();
  CHECK(contents(info.path) == expected);
  (void)load_checkpoint(info, shape, read.store);
  CHECK(same_state(whole.store, read.store));
}

TEST_CASE("a host checks names and shapes of units that live elsewhere") {
  const ShardLimit shards(1);
  const model::ModelShape shape = tiny_shape("llama", DType::bf16);
  TinyStore whole(shape);
  fill_store(shape, whole.store, 1);
  const TempFolder run;
  const CheckpointInfo info = save_whole(run.path(), 1, shape, whole.store);
  // The first unit is not here; its table has one row more in the model than in the files.
  const Parts target(shape, 2);
  store::Store& second = target.store_of(1);
  REQUIRE_FALSE(second.has(0));
  model::ModelShape larger = shape;
  Shape& table = larger.store_units[0].parameters.front().shape;
  table = Shape{table[0] + 1, table[1]};
  CHECK(contains(error_line([&] { (void)load_checkpoint(info, larger, second); }), "has shape"));
  CHECK(contains(error_line([&] { load_model(info.path, larger, second); }), "has shape"));
  // Nor may moments and masters be of another shape than the weights.
  for (const char* suffix : {".exp_avg", ".exp_avg_sq", ".master"}) {
    const TempFolder odd;
    const CheckpointInfo copy{1, odd / "step-00000001"};
    std::filesystem::copy(info.path, copy.path);
    reshape_tensor(copy.path, shape.store_units[0].parameters.front().name + suffix);
    CHECK(contains(error_line([&] { (void)load_checkpoint(copy, shape, second); }), std::string(suffix) + "' has shape"));
  }
  larger.store_units[0].parameters.front().name = "another.weight";
  CHECK(contains(error_line([&] { (void)load_checkpoint(info, larger, second); }), "missing: 'another.weight'"));
  CHECK(contains(error_line([&] { load_model(info.path, larger, second); }), "missing: 'another.weight'"));
  for (int u = 0; u < shape.store_unit_count(); ++u) {
    if (second.has(u) && second.layout().slab_bytes(u, store::Plane::m) > 0) CHECK(second.master(u)[0] == 0.0F);
  }
}

}  // namespace spipe::io
