// Writing a checkpoint: everything goes into a temporary folder; what makes it a checkpoint is the manifest, written last, and
// the rename after it. Each step is synced before the next, so a crash at any point leaves the older checkpoints as they are.
#include <fcntl.h>
#include <stdio.h>

#include <cerrno>
#include <cstring>
#include <optional>

#include "checkpoint_files.h"
#include "json_guard.h"
#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/base/units.h"
#include "spipe/io/checkpoint.h"
#include "spipe/io/safetensors.h"
#include "tensor_set.h"

namespace spipe::io {
namespace {

constexpr std::uint64_t kJoinedAtATime = 1 << 18;  // elements of a split master
constexpr const char* kShareHint = "all hosts need checkpoint.dir on one shared file system";

void fault(const char* point) {
  if (checkpoint_hooks().fault != nullptr) checkpoint_hooks().fault(point);
}

TensorInfo tensor_info(const std::string& name, DType dtype, const Shape& shape) {
  TensorInfo info{.name = name, .dtype = dtype, .shape = {}};
  for (int i = 0; i < shape.rank(); ++i) info.shape.push_back(static_cast<std::uint64_t>(shape[i]));
  return info;
}

// Bytes per element of the model files and of the optimizer files.
std::uint64_t weight_bytes(const store::StoreFormat& format) { return dtype_size(format.compute); }
std::uint64_t state_bytes(const store::StoreFormat& format) {
  std::uint64_t bytes = 0;
  for (const StatePlane& plane : state_planes(format)) bytes += dtype_size(plane.dtype);
  return bytes;
}

std::vector<std::uint64_t> unit_bytes(const model::ModelShape& shape, std::uint64_t bytes_per_element) {
  std::vector<std::uint64_t> bytes;
  for (const model::StoreUnit& unit : shape.store_units) {
    bytes.push_back(0);
    for (const model::Parameter& p : unit.parameters) {
      bytes.back() = checked_add(bytes.back(), checked_mul(p.elements(), bytes_per_element));
    }
  }
  return bytes;
}

// A checkpoint may take the place of an older one of the same step, never of something that is not ours.
void check_target(const Path& target) {
  std::error_code ignored;
  const auto status = std::filesystem::symlink_status(target, ignored);
  if (!std::filesystem::exists(status)) return;
  bool ours = std::filesystem::is_directory(status) && std::filesystem::is_empty(target, ignored);
  for (const char* name : {kManifestFile, kTrainerFile, kConfigFile}) {
    ours = ours || (std::filesystem::is_directory(status) && std::filesystem::exists(target / name));
  }
  if (!ours) throw Error("is in the way of a checkpoint, and no checkpoint itself", target.string(), "move it away");
}

// Puts `from` in the place of `to`. An older folder there (the same step, saved again after a resume from an earlier one)
// changes places with it, so that no moment is without either.
void rename_folder(const Path& from, const Path& to) {
  if (!std::filesystem::exists(std::filesystem::symlink_status(to))) {
    std::filesystem::rename(from, to);
    return;
  }
  if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) != 0) {
    // A file system without exchange: the new one is complete in its temporary folder while the old one goes.
    std::filesystem::remove_all(to);
    std::filesystem::rename(from, to);
    return;
  }
  std::filesystem::remove_all(from);
}

}  // namespace

struct CheckpointWriter::Impl {
  Path run_folder, temporary;
  std::uint64_t step = 0;
  const model::ModelShape* shape = nullptr;
  const store::Store* store = nullptr;
  std::string trainer_json, config_json;

  // One kind of file (weights or optimizer state): its shards, and the one being written.
  struct Series {
    std::vector<Shard> shards;
    std::size_t next = 0;
    std::optional<SafetensorsWriter> writer;
  };
  Series weights, state;
  CheckpointPart part;
  std::vector<int> units;     // of this part, with tensors, ascending
  std::size_t next_unit = 0;  // in `units`
  bool created = false, finished = false;
  Manifest manifest;
  nlohmann::json weight_map = nlohmann::json::object();

