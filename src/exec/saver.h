// Saves of a run: begun before a step, written unit by unit by that step's io stream, finished in the background.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <future>
#include <memory>
#include <optional>

#include "resume.h"
#include "spipe/comm/world.h"
#include "spipe/exec/run_setup.h"
#include "spipe/io/checkpoint.h"
#include "spipe/store/store.h"

namespace spipe::exec {

// On every rank; one rank of each host writes the units of its host, rank 0 makes a checkpoint of it.
class Saver {
 public:
  struct Saved {
    std::uint64_t step = 0;
    std::filesystem::path path;
    double seconds = 0;
  };
  Saver(const RunSetup& setup, const store::Store& store, comm::World& world) : setup_(setup), store_(store), world_(world) {}
  // The step of the newest save, finished or not.
  [[nodiscard]] std::optional<std::uint64_t> step() const { return step_; }
  void loaded(std::uint64_t step) { step_ = step; }  // a checkpoint of this step is there already

  // Collective; the save before must have been taken. end() returns once the step's part of the work is done.
  void begin(const TrainerState& state);
  void unit(int store_unit);  // on the rank that writes, ascending
  void end();
  void whole(const TrainerState& state);  // all of it, with the engine at rest
  // What has finished since the last call, on rank 0; with `wait`, the save in flight whatever it takes. Its error (a full
  // disk) is thrown here.
  std::optional<Saved> take(bool wait);

 private:
  [[nodiscard]] bool leads() const { return world_.rank() == 0; }
  [[nodiscard]] bool writes() const { return world_.local_rank() == 0; }
  [[nodiscard]] std::unique_ptr<io::CheckpointWriter> make_writer(const TrainerState& state) const;
  const RunSetup& setup_;
  const store::Store& store_;
  comm::World& world_;
  std::unique_ptr<io::CheckpointWriter> writer_;
  std::future<io::CheckpointInfo> finishing_;
  std::optional<std::uint64_t> step_;
  std::chrono::steady_clock::time_point begin_;
};

}  // namespace spipe::exec
