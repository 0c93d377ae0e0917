// trainer.json: what a checkpoint says about the run beside weights and moments, and the check that a resume is the same run.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "spipe/exec/run_setup.h"

namespace spipe::exec {

struct TrainerState {
  std::uint64_t step = 0;     // steps done = the data cursor
  std::uint64_t tokens = 0;   // targets trained on
  std::uint64_t updates = 0;  // optimizer updates done (skipped steps excluded)
  std::uint64_t skipped = 0;
  std::uint64_t skips_in_a_row = 0;
  optim::ScalerState scaler;  // of the next step
  bool has_scaler = false;    // the checkpoint knew one
  optim::SpikeHistory spikes;
  std::uint64_t data_fingerprint = 0;
  std::map<std::string, std::string> numerics;
  std::vector<std::string> changes;  // differences permitted at earlier resumes
};

[[nodiscard]] std::string trainer_json(const TrainerState& state, const RunSetup& setup);
// Throws Error when the text is not a trainer.json of a version we read.
[[nodiscard]] TrainerState parse_trainer_json(const std::string& text, const std::string& where);

// Compares a checkpoint with the present run. Differences of the instruction set or libraries are warned about; differences
// named in `allow_changes` are recorded in state.changes; any other is an Error that lists them.
void check_same_run(TrainerState& state, const RunSetup& setup, std::uint64_t data_fingerprint,
                    const std::vector<std::string>& allow_changes, const std::string& where);

}  // namespace spipe::exec