  ~Impl();
  [[nodiscard]] const model::StoreUnit& unit(int u) const { return shape->store_units[static_cast<std::size_t>(u)]; }
  [[nodiscard]] std::vector<TensorInfo> weight_tensors(const Shard& shard) const;
  [[nodiscard]] std::vector<TensorInfo> state_tensors(const Shard& shard) const;
  void open_if_first(Series& series, int u);
  void close_if_last(Series& series, int u);
  void write_plane(SafetensorsWriter& writer, int u, const model::Parameter& p, store::Plane plane, const std::string& name);
  void write_text(const char* name, const std::string& text);
  void write_weight_index();
  void check_complete() const;
  void take_part(const std::string& text);
};

// Also when the constructor fails half-way: a writer that did not finish leaves nothing.
CheckpointWriter::Impl::~Impl() {
  if (finished || !created) return;
  weights.writer.reset();
  state.writer.reset();
  std::error_code ignored;
  if (part.leader) {
    std::filesystem::remove_all(temporary, ignored);
    return;
  }
  for (const Series* series : {&weights, &state}) {
    for (const Shard& shard : series->shards) {
      if (shard.host == part.host) std::filesystem::remove(temporary / shard.name, ignored);
    }
  }
}

std::vector<TensorInfo> CheckpointWriter::Impl::weight_tensors(const Shard& shard) const {
  std::vector<TensorInfo> tensors;
  for (const int u : shard.units) {
    for (const model::Parameter& p : unit(u).parameters) {
      tensors.push_back(tensor_info(p.name, store->format().compute, p.shape));
    }
  }
  return tensors;
}

std::vector<TensorInfo> CheckpointWriter::Impl::state_tensors(const Shard& shard) const {
  std::vector<TensorInfo> tensors;
  for (const int u : shard.units) {
    for (const model::Parameter& p : unit(u).parameters) {
      for (const StatePlane& plane : state_planes(store->format())) {
        tensors.push_back(tensor_info(p.name + plane.suffix, plane.dtype, p.shape));
      }
    }
  }
  return tensors;
}

void CheckpointWriter::Impl::open_if_first(Series& series, int u) {
  const Shard& shard = series.shards[series.next];
  if (u != shard.units.front()) return;
  fault("before a shard");
  const bool is_weights = &series == &weights;
  // "format" is what Hugging Face's loaders look for.
  series.writer.emplace(temporary / shard.name, is_weights ? weight_tensors(shard) : state_tensors(shard),
                        std::map<std::string, std::string>{{"format", "pt"}});
}

void CheckpointWriter::Impl::close_if_last(Series& series, int u) {
  const Shard& shard = series.shards[series.next];
  if (u != shard.units.back()) return;
  series.writer->finish();
  series.writer.reset();
  const Path path = temporary / shard.name;
  manifest.files[shard.name] = {spipe::file_size(path), hash64_file(path)};
  ++series.next;
  fault("after a shard");
}

void CheckpointWriter::Impl::write_plane(SafetensorsWriter& writer, int u, const model::Parameter& p, store::Plane plane,
                                         const std::string& name) {
  if (plane == store::Plane::master && store->format().split_master) {
    std::vector<float> joined(std::min(p.elements(), kJoinedAtATime));
    for (std::uint64_t first = 0; first < p.elements(); first += joined.size()) {
      const std::span<float> some = std::span(joined).first(std::min<std::uint64_t>(joined.size(), p.elements() - first));
      store->read_master(u, p.offset + first, some);
      writer.write(name, std::as_bytes(some));
    }
    return;
  }
  const Ptr slab = store->slab(u, plane);
  const std::uint64_t size = dtype_size(slab.dtype);
  writer.write(name, {static_cast<const std::byte*>(slab.data) + p.offset * size, p.elements() * size});
}

void CheckpointWriter::Impl::write_text(const char* name, const std::string& text) {
  FileWriter file(temporary / name);
  file.write(std::as_bytes(std::span(text)));
  file.finish();
  if (name != std::string(kManifestFile)) manifest.files[name] = {text.size(), hash64(std::as_bytes(std::span(text)))};
  fault(name);
}

void CheckpointWriter::Impl::write_weight_index() {
  if (weights.shards.size() == 1) return;
  std::uint64_t total = 0;
  for (const std::uint64_t bytes : unit_bytes(*shape, weight_bytes(store->format()))) total += bytes;
  const nlohmann::json index{{"metadata", {{"total_size", total}}}, {"weight_map", weight_map}};
  write_text(kWeightIndexFile, index.dump(1) + "\n");
}

