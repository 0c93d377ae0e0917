// Inside of the executor: updates of store units on their way through slots of the store and memory of the device.
#pragma once

#include <cstdint>
#include <vector>

#include "spipe/exec/executor.h"

namespace spipe::exec {

class UnitUpdates {
 public:
  UnitUpdates(const plan::Plan& plan, const Machine& machine);

  // A piece of a unit's gradient and state to the device; its update there; and what that made of it back to the store.
  void load(const plan::Task& task) const;
  void unload(const plan::Task& task) const;
  // Of a unit by the host's cores, or of a piece on the device. A speculative one reports no infinite master before its commit.
  void optimize(const plan::Task& task, const optim::UpdateScalars& scalars, std::uint32_t* nonfinite_master);
  // Makes the updated unit the current one, of version `version`. With `redo` what speculation has made is not right: it is
  // made again first.
  void commit(const plan::Task& task, const optim::UpdateScalars& scalars, std::uint64_t version, bool redo,
              std::uint32_t* nonfinite_master);

 private:
  struct Range {
    std::uint64_t begin = 0, end = 0;  // elements
  };
  [[nodiscard]] const model::StoreUnit& unit(int s) const { return machine_.shape->store_units[static_cast<std::size_t>(s)]; }
  [[nodiscard]] Range range(const plan::Task& task) const;
  [[nodiscard]] std::byte* piece(const plan::Task& task) const;
  [[nodiscard]] bool resident(int s) const { return plan_.options.way(s).placement == plan::Placement::resident; }
  [[nodiscard]] optim::UnitPlanes planes_on_device(const plan::Task& task) const;
  // What a speculative update has found, by unit, until its commit.
  [[nodiscard]] std::uint32_t* found(int s) { return &found_[static_cast<std::size_t>(s)]; }

  const plan::Plan& plan_;
  const Machine& machine_;
  std::vector<std::uint32_t> found_;
};

// State of the units that stay on this rank's device: from the store, before the first step; and to it, whenever it is looked
// at there. With the engine at rest.
void fill_residents(const plan::Plan& plan, const Machine& machine);
void flush_residents(const plan::Plan& plan, const Machine& machine);

}  // namespace spipe::exec
