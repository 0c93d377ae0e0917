#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "spipe/io/checkpoint.h"
#include "spipe/io/safetensors.h"
#include "src/io/checkpoint_files.h"
#include "test_files.h"
#include "test_models.h"

namespace spipe::io {
namespace {

using test::contains;
using test::error_line;
using test::fill_store;
using test::read_file;
using test::same_state;
using test::ShardLimit;
using test::TempFolder;
using test::tiny_shape;
using test::TinyStore;
using test::write_file;

CheckpointInfo save(const std::filesystem::path& run, std::uint64_t step, const model::ModelShape& shape,
                    const store::Store& store) {
  const char* dtype = shape.compute == DType::bf16 ? "bfloat16" : "float32";
  CheckpointWriter writer(run, step, shape, store, "{\"step\": " + std::to_string(step) + "}\n",
                          model::hf_config_text(shape.architecture, dtype));
  for (int u = 0; u < shape.store_unit_count(); ++u) writer.unit(u);
  return writer.finish();
}

std::uint64_t bytes_in(const std::filesystem::path& folder) {
  std::uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) bytes += entry.file_size();
  return bytes;
}

TEST_CASE("a checkpoint gives back every bit of master, moments and compute copy") {
  for (const char* name : {"llama", "gpt2", "qwen2", "opt"}) {
    for (const DType compute : {DType::f32, DType::bf16}) {
      INFO(name << " " << dtype_name(compute));
      const model::ModelShape shape = tiny_shape(name, compute);
      TinyStore source(shape), target(shape);
      fill_store(shape, source.store, 1);
      const TempFolder run;
      const CheckpointInfo info = save(run.path(), 1000, shape, source.store);
      CHECK(info.step == 1000);
      CHECK(info.path.filename() == "step-00001000");
      CHECK(read_file(run / "latest") == "step-00001000\n");
      CHECK_FALSE(same_state(source.store, target.store));
      CHECK(load_checkpoint(info, shape, target.store) == "{\"step\": 1000}\n");
      CHECK(same_state(source.store, target.store));
      const std::uint64_t predicted = CheckpointWriter::predicted_bytes(shape, source.store.format());
      CHECK(bytes_in(info.path) <= predicted);
      CHECK(predicted < 2 * bytes_in(info.path));
      CHECK(std::distance(std::filesystem::directory_iterator(run.path()), {}) == 2);
    }
  }
}

TEST_CASE("a checkpoint is a model: its folder loads with config.json and Hugging Face names, sharded or not") {
  const model::ModelShape shape = tiny_shape("gpt2");
  TinyStore source(shape);
  fill_store(shape, source.store, 2);
  for (const std::uint64_t limit : {std::uint64_t{1} << 31, std::uint64_t{20'000}, std::uint64_t{1}}) {
    const ShardLimit shards(limit);
    const TempFolder run;
    const CheckpointInfo info = save(run.path(), 7, shape, source.store);
    const bool sharded = std::filesystem::exists(info.path / "model.safetensors.index.json");
    CHECK(sharded == (limit < (1U << 31)));
    CHECK(std::filesystem::exists(info.path / "model.safetensors") != sharded);
    const model::Architecture architecture = model::architecture_from_hf(info.path / "config.json");
    const model::ModelShape read = model::make_shape(architecture, shape.batch, DType::f32);
    TinyStore model(read), resumed(shape);
    load_model(info.path, read, model.store);
    for (int u = 0; u < shape.store_unit_count(); ++u) {
      CHECK(std::memcmp(model.store.master(u), source.store.master(u),
                        shape.store_units[static_cast<std::size_t>(u)].elements * 4) == 0);
    }
    (void)load_checkpoint(info, shape, resumed.store);
    CHECK(same_state(source.store, resumed.store));
  }
}

TEST_CASE("keys and types of the files") {
  const model::ModelShape shape = tiny_shape("llama", DType::bf16);
  TinyStore source(shape);
  fill_store(shape, source.store, 3);
  const TempFolder run;
  const CheckpointInfo info = save(run.path(), 1, shape, source.store);
  const SafetensorsFile weights(info.path / "model.safetensors"), state(info.path / "optimizer.safetensors");
  REQUIRE(weights.find("model.norm.weight") != nullptr);
  CHECK(weights.find("model.norm.weight")->dtype == DType::bf16);
  CHECK(weights.metadata().at("format") == "pt");
  for (const char* suffix : {".master", ".exp_avg", ".exp_avg_sq"}) {
    REQUIRE(state.find("model.norm.weight" + std::string(suffix)) != nullptr);
    CHECK(state.find("model.norm.weight" + std::string(suffix))->dtype == DType::f32);
  }
  CHECK(state.tensors().size() == 3 * weights.tensors().size());
  const model::ModelShape fp32 = tiny_shape("llama");
  TinyStore plain(fp32);
  const CheckpointInfo plain_info = save(run.path(), 2, fp32, plain.store);
  CHECK(SafetensorsFile(plain_info.path / "optimizer.safetensors").find("model.norm.weight.master") == nullptr);
}

TEST_CASE("shards are cut between units and hold at least one") {
  const auto names = [](const std::vector<Shard>& shards) {
    std::vector<std::string> result;
    for (const Shard& s : shards)
      result.push_back(std::to_string(s.units.front()) + "-" + std::to_string(s.units.back() + 1) + " " + s.name);
    return result;
  };
  CHECK(names(cut_shards("model", {5, 5}, {}, 10)) == std::vector<std::string>{"0-2 model.safetensors"});
  CHECK(names(cut_shards("model", {5, 6, 0, 20, 1}, {}, 10)) ==
        std::vector<std::string>{"0-1 model-00001-of-00004.safetensors", "1-2 model-00002-of-00004.safetensors",
                                 "3-4 model-00003-of-00004.safetensors", "4-5 model-00004-of-00004.safetensors"});
  CHECK(names(cut_shards("optimizer", {0, 0, 30}, {}, 10)) == std::vector<std::string>{"2-3 optimizer.safetensors"});
}

TEST_CASE("a checkpoint of another precision is converted through its master") {
  const model::ModelShape fp32 = tiny_shape("llama"), bf16 = tiny_shape("llama", DType::bf16);
  TinyStore a(fp32), b(bf16), from_a(bf16), from_b(fp32);
  fill_store(fp32, a.store, 4);
  fill_store(bf16, b.store, 4);
  const TempFolder run;
  (void)load_checkpoint(save(run.path(), 1, fp32, a.store), bf16, from_a.store);
  (void)load_checkpoint(save(run.path(), 2, bf16, b.store), fp32, from_b.store);
  CHECK(same_state(from_a.store, b.store));
  CHECK(same_state(from_b.store, a.store));
}

namespace {

store::StoreFormat form(DType compute, bool split, bool second, DType moment) {
  store::StoreFormat format = store::store_format(compute);
  format.split_master = split;
  format.separate_master = format.separate_master && !split;
  format.second_moment = second;
  format.moment = moment;
  return format;
}

}  // namespace

TEST_CASE("a split master is saved joined, so that both forms resume each other's checkpoints to the bit") {
  const model::ModelShape shape = tiny_shape("llama", DType::bf16);
  const store::StoreFormat split = form(DType::bf16, true, true, DType::f32), whole = store::store_format(DType::bf16);
  TinyStore a(shape, split), b(shape, whole), from_a(shape, whole), from_b(shape, split), again(shape, split);
  fill_store(shape, a.store, 6);
  fill_store(shape, b.store, 6);
  const TempFolder run;
  const CheckpointInfo of_a = save(run.path(), 1, shape, a.store), of_b = save(run.path(), 2, shape, b.store);
  for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
    CHECK(read_file(of_a.path / file) == read_file(of_b.path / file));
  }
  (void)load_checkpoint(of_a, shape, from_a.store);
  (void)load_checkpoint(of_b, shape, from_b.store);
  (void)load_checkpoint(of_a, shape, again.store);
  CHECK(same_state(from_a.store, b.store));
  CHECK(same_state(from_b.store, a.store));
  CHECK(same_state(again.store, a.store));
  TinyStore model(shape, split);
  load_model(of_a.path, shape, model.store);  // the weights are bf16: low halves are zero
  std::vector<float> values(8), rounded(8);
  model.store.read_master(1, 0, values);
  a.store.read_master(1, 0, rounded);
  for (float& value : rounded) value = f32_from_bf16(bf16_from_f32_half_up(value));
  CHECK(values == rounded);
}

TEST_CASE("rules with one moment save one, bf16 moments are BF16, and predictions know it") {
  const model::ModelShape shape = tiny_shape("llama", DType::bf16);
  const store::StoreFormat format = form(DType::bf16, true, false, DType::bf16);
  TinyStore source(shape, format), target(shape, format);
  fill_store(shape, source.store, 7);
  const TempFolder run;
  const CheckpointInfo info = save(run.path(), 1, shape, source.store);
  const SafetensorsFile state(info.path / "optimizer.safetensors");
  REQUIRE(state.find("model.norm.weight.exp_avg") != nullptr);
  CHECK(state.find("model.norm.weight.exp_avg")->dtype == DType::bf16);
  CHECK(state.find("model.norm.weight.master")->dtype == DType::f32);
  CHECK(state.find("model.norm.weight.exp_avg_sq") == nullptr);
  (void)load_checkpoint(info, shape, target.store);
  CHECK(same_state(source.store, target.store));
  const std::uint64_t predicted = CheckpointWriter::predicted_bytes(shape, format);
  CHECK(bytes_in(info.path) <= predicted);
  CHECK(predicted < 2 * bytes_in(info.path));
}

TEST_CASE("a change of rule or moments that the run permits: second moments may go but not come, types are converted") {
  const model::ModelShape shape = tiny_shape("llama");
  const store::StoreFormat adam = store::store_format(DType::f32), lion = form(DType::f32, false, false, DType::f32);
  TinyStore a(shape, adam), l(shape, lion), wide(shape, adam), narrow(shape, form(DType::f32, false, true, DType::bf16));
  fill_store(shape, a.store, 8);
  fill_store(shape, narrow.store, 8);
  const TempFolder run;
  const CheckpointInfo of_a = save(run.path(), 1, shape, a.store);
  (void)load_checkpoint(of_a, shape, l.store);
  CHECK(std::memcmp(l.store.slab(1, store::Plane::m).data, a.store.slab(1, store::Plane::m).data, 4096) == 0);
  const CheckpointInfo of_l = save(run.path(), 2, shape, l.store);
  CHECK(contains(error_line([&] { (void)load_checkpoint(of_l, shape, wide.store); }),
                 "has no second moments (NAME.exp_avg_sq), which this run's update rule needs"));
  TinyStore rounded(shape, narrow.store.format());
  (void)load_checkpoint(of_a, shape, rounded.store);
  CHECK(same_state(rounded.store, narrow.store));
  (void)load_checkpoint(save(run.path(), 3, shape, narrow.store), shape, wide.store);
  const auto* from = static_cast<const std::uint16_t*>(narrow.store.slab(1, store::Plane::v).data);
  for (int i = 0; i < 100; ++i)
    CHECK(static_cast<float*>(wide.store.slab(1, store::Plane::v).data)[i] == f32_from_bf16(from[i]));
}

TEST_CASE("a checkpoint of another model is refused by tensor name") {
  const model::ModelShape llama = tiny_shape("llama"), qwen = tiny_shape("qwen2");
  TinyStore a(llama), b(qwen);
  const TempFolder run;
  const CheckpointInfo info = save(run.path(), 1, llama, a.store);
  CHECK(contains(error_line([&] { (void)load_checkpoint(info, qwen, b.store); }), "tensors of the model are missing"));
  model::Architecture wider = llama.architecture;
  wider.vocab_size += 1;
  const model::ModelShape wide = model::make_shape(wider, llama.batch, DType::f32);
  TinyStore c(wide);
  CHECK(contains(error_line([&] { (void)load_checkpoint(info, wide, c.store); }),
                 "'model.embed_tokens.weight' has shape [128, 32]"));
}

TEST_CASE("the newest complete checkpoint is taken, and what was skipped is said (CASES O41)") {
  const model::ModelShape shape = tiny_shape("llama");
  TinyStore store(shape);
  const TempFolder run;
  for (const std::uint64_t step : {100, 200, 300}) {
    fill_store(shape, store.store, static_cast<std::uint32_t>(step));
    (void)save(run.path(), step, shape, store.store);
  }
  const auto newest = [&](std::vector<std::string>& skipped) {
    skipped.clear();
    const auto found = newest_checkpoint(run.path(), &skipped);
    return found ? found->step : 0;
  };
  std::vector<std::string> skipped;
  CHECK(newest(skipped) == 300);
  CHECK(skipped.empty());
  const std::filesystem::path third = run / "step-00000300";

  SECTION("the newest lacks its manifest") {
    std::filesystem::remove(third / "MANIFEST.json");
    CHECK(newest(skipped) == 200);
    CHECK(skipped == std::vector<std::string>{"step-00000300: MANIFEST.json missing"});
  }
  SECTION("a file of 0 bytes") {
    write_file(third / "optimizer.safetensors", "");
    CHECK(newest(skipped) == 200);
    REQUIRE(skipped.size() == 1);
    CHECK(contains(skipped[0], "step-00000300: optimizer.safetensors: expected"));
    CHECK(contains(skipped[0], "file has 0"));
  }
  SECTION("one byte flipped") {
    std::string bytes = read_file(third / "model.safetensors");
    bytes[bytes.size() / 2] ^= 1;
    write_file(third / "model.safetensors", bytes);
    CHECK(list_checkpoints(run.path()).size() == 3);  // sizes alone do not show it
    CHECK(newest(skipped) == 200);
    REQUIRE(skipped.size() == 1);
    CHECK(contains(skipped[0], "step-00000300: model.safetensors: its bytes have changed"));
  }
  SECTION("a missing file, a cut manifest, a manifest of nothing") {
    std::filesystem::remove(third / "trainer.json");
    const std::string manifest = read_file(run / "step-00000200/MANIFEST.json");
    write_file(run / "step-00000200/MANIFEST.json", manifest.substr(0, manifest.size() / 2));
    CHECK(newest(skipped) == 100);
    CHECK(skipped.size() == 2);
    write_file(run / "step-00000100/MANIFEST.json", R"({"format": 1, "step": 100, "files": {}})");
    CHECK(newest(skipped) == 0);
    CHECK(skipped.size() == 3);
  }
  SECTION("manifests that are not to be believed") {
    const std::string good = read_file(third / "MANIFEST.json");
    const auto with = [&](const std::string& from, const std::string& to) {
      std::string text = good;
      text.replace(text.find(from), from.size(), to);
      write_file(third / "MANIFEST.json", text);
      CHECK(newest(skipped) == 200);
      REQUIRE(skipped.size() == 1);
      return skipped[0];
    };
    CHECK(contains(with("\"format\": 1", "\"format\": 2"), "format 2"));
    CHECK(contains(with("\"config.json\"", "\"../config.json\""), "outside the folder"));
    CHECK(contains(with("\"step\": 300", "\"step\": \"x\""), "wrong type"));
    CHECK(contains(with("\"xxh3\": \"", "\"xxh3\": \"z"), "16 hex digits"));
    CHECK(contains(with("\"trainer.json\"", "\"trainer.jsn\""), "does not list trainer.json"));
  }
  SECTION("latest names a folder that is not there") {
    std::filesystem::remove_all(third);
    CHECK(newest(skipped) == 200);
    CHECK(skipped == std::vector<std::string>{"latest names 'step-00000300', which is not there"});
  }
  SECTION("none at all, and no run folder") {
    const TempFolder empty;
    CHECK_FALSE(newest_checkpoint(empty.path()));
    CHECK_FALSE(newest_checkpoint(empty / "nothing"));
  }
}

TEST_CASE("keeping the last ones goes by step numbers and touches only our folders (CASES O48)") {
  const model::ModelShape shape = tiny_shape("llama");
  TinyStore store(shape);
  const TempFolder run, elsewhere;
  const CheckpointInfo foreign = save(elsewhere.path(), 5, shape, store.store);
  std::vector<std::uint64_t> steps{8, 9, 10, 11, 99, 100};
  for (const std::uint64_t step : steps) (void)save(run.path(), step, shape, store.store);
  // Times say the opposite of steps.
  for (std::size_t i = 0; i < steps.size(); ++i) {
    std::filesystem::last_write_time(run / step_name(steps[i]),
                                     std::filesystem::file_time_type::clock::now() - std::chrono::hours(i));
  }
  std::filesystem::create_directory(run / "step-notes");
  write_file(run / "step-notes/mine.txt", "x");
  std::filesystem::create_directory_symlink(foreign.path, run / "step-00000005");
  std::filesystem::create_directory_symlink(run / "step-notes", run / ".tmp-step-link");
  std::filesystem::create_directory(run / "step-00000001");  // not complete: not counted, not removed
  std::filesystem::create_directory(run / ".tmp-step-00000050");
  write_file(run / ".tmp-step-00000050/model.safetensors", "half");
  write_file(run / "latest", "step-00000009\n");

  prune_checkpoints(run.path(), 2);
  std::vector<std::uint64_t> left;
  for (const CheckpointInfo& info : list_checkpoints(run.path())) left.push_back(info.step);
  CHECK(left == std::vector<std::uint64_t>{9, 99, 100});  // 9 is what `latest` names
  CHECK(read_file(run / "step-notes/mine.txt") == "x");
  CHECK(std::filesystem::is_symlink(run / "step-00000005"));
  CHECK(std::filesystem::exists(foreign.path / "MANIFEST.json"));
  CHECK(std::filesystem::exists(run / "step-00000001"));
  CHECK_FALSE(std::filesystem::exists(run / ".tmp-step-00000050"));
  for (const auto& entry : std::filesystem::directory_iterator(run.path())) {
    CHECK_FALSE((entry.path().filename().string().starts_with(".tmp-step-") && !entry.is_symlink()));
  }

  prune_checkpoints(run.path(), 5);
  CHECK(list_checkpoints(run.path()).size() == 3);
  write_file(run / "latest", "step-00000100\n");
  prune_checkpoints(run.path(), 1);
  CHECK(list_checkpoints(run.path()).size() == 1);
}

TEST_CASE("the only good checkpoint is never removed in favour of a damaged newer one") {
  const model::ModelShape shape = tiny_shape("llama");
  TinyStore store(shape);
  const TempFolder run;
  (void)save(run.path(), 1, shape, store.store);
  (void)save(run.path(), 2, shape, store.store);
  std::string bytes = read_file(run / "step-00000002/model.safetensors");
  bytes[bytes.size() - 1] ^= 1;
  write_file(run / "step-00000002/model.safetensors", bytes);
  const auto newest = newest_checkpoint(run.path());  // as a run does before it prunes
  REQUIRE(newest);
  CHECK(newest->step == 1);
  prune_checkpoints(run.path(), 1);
  CHECK(std::filesystem::exists(run / "step-00000001/MANIFEST.json"));
  (void)save(run.path(), 3, shape, store.store);
  prune_checkpoints(run.path(), 1);
  CHECK(list_checkpoints(run.path()).size() == 1);
  CHECK(newest_checkpoint(run.path())->step == 3);
}

TEST_CASE("saving a step again replaces its folder - what is not a checkpoint is left alone") {
  const model::ModelShape shape = tiny_shape("llama");
  TinyStore store(shape), read(shape);
  const TempFolder run;
  (void)save(run.path(), 4, shape, store.store);
  fill_store(shape, store.store, 9);
  const CheckpointInfo again = save(run.path(), 4, shape, store.store);
  (void)load_checkpoint(again, shape, read.store);
  CHECK(same_state(store.store, read.store));
  CHECK(std::distance(std::filesystem::directory_iterator(run.path()), {}) == 2);

  std::filesystem::create_directory(run / "step-00000005");
  write_file(run / "step-00000005/mine.txt", "x");
  CHECK(contains(error_line([&] { (void)save(run.path(), 5, shape, store.store); }), "no checkpoint itself"));
  CHECK(read_file(run / "step-00000005/mine.txt") == "x");
  write_file(run / "step-00000006", "x");
  CHECK(contains(error_line([&] { (void)save(run.path(), 6, shape, store.store); }), "no checkpoint itself"));
}

TEST_CASE("a run folder has one job at a time, and the other one is named") {
  const TempFolder run;
  {
    const RunLock lock(run.path());
    const std::string line = error_line([&] { const RunLock second(run.path()); });
    CHECK(contains(line, "another job is using this run folder: process " + std::to_string(getpid()) + " on "));
    CHECK(contains(line, run.path().string()));
  }
  CHECK_NOTHROW(RunLock(run.path()));
  // A killed holder leaves no lock.
  const pid_t child = fork();
  if (child == 0) {
    const RunLock lock(run.path());
    _exit(0);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK_NOTHROW(RunLock(run.path()));
  CHECK(contains(error_line([&] { const RunLock lock(run / "absent"); }), "cannot create the lock file"));
}

}  // namespace
}  // namespace spipe::io
