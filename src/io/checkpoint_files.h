// What a checkpoint folder consists of: names, manifest, shards. Internal to io/, shared by writing, listing and loading.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "spipe/base/file.h"
#include "spipe/model/shape.h"
#include "spipe/store/store.h"

namespace spipe::io {

inline constexpr const char* kConfigFile = "config.json";
inline constexpr const char* kTrainerFile = "trainer.json";
inline constexpr const char* kManifestFile = "MANIFEST.json";
inline constexpr const char* kWeightIndexFile = "model.safetensors.index.json";
inline constexpr const char* kLatestFile = "latest";
// Folders under construction and folders being removed begin with this; whatever begins so is rubbish after a crash.
inline constexpr const char* kTemporaryPrefix = ".tmp-step-";

[[nodiscard]] std::string step_name(std::uint64_t step);  // "step-00001000"
// Whether a name is "step-" and digits only: other folders are the user's.
[[nodiscard]] bool is_step_name(const std::string& name);

struct FileEntry {
  std::uint64_t bytes = 0, hash = 0;
};
struct Manifest {
  std::uint64_t step = 0;
  std::map<std::string, FileEntry> files;  // every file of the folder but the manifest
};
[[nodiscard]] std::string manifest_text(const Manifest& manifest);
// Error when it is missing, broken, of another version, or names files outside the folder.
[[nodiscard]] Manifest read_manifest(const Path& folder);
// Files by kind, ascending: "model" or "optimizer" .safetensors.
[[nodiscard]] std::vector<std::string> files_of_kind(const Manifest& manifest, const std::string& kind);

// The files of one kind: units of one host, cut where a file would pass the limit. A file has at least one unit.
struct Shard {
  int host = 0;
  std::vector<int> units;  // with tensors, ascending
  std::string name;
};
// Host after host; units without bytes are in no file. `host_of_unit`: empty, all on host 0.
[[nodiscard]] std::vector<Shard> cut_shards(const std::string& kind, const std::vector<std::uint64_t>& unit_bytes,
                                            const std::vector<int>& host_of_unit, std::uint64_t limit);

// What an optimizer file holds of a parameter: the plane, under the parameter's name plus this. A master is fp32 there, in
// whatever form the store keeps it.
struct StatePlane {
  store::Plane plane;
  const char* suffix;
  DType dtype;  // in the file
};
[[nodiscard]] std::vector<StatePlane> state_planes(const store::StoreFormat& format);

// Remembers that a folder's bytes are as its manifest says: just written by this process, or read and hashed by it.
void mark_verified(const Path& folder);

// For tests only: called at every point between two changes of the disk; may throw or end the process.
struct CheckpointHooks {
  void (*fault)(const char* point) = nullptr;
  std::uint64_t shard_bytes = 2ULL << 30;
};
[[nodiscard]] CheckpointHooks& checkpoint_hooks();

}  // namespace spipe::io