CheckpointWriter::CheckpointWriter(Path run_folder, std::uint64_t step, const model::ModelShape& shape,
                                   const store::Store& store, std::string trainer_json, std::string config_json,
                                   CheckpointPart part)
    : impl_(std::make_unique<Impl>()) {
  Impl& impl = *impl_;
  impl.run_folder = std::move(run_folder);
  impl.temporary = impl.run_folder / (kTemporaryPrefix + step_name(step).substr(5));
  impl.step = impl.manifest.step = step;
  impl.shape = &shape;
  impl.store = &store;
  impl.trainer_json = std::move(trainer_json);
  impl.config_json = std::move(config_json);
  const std::uint64_t limit = checkpoint_hooks().shard_bytes;
  impl.weights.shards = cut_shards("model", unit_bytes(shape, weight_bytes(store.format())), part.host_of_unit, limit);
  impl.state.shards = cut_shards("optimizer", unit_bytes(shape, state_bytes(store.format())), part.host_of_unit, limit);
  for (Impl::Series* series : {&impl.weights, &impl.state}) {
    while (series->next < series->shards.size() && series->shards[series->next].host != part.host) ++series->next;
  }
  for (const Shard& shard : impl.weights.shards) {
    if (shard.host == part.host) impl.units.insert(impl.units.end(), shard.units.begin(), shard.units.end());
  }
  impl.part = std::move(part);
  if (!impl.part.leader) {
    if (!std::filesystem::is_directory(impl.temporary)) {
      throw Error("the folder that the first host made for a checkpoint is not here", impl.temporary.string(), kShareHint);
    }
    impl.created = true;
    return;
  }

  check_target(impl.run_folder / step_name(step));
  const std::uint64_t needed = predicted_bytes(shape, store.format());
  if (const std::uint64_t free = free_disk_bytes(impl.run_folder); free < needed) {
    throw Error("a checkpoint needs " + format_bytes(needed) + " (" + std::to_string(needed) + " bytes), the disk has " +
                    format_bytes(free) + " (" + std::to_string(free) + " bytes) free",
                impl.run_folder.string(), "free some space or set checkpoint.dir; older checkpoints are intact");
  }
  std::error_code failed;
  std::filesystem::remove_all(impl.temporary, failed);
  std::filesystem::create_directory(impl.temporary, failed);
  if (failed) throw Error("cannot create the folder of a checkpoint: " + failed.message(), impl.temporary.string());
  impl.created = true;
  fault("folder created");
}

CheckpointWriter::~CheckpointWriter() = default;

void CheckpointWriter::unit(int store_unit) {
  Impl& impl = *impl_;
  SPIPE_CHECK(store_unit >= 0 && store_unit < impl.shape->store_unit_count(), "no such store unit");
  if (impl.unit(store_unit).parameters.empty()) return;
  SPIPE_CHECK(!impl.finished && impl.next_unit < impl.units.size() && impl.units[impl.next_unit] == store_unit,
              "units of this host are saved once, in ascending order; store unit " + std::to_string(store_unit) + " came");
  ++impl.next_unit;
  impl.open_if_first(impl.weights, store_unit);
  impl.open_if_first(impl.state, store_unit);
  for (const model::Parameter& p : impl.unit(store_unit).parameters) {
    impl.write_plane(*impl.weights.writer, store_unit, p, store::Plane::compute, p.name);
    impl.weight_map[p.name] = impl.weights.shards[impl.weights.next].name;
    for (const StatePlane& plane : state_planes(impl.store->format())) {
      impl.write_plane(*impl.state.writer, store_unit, p, plane.plane, p.name + plane.suffix);
    }
  }
  fault("after a unit");
  impl.close_if_last(impl.weights, store_unit);
  impl.close_if_last(impl.state, store_unit);
}

void CheckpointWriter::Impl::check_complete() const {
  SPIPE_CHECK(next_unit == units.size(), "store unit " + std::to_string(units[next_unit]) + " was left out of a checkpoint");
}

