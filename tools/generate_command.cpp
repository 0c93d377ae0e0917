#include "generate_command.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <iterator>

#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/base/host.h"
#include "spipe/base/log.h"
#include "spipe/base/units.h"
#include "spipe/data/data.h"
#include "spipe/data/utf8.h"
#include "spipe/device/device.h"
#include "spipe/exec/generate.h"

namespace spipe::tools {
namespace {

constexpr const char* kIds = "give ids instead of text: --prompt-ids 17,4,256";
constexpr std::uint64_t kMostPadding = 256;  // rows that a vocabulary may have beyond the tokenizer's

std::string given_prompt(const GenerateFlags& flags) {
  if (flags.prompt) return *flags.prompt;
  if (flags.prompt_file != "-") return read_text(flags.prompt_file);
  return {std::istreambuf_iterator<char>(std::cin), {}};
}

// CLI::Range lets NaN pass.
CLI::Validator between(double low, double high) {
  return CLI::Validator(
      [low, high](std::string& text) {
        double value = 0;
        const bool number = CLI::detail::lexical_cast(text, value);
        return number && value >= low && value <= high ? std::string()
                                                       : fmt::format("{} is no number from {} to {}", text, low, high);
      },
      fmt::format("{}..{}", low, high));
}

// The text goes out character by character; for a terminal without what would steer it. In ids: numbers with spaces between.
class Output {
 public:
  Output(const data::Tokenizer* tokenizer, bool to_terminal) : tokenizer_(tokenizer), to_terminal_(to_terminal) {}
  void text(std::string_view bytes) { put(stream_.feed(bytes)); }
  void token(std::int32_t token) {
    if (tokenizer_ != nullptr) {
      text(tokenizer_->decode(std::span(&token, 1)));
    } else {
      put(fmt::format("{}{}", first_ ? "" : " ", token));
      first_ = false;
    }
  }
  void end() {
    put(stream_.finish());
    put("\n");
  }

 private:
  void put(const std::string& text) {
    const std::string shown = to_terminal_ ? data::without_controls(text) : text;
    if (shown.empty()) return;
    // At once, so that text appears as it is made. A reader that has gone (head) ends the program by SIGPIPE.
    if (std::fwrite(shown.data(), 1, shown.size(), stdout) != shown.size() || std::fflush(stdout) != 0) {
      throw Error("cannot write the text", "standard output");
    }
  }
  const data::Tokenizer* tokenizer_;
  bool to_terminal_, first_ = true;
  data::Utf8Stream stream_;
};

// The only tokenizer there is; a model that was made with another one would get and give rubbish.
void check_tokenizer(const exec::OpenModel& open, const data::Tokenizer& tokenizer) {
  if (!open.tokenizer_file.empty()) {
    throw Error(fmt::format("this model's tokenizer ({}) is not built; only the byte tokenizer is", open.tokenizer_file),
                open.folder.string(), kIds);
  }
  const auto vocab = narrow<std::uint64_t>(open.shape.architecture.vocab_size);
  if (vocab < tokenizer.vocab_size() || vocab >= tokenizer.vocab_size() + kMostPadding) {
    throw Error(fmt::format("a vocabulary of {} is not the byte tokenizer's ({}); other tokenizers are not built", vocab,
                            tokenizer.vocab_size()),
                open.folder.string(), kIds);
  }
}

void check_prompt(const std::vector<std::int32_t>& prompt, const exec::OpenModel& open) {
  const std::int64_t vocab = open.shape.architecture.vocab_size;
  const auto wrong = std::find_if(prompt.begin(), prompt.end(), [&](std::int32_t id) { return id < 0 || id >= vocab; });
  if (wrong != prompt.end()) {
    throw Error(fmt::format("id {} is not in the model's vocabulary of {}", *wrong, vocab), "--prompt-ids");
  }
}

// Tokens that the model sees at once: as asked, else what it was made for; no more than the text can need.
std::int64_t context_of(const GenerateFlags& flags, const model::Architecture& a, std::int64_t prompt) {
  const bool table = a.position == model::PositionKind::learned;
  if (table && flags.context > a.max_positions) {
    throw Error(fmt::format("the model has {} positions, a context of {} was asked for", a.max_positions, flags.context),
                "--context", fmt::format("give at most {}", a.max_positions));
  }
  if (!table && flags.context > a.max_positions) {
    log_warning(fmt::format("the model was made for {} positions; a context of {} may give worse text", a.max_positions,
                            flags.context));
  }
  const std::int64_t context = flags.context > 0 ? flags.context : a.max_positions;
  return std::min(context, prompt + flags.new_tokens);
}

std::string summary_of(const exec::Generated& result, std::size_t prompt, const GenerateFlags& flags) {
  std::string end = fmt::format("{} tokens reached", flags.new_tokens);
  if (result.end == exec::EndOfText::end_id) end = fmt::format("end of text (id {})", result.end_id);
  const double rate = result.new_seconds > 0 ? static_cast<double>(result.tokens.size()) / result.new_seconds : 0;
  std::string text = fmt::format("{} + {} tokens, {:.1f} s to read the prompt, {:.0f} tokens/s; {}; seed {}", prompt,
                                 result.tokens.size(), result.prompt_seconds, rate, end, flags.sampling.seed);
  if (result.refills > 0) text += fmt::format("; the context was full {} times: its later half was read again", result.refills);
  return text;
}

}  // namespace

CLI::App* add_generate_command(CLI::App& app, GenerateFlags& flags) {
  CLI::App* command = app.add_subcommand("generate", "let a trained model go on with a text");
  command->footer(
      "Examples:\n"
      "  spipe generate runs/mine --prompt 'In the beginning'       the newest complete checkpoint of a run\n"
      "  spipe generate runs/mine --prompt 'And' --temperature 0     always the likeliest token\n"
      "  spipe generate runs/mine --prompt 'And' --top-k 40 --top-p 0.9 --seed 7 --max-new-tokens 500\n"
      "  spipe generate runs/mine --step 1000 --prompt-file - < start.txt\n"
      "  spipe generate path/to/hf-folder --prompt-ids 464,3290      ids in, ids out: any tokenizer's\n"
      "The text goes to standard output, everything else to standard error. The same seed gives the same text.");
  command->add_option("model", flags.model, "a run's folder (checkpoint.dir), one of its checkpoints, or a Hugging Face folder")
      ->required();
  auto* prompts = command->add_option_group("prompt", "one of these");
  prompts->add_option("--prompt", flags.prompt, "the text to go on with; '' for the beginning of a text");
  prompts->add_option("--prompt-file", flags.prompt_file, "a file with that text; - for standard input");
  prompts->add_option("--prompt-ids", flags.prompt_ids, "token ids with commas between; the output is ids too")->delimiter(',');
  prompts->require_option(1);
  command->add_option("--step", flags.step, "the checkpoint of this step; not given: the newest complete one");
  command->add_option("--max-new-tokens", flags.new_tokens, "most tokens to generate")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30))
      ->capture_default_str();
  model::SamplingOptions& s = flags.sampling;
  command->add_option("--temperature", s.temperature, "below 1: more of the likely; 0: always the likeliest token")
      ->check(between(0.0, 100.0))
      ->capture_default_str();
  command->add_option("--top-k", s.top_k, "only the k likeliest tokens; 0: all")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 31))
      ->capture_default_str();
  command->add_option("--top-p", s.top_p, "only the likeliest tokens that have this probability together")
      ->check(between(1e-6, 1.0))
      ->capture_default_str();
  command
      ->add_option("--repetition-penalty", s.repetition_penalty, "above 1: tokens that the text has already become less likely")
      ->check(between(0.01, 100.0))
      ->capture_default_str();
  command->add_option("--seed", s.seed, "names the random numbers")->capture_default_str();
  command->add_option("--stop-ids", flags.stop_ids, "token ids that end the text, beside those of the model")->delimiter(',');
  command->add_flag("--ignore-end", flags.ignore_end, "go on behind tokens that end a text");
  command
      ->add_option(
          "--context", flags.context,
          "tokens that the model sees at once; not given: its positions. When they are full, the later half is read again")
      ->check(CLI::Range(std::int64_t{2}, std::int64_t{1} << 30));
  command->add_option("--threads", flags.threads, "CPU threads; not given: all processors")->check(CLI::Range(1, 4096));
  command->add_flag("--only-new", flags.only_new, "print the new text without the prompt before it");
  command->add_flag("--quiet", flags.quiet, "no line of figures at the end");
  return command;
}

