#include "spipe/exec/generate.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>

#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/base/log.h"
#include "spipe/io/checkpoint.h"
#include "spipe/io/end_ids.h"
#include "spipe/model/families.h"

namespace spipe::exec {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

bool contains(const std::vector<std::int32_t>& ids, std::int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

// Whether a folder is a model by itself; a run's folder has checkpoints in it.
bool is_model_folder(const Path& place) {
  return std::filesystem::exists(place / "config.json") || std::filesystem::exists(place / "model.safetensors") ||
         std::filesystem::exists(place / "model.safetensors.index.json");
}

io::CheckpointInfo checkpoint_of(const Path& run, std::optional<std::uint64_t> step) {
  std::vector<std::string> skipped;
  std::optional<io::CheckpointInfo> found;
  std::string steps;
  if (step) {
    for (const io::CheckpointInfo& checkpoint : io::list_checkpoints(run, &skipped)) {
      if (checkpoint.step == *step) found = checkpoint;
      steps += (steps.empty() ? "it has steps " : ", ") + std::to_string(checkpoint.step);
    }
  } else {
    found = io::newest_checkpoint(run, &skipped);
  }
  if (!found) {
    const std::string which =
        step ? fmt::format("no complete checkpoint of step {}", *step) : "no complete checkpoint and no config.json";
    std::string hint =
        step && !steps.empty() ? steps : "give a run's folder (its checkpoint.dir) or a Hugging Face model folder";
    if (!skipped.empty()) hint = fmt::format("broken: {}", skipped.front());
    throw Error(which, run.string(), hint);
  }
  for (const std::string& line : skipped) log_warning("not a complete checkpoint, skipped: " + line);
  return *found;
}

// Tokenizer files that Hugging Face folders have.
std::string tokenizer_file_of(const Path& folder) {
  for (const char* name : {"tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt"}) {
    if (std::filesystem::exists(folder / name)) return name;
  }
  return {};
}

}  // namespace

Generated generate(model::Decoder& decoder, const GenerateRequest& request, const std::function<bool(std::int32_t)>& on_token) {
  SPIPE_CHECK(!request.prompt.empty() && decoder.length() == 0, "generation begins with a prompt and an empty decoder");
  const auto capacity = narrow<std::size_t>(decoder.capacity());
  Generated result;
  std::vector<std::int32_t> text = request.prompt;
  // Where the prompt fills everything, half of it is dropped at once rather than after one token.
  std::size_t begin = 0;
  if (text.size() > capacity) begin = text.size() - std::max<std::size_t>(1, capacity / 2);
  auto clock = Clock::now();
  std::span<const float> logits = decoder.append(std::span(text).subspan(begin));
  result.prompt_seconds = seconds_since(clock);
  clock = Clock::now();
  for (std::int64_t i = 0; i < request.new_tokens; ++i) {
    const auto choices = model::next_choices(request.sampling, logits, text, request.vocab);
    const std::int32_t token = model::pick(request.sampling, choices, narrow<std::uint64_t>(i));
    if (contains(request.end_ids, token)) {
      result.end = EndOfText::end_id;
      result.end_id = token;
      break;
    }
    text.push_back(token);
    result.tokens.push_back(token);
    if (on_token && !on_token(token)) {
      result.end = EndOfText::caller;
      break;
    }
    if (i + 1 == request.new_tokens) break;
    if (decoder.length() == decoder.capacity()) {
      decoder.clear();
      const std::size_t kept = std::max<std::size_t>(1, capacity / 2);
      logits = decoder.append(std::span(text).last(std::min(kept, text.size())));
      ++result.refills;
    } else {
      logits = decoder.append(std::span(text).last(1));
    }
  }
  result.new_seconds = seconds_since(clock);
  return result;
}

std::vector<const void*> OpenModel::parameters() const {
  std::vector<const void*> slabs;
  for (int s = 0; s < shape.store_unit_count(); ++s) {
    const bool empty = shape.store_units[static_cast<std::size_t>(s)].parameters.empty();
    slabs.push_back(empty ? nullptr : store->slab(s, store::Plane::compute).data);
  }
  return slabs;
}

OpenModel open_model(const Path& place, std::optional<std::uint64_t> step) {
  if (!std::filesystem::is_directory(place)) {
    throw Error("no such folder", place.string(), "give a run's folder (its checkpoint.dir) or a Hugging Face model folder");
  }
  OpenModel open;
  open.folder = place;
  if (is_model_folder(place)) {
    if (step) throw Error("is one model, not a run with checkpoints to choose from", place.string(), "leave --step out");
  } else {
    const io::CheckpointInfo checkpoint = checkpoint_of(place, step);
    open.folder = checkpoint.path;
    open.step = checkpoint.step;
  }
  const Path config = open.folder / "config.json";
  if (!std::filesystem::exists(config)) throw Error("no config.json beside the weights", open.folder.string());
  const model::Architecture architecture = model::architecture_from_hf(config);
  open.shape = model::make_shape(architecture, {.micro = 1, .seq_len = 1, .head_chunk = 1}, DType::f32);
  open.store = std::make_unique<store::Store>(open.shape, store::make_weights_layout(open.shape));
  io::load_model(open.folder, open.shape, *open.store);
  open.end_ids = io::end_ids_of(open.folder);
  open.tokenizer_file = tokenizer_file_of(open.folder);
  return open;
}

}  // namespace spipe::exec
