#include "samples.h"

#include <fmt/core.h>

#include <algorithm>

#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/data/data.h"
#include "spipe/data/utf8.h"
#include "spipe/exec/generate.h"

namespace spipe::exec {
namespace {

constexpr double kTopP = 0.95;

// The longest prompt with its text, as far as the model's positions go.
std::int64_t sampling_context(const RunSetup& setup) {
  std::int64_t longest = 1;
  for (const std::string& prompt : setup.config.log.samples) longest = std::max(longest, narrow<std::int64_t>(prompt.size()));
  return std::min(setup.architecture.max_positions, longest + setup.config.log.sample_tokens);
}

// Where the parameters lie now: a unit's current slot changes with its updates.
std::vector<const void*> parameters_in(const store::Store& store, const model::ModelShape& shape) {
  std::vector<const void*> slabs;
  for (int s = 0; s < shape.store_unit_count(); ++s) {
    const bool empty = shape.store_units[static_cast<std::size_t>(s)].parameters.empty();
    slabs.push_back(empty ? nullptr : store.slab(s, store::Plane::compute).data);
  }
  return slabs;
}

}  // namespace

void check_sampling(const RunSetup& setup) {
  if (setup.config.log.samples.empty()) return;
  const std::string where = setup.config.file.string();
  if (setup.job.hosts() > 1) {
    throw Error(fmt::format("log.samples needs the whole model in one host's memory, this job has {} hosts", setup.job.hosts()),
                where, "leave it out, and use spipe generate on the checkpoints");
  }
  const std::uint64_t ids = data::byte_tokenizer()->vocab_size();
  if (narrow<std::uint64_t>(setup.architecture.vocab_size) < ids) {
    throw Error(fmt::format("log.samples needs the byte tokenizer's {} ids, the model has a vocabulary of {}", ids,
                            setup.architecture.vocab_size),
                where, "leave it out, and use spipe generate --prompt-ids on the checkpoints");
  }
}

void check_sampling_data(const config::Config& config) {
  const std::vector<Path> files = data::expand_globs(config.data.train, "data.train");
  const data::TokenFile file(files.front());
  if (file.header().tokenizer_hash == data::byte_tokenizer()->hash()) return;
  throw Error("log.samples needs data of the byte tokenizer, this file was made with another one", files.front().string(),
              "leave log.samples out, and use spipe generate --prompt-ids on the checkpoints");
}

std::uint64_t sampling_bytes(const RunSetup& setup, int host) {
  if (setup.config.log.samples.empty() || host != setup.job.host_of_rank.front()) return 0;
  return model::Decoder::bytes(setup.architecture, setup.shape.compute, sampling_context(setup));
}

Sampling::Sampling(const RunSetup& setup, Ops& ops, const store::Store& store)
    : setup_(setup),
      decoder_(setup.architecture, setup.shape.compute, parameters_in(store, setup.shape), ops, sampling_context(setup)) {}

std::vector<Sample> Sampling::make(const store::Store& store) {
  const auto tokenizer = data::byte_tokenizer();
  const auto end = narrow<std::int32_t>(tokenizer->end_of_document());
  GenerateRequest request;
  request.new_tokens = setup_.config.log.sample_tokens;
  request.sampling = {.temperature = setup_.config.log.sample_temperature, .top_p = kTopP, .seed = setup_.config.train.seed};
  request.end_ids = {end};
  request.vocab = narrow<std::int64_t>(tokenizer->vocab_size());
  std::vector<Sample> samples;
  for (const std::string& prompt : setup_.config.log.samples) {
    request.prompt.clear();
    tokenizer->encode(prompt, request.prompt);
    if (request.prompt.empty()) request.prompt.push_back(end);  // a text begins behind the end of another one
    decoder_.clear(parameters_in(store, setup_.shape));
    const Generated made = generate(decoder_, request);
    data::Utf8Stream shown, text;
    Sample sample{.prompt = shown.feed(prompt),
                  .text = text.feed(tokenizer->decode(made.tokens)),
                  .ended = made.end == EndOfText::end_id};
    sample.prompt += shown.finish();
    sample.text += text.finish();
    samples.push_back(std::move(sample));
  }
  return samples;
}

}  // namespace spipe::exec