void run_generate(const GenerateFlags& flags) {
  const auto tokenizer = data::byte_tokenizer();
  const bool ids = !flags.prompt_ids.empty();
  const exec::OpenModel open = exec::open_model(flags.model, flags.step);
  const model::Architecture& a = open.shape.architecture;
  if (!ids) check_tokenizer(open, *tokenizer);

  exec::GenerateRequest request;
  request.new_tokens = flags.new_tokens;
  request.sampling = flags.sampling;
  request.vocab = ids ? a.vocab_size : narrow<std::int64_t>(tokenizer->vocab_size());
  const std::string text = ids ? std::string() : given_prompt(flags);
  request.prompt = flags.prompt_ids;
  if (!ids) tokenizer->encode(text, request.prompt);
  // A text begins behind the end of another one, as in training data.
  if (request.prompt.empty()) request.prompt.push_back(narrow<std::int32_t>(tokenizer->end_of_document()));
  check_prompt(request.prompt, open);
  if (!flags.ignore_end) {
    request.end_ids = open.end_ids;
    if (!ids) request.end_ids.push_back(narrow<std::int32_t>(tokenizer->end_of_document()));
  }
  request.end_ids.insert(request.end_ids.end(), flags.stop_ids.begin(), flags.stop_ids.end());

  const std::int64_t context = context_of(flags, a, narrow<std::int64_t>(request.prompt.size()));
  const std::uint64_t needed = model::Decoder::bytes(a, DType::f32, context), free = host_memory().available;
  if (needed > free) {
    throw Error(
        fmt::format("a context of {} tokens needs {}, {} are available", context, format_bytes(needed), format_bytes(free)),
        "--context", "give a smaller one");
  }
  const auto device = device::make_cpu_device({.threads = flags.threads > 0 ? flags.threads : usable_cpus()});
  model::Decoder decoder(a, DType::f32, open.parameters(), device->ops(), context);
  Output output(ids ? nullptr : tokenizer.get(), ::isatty(STDOUT_FILENO) == 1);
  if (!flags.only_new && !ids) output.text(text);
  if (!flags.only_new && ids) std::for_each(request.prompt.begin(), request.prompt.end(), [&](auto id) { output.token(id); });
  const exec::Generated result = exec::generate(decoder, request, [&](std::int32_t token) {
    output.token(token);
    return true;
  });
  output.end();
  if (!flags.quiet) {
    const std::string source = open.step ? fmt::format("step {}", *open.step) : open.folder.string();
    fmt::print(stderr, "{}: {}\n", source, summary_of(result, request.prompt.size(), flags));
  }
}

}  // namespace spipe::tools
