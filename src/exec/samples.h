// log.samples: prompts that the model goes on with while it is trained. Rank 0 generates on its host's cores, from the
// parameters where they lie in the store, with the engine at rest; nothing of the run's numbers hangs on it. Internal to exec/.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "spipe/exec/run_setup.h"
#include "spipe/exec/trainer.h"
#include "spipe/model/decoder.h"
#include "spipe/store/store.h"

namespace spipe::exec {

// Errors for log.samples that this run cannot make: of a model that is spread over hosts, or with a vocabulary too small.
void check_sampling(const RunSetup& setup);
// The same for training data of another tokenizer than the byte tokenizer.
void check_sampling_data(const config::Config& config);
// What sampling takes of the memory of a host.
[[nodiscard]] std::uint64_t sampling_bytes(const RunSetup& setup, int host);

class Sampling {
 public:
  // Takes its memory at once. Setup, ops and store outlive it.
  Sampling(const RunSetup& setup, Ops& ops, const store::Store& store);
  [[nodiscard]] std::vector<Sample> make(const store::Store& store);

 private:
  const RunSetup& setup_;
  model::Decoder decoder_;
};

}  // namespace spipe::exec