// What another writer says of its files. They must be in the leader's folder, or the manifest would promise what is not there.
void CheckpointWriter::Impl::take_part(const std::string& text) {
  const nlohmann::json other = nlohmann::json::parse(text, nullptr, false);
  SPIPE_CHECK(other.is_object() && other.contains("files") && other.contains("weight_map"), "not a part of a checkpoint");
  for (const auto& [name, entry] : other.at("files").items()) {
    const FileEntry file{entry.at(0).get<std::uint64_t>(), entry.at(1).get<std::uint64_t>()};
    SPIPE_CHECK(manifest.files.emplace(name, file).second, "two parts of a checkpoint have " + name);
    std::error_code failed;
    const std::uint64_t bytes = std::filesystem::file_size(temporary / name, failed);
    if (!failed && bytes == file.bytes) continue;
    const std::string here = failed ? "it is not here (" + failed.message() + ")" : std::to_string(bytes) + " are here";
    throw Error("another host wrote " + std::to_string(file.bytes) + " bytes, " + here, (temporary / name).string(),
                kShareHint);
  }
  weight_map.update(other.at("weight_map"));
}

std::string CheckpointWriter::part_manifest() {
  Impl& impl = *impl_;
  SPIPE_CHECK(!impl.part.leader && !impl.finished, "a part is told once, and not by the leader");
  impl.check_complete();
  // The leader's sync of the folder need not cover names that were made on this host.
  fsync_directory(impl.temporary);
  fault("after a part");
  nlohmann::json files = nlohmann::json::object();
  for (const auto& [name, entry] : impl.manifest.files) files[name] = {entry.bytes, entry.hash};
  impl.finished = true;
  return nlohmann::json{{"files", files}, {"weight_map", impl.weight_map}}.dump();
}

CheckpointInfo CheckpointWriter::finish(const std::vector<std::string>& other_parts) {
  Impl& impl = *impl_;
  SPIPE_CHECK(impl.part.leader && !impl.finished, "a checkpoint is finished once, by its leader");
  impl.check_complete();
  for (const std::string& text : other_parts) impl.take_part(text);
  for (const Impl::Series* series : {&impl.weights, &impl.state}) {
    for (const Shard& shard : series->shards) {
      SPIPE_CHECK(impl.manifest.files.contains(shard.name), "the part of host " + std::to_string(shard.host) + " is missing");
    }
  }
  SPIPE_CHECK(impl.manifest.files.size() == impl.weights.shards.size() + impl.state.shards.size(),
              "a part of another checkpoint");
  impl.write_weight_index();
  impl.write_text(kConfigFile, impl.config_json);
  impl.write_text(kTrainerFile, impl.trainer_json);
  fsync_directory(impl.temporary);
  fault("before the manifest");
  impl.write_text(kManifestFile, manifest_text(impl.manifest));
  fsync_directory(impl.temporary);
  fault("before the rename");
  const Path target = impl.run_folder / step_name(impl.step);
  try {
    rename_folder(impl.temporary, target);
  } catch (const std::filesystem::filesystem_error& error) {
    throw Error("cannot rename the finished checkpoint: " + error.code().message(), target.string());
  }
  impl.finished = true;
  mark_verified(target);
  fsync_directory(impl.run_folder);
  fault("after the rename");
  write_text_atomic(impl.run_folder / kLatestFile, step_name(impl.step) + "\n");
  fault("after latest");
  return {impl.step, target};
}

std::uint64_t CheckpointWriter::predicted_bytes(const model::ModelShape& shape, const store::StoreFormat& format) {
  constexpr std::uint64_t kBlock = 4096;
  std::uint64_t bytes = 16 * kBlock;  // trainer.json, config.json, MANIFEST.json, folders, and their last blocks
  const std::uint64_t states = state_planes(format).size();
  for (const model::StoreUnit& unit : shape.store_units) {
    for (const model::Parameter& p : unit.parameters) {
      bytes = checked_add(bytes, checked_mul(p.elements(), weight_bytes(format) + state_bytes(format)));
      // Its entries in the headers (name, type, shape, offsets) and in the index.
      bytes += (states + 2) * (p.name.size() + 160);
    }
    bytes += 2 * kBlock;  // the last blocks of its shards
  }
  return bytes;
}

}  // namespace spipe::io
