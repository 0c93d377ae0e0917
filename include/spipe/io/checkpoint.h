// Model folders (Hugging Face layout) and checkpoints (DESIGN section 9).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "spipe/base/file.h"
#include "spipe/model/families.h"
#include "spipe/model/shape.h"
#include "spipe/store/store.h"

namespace spipe::io {

// Loads parameters from a Hugging Face folder (model.safetensors, or an index with shards) into the store: master in fp32,
// compute copy rounded. Every parameter must be present with the right shape, every tensor of the files used or on the ignore
// list (CASES O14-O26: tied heads, missing shards, path escapes, stray tensors, GPT-2 prefixes and buffers). `vocab` padding is
// not done here. Of a store that has some of the units, those are filled; names and shapes are checked of all, values of the
// others are not read.
void load_model(const Path& folder, const model::ModelShape& shape, store::Store& store);

// The text files that make a checkpoint: trainer.json is an object of strings/numbers given by the caller as JSON text.
struct CheckpointInfo {
  std::uint64_t step = 0;
  Path path;
};

// Writes step-00001000 (its step in eight digits) in three phases so that a save can be spread over a running step:
//   begin -> unit(u) for every store unit with tensors in ascending order -> finish.
// Files are written in a temporary folder, fsynced, MANIFEST.json last, folder renamed, then `latest` replaced; nothing under
// the run folder changes before finish(). On an Error (disk full) the temporary folder is removed and older checkpoints stay.
//
// A store spread over several hosts has a writer on each, for the units that live there; files hold units of one host only. One
// of them leads: it is made first (it makes the folder), and finishes with what the others say of their parts:
//   leader begins -> the others begin -> unit(u) of the own units -> part_manifest() of the others -> leader finishes.
// The caller orders these phases. The run folder is on a file system that all hosts share: a writer that does not find the
// leader's folder, and a leader that does not find the others' files, throw an Error that says so. The leader may give up at
// any moment; writers that still live then fail at their next file, and must be gone before a step is saved anew.
struct CheckpointPart {
  std::vector<int> host_of_unit;  // the same on all; empty: all on host 0; -1 only for units without tensors
  int host = 0;
  bool leader = true;
};
class CheckpointWriter {
 public:
  CheckpointWriter(Path run_folder, std::uint64_t step, const model::ModelShape& shape, const store::Store& store,
                   std::string trainer_json, std::string config_json, CheckpointPart part = {});
  ~CheckpointWriter();  // removes what it has made (the leader: the temporary folder) when not finished
  // Every unit with tensors of this host, once, ascending; SPIPE_CHECKs that. A unit without tensors may be passed and does
  // nothing.
  void unit(int store_unit);
  // Not the leader: the files of this part (sizes, hashes, the weights' names), complete and synced, as text for the leader;
  // from then on they are the leader's.
  [[nodiscard]] std::string part_manifest();
  // The leader, with the texts of all other parts in any order.
  CheckpointInfo finish(const std::vector<std::string>& other_parts = {});
  // Bytes one checkpoint takes on disk at most, however many hosts write it.
  [[nodiscard]] static std::uint64_t predicted_bytes(const model::ModelShape& shape, const store::StoreFormat& format);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Complete checkpoints of a run folder (valid MANIFEST: names and sizes, not hashes), ascending by step. `skipped`
// receives one line per broken folder found ("step-00000300: MANIFEST.json missing").
[[nodiscard]] std::vector<CheckpointInfo> list_checkpoints(const Path& run_folder, std::vector<std::string>* skipped = nullptr);
// The newest complete checkpoint with matching hashes; nothing when there is none. Lines about skipped ones as above.
[[nodiscard]] std::optional<CheckpointInfo> newest_checkpoint(const Path& run_folder,
                                                              std::vector<std::string>* skipped = nullptr);
// Fills the store (master, moments, compute copy) and returns trainer.json's text. A checkpoint of another precision is
// converted through its fp32 master. It does not matter how many hosts wrote the checkpoint. Of a store that has some of the
// units, those are filled; names and shapes are checked of all, values of the others are not read.
[[nodiscard]] std::string load_checkpoint(const CheckpointInfo& checkpoint, const model::ModelShape& shape,
                                          store::Store& store);
// Removes all but the newest `keep` complete checkpoints (by step in the manifest; never what `latest` names, never the newest
// one whose hashes match, never foreign folders) and stale temporary folders of ours: no save may be in flight.
void prune_checkpoints(const Path& run_folder, int keep);

// Who uses a run folder now ("process 12 on host"), or nothing: no job, or a file system without locks.
[[nodiscard]] std::optional<std::string> run_lock_holder(const Path& run_folder);

// Exclusive lock of a run folder for this process's life; Error naming the holder when another job has it.
class RunLock {
 public:
  explicit RunLock(const Path& run_folder);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  int fd_ = -1;
};

}  // namespace spipe::io
