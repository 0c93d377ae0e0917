// Generation: text that a trained model goes on with, and models opened for it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "spipe/base/file.h"
#include "spipe/model/decoder.h"
#include "spipe/model/sampler.h"
#include "spipe/store/store.h"

namespace spipe::exec {

struct GenerateRequest {
  std::vector<std::int32_t> prompt;  // at least one token
  std::int64_t new_tokens = 0;       // at most
  model::SamplingOptions sampling;
  std::vector<std::int32_t> end_ids;  // any of them ends the text, and is not part of it
  std::int64_t vocab = 0;             // ids from here on are never picked (a model's padding)
};
enum class EndOfText : std::uint8_t { length, end_id, caller };
struct Generated {
  std::vector<std::int32_t> tokens;  // new ones
  EndOfText end = EndOfText::length;
  std::int32_t end_id = -1;  // where an end id ended it
  int refills = 0;
  double prompt_seconds = 0, new_seconds = 0;  // reading the prompt; the new tokens
};
// Fills an empty decoder with the prompt and samples behind it. When the decoder is full, the later half of what it holds is
// read again as the beginning of a new sequence (a refill), so that text may be longer than the model's context; of a prompt
// that is longer, the end is read. `on_token` sees every new token at once; false stops. Errors: those of next_choices.
Generated generate(model::Decoder& decoder, const GenerateRequest& request,
                   const std::function<bool(std::int32_t)>& on_token = {});

// Parameters in host memory, fp32.
struct OpenModel {
  model::ModelShape shape;
  std::unique_ptr<store::Store> store;
  Path folder;                                                // of the checkpoint, or the given one
  std::optional<std::uint64_t> step;                          // of a checkpoint
  std::vector<std::int32_t> end_ids;                          // eos_token_id of config.json and generation_config.json
  std::string tokenizer_file;                                 // of a tokenizer in the folder; empty: none
  [[nodiscard]] std::vector<const void*> parameters() const;  // by store unit, for a Decoder
};
// `place` is a Hugging Face folder (also: one checkpoint), or the folder of a run, of which the newest complete checkpoint is
// taken, or the one of `step`. Throws Error when there is none, and for everything load_model finds.
[[nodiscard]] OpenModel open_model(const Path& place, std::optional<std::uint64_t> step);

}  // namespace spipe::exec
