// `spipe generate` as a user meets it. One run learns to count, and goes on counting.
#include <algorithm>
#include <catch2/catch.hpp>
#include <fstream>

#include "spipe/base/file.h"
#include "spipe/data/data.h"
#include "tests/support/program.h"
#include "tests/support/tiny_run.h"

using namespace spipe;
using namespace spipe::test;

namespace {

const Path kSpipe = SPIPE_BINARY;

// A run whose data are the digits in a circle; byte vocabulary with a little padding, as real runs have it.
class CountingRun {
 public:
  CountingRun() {
    const TinyRun run{.model_json = tiny_llama_json(),
                      .settings = {"train.steps=60", "optimizer.lr=1e-2", "checkpoint.every=30"}};
    write_tiny_text_files(folder_.path(), run, counting_text(4000));
    result_ = run_tiny(folder_.path(), run);
  }
  [[nodiscard]] Path path() const { return folder_.path(); }
  [[nodiscard]] std::string run() const { return (folder_.path() / "run").string(); }
  [[nodiscard]] std::string checkpoint() const { return result_.summary.checkpoint.string(); }
  [[nodiscard]] ProgramResult generate(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), "generate");
    return run_program(kSpipe, arguments, folder_.path());
  }

 private:
  TempFolder folder_;
  TinyResult result_;
};

const CountingRun& counting() {
  static const CountingRun run;
  return run;
}

std::size_t lines(const std::string& text) { return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n')); }

void check_refused(const std::vector<std::string>& arguments, const std::string& saying) {
  const ProgramResult result = counting().generate(arguments);
  INFO(result.err);
  CHECK(result.exit_code == 2);
  CHECK(result.out.empty());
  CHECK(lines(result.err) == 1);
  CHECK_THAT(result.err, Catch::Contains(saying));
}

}  // namespace

TEST_CASE("a model that learned to count goes on with the next digit, not the one after it nor the same") {
  const ProgramResult result = counting().generate(
      {counting().run(), "--prompt", "0123", "--temperature", "0", "--max-new-tokens", "12", "--threads", "1"});
  INFO(result.err);
  REQUIRE(result.exit_code == 0);
  CHECK(result.out == "0123456789012345\n");
  CHECK_THAT(result.err, Catch::Contains("step 60: 4 + 12 tokens"));
}

TEST_CASE("the newest checkpoint, a chosen one, and a checkpoint's own folder can be gone on from") {
  const std::vector<std::string> rest = {"--prompt", "7", "--temperature", "0", "--max-new-tokens", "6", "--only-new"};
  const auto with = [&](std::vector<std::string> first) {
    first.insert(first.end(), rest.begin(), rest.end());
    return counting().generate(first);
  };
  const ProgramResult newest = with({counting().run()}), folder = with({counting().checkpoint(), "--quiet"});
  CHECK(newest.out == folder.out);
  CHECK(lines(newest.out) == 1);
  CHECK(folder.err.empty());
  CHECK_THAT(with({counting().run(), "--step", "30"}).err, Catch::StartsWith("step 30: "));
}

TEST_CASE("the same seed gives the same text, another seed another one") {
  const auto sample = [](const std::string& seed, const std::string& threads) {
    // Hot, so that chance decides.
    return counting()
        .generate({counting().run(), "--prompt", "5", "--temperature", "3", "--top-p", "1", "--seed", seed, "--threads",
                   threads, "--max-new-tokens", "40", "--ignore-end"})
        .out;
  };
  const std::string first = sample("1", "1");
  CHECK(first == sample("1", "1"));
  CHECK(first == sample("1", "2"));
  CHECK(first != sample("2", "1"));
}

TEST_CASE("output is well-formed UTF-8 whatever bytes are sampled") {
  // At this heat every byte is about as likely; a reader that knows only well-formed text must accept it.
  const ProgramResult result = counting().generate({counting().run(), "--prompt", "\xe4\xb8\xad", "--temperature", "100",
                                                    "--top-p", "1", "--max-new-tokens", "400", "--ignore-end"});
  REQUIRE(result.exit_code == 0);
  CHECK_THAT(result.out, Catch::StartsWith("\xe4\xb8\xad"));
  CHECK(result.out.find("\xEF\xBF\xBD") != std::string::npos);
  std::ofstream(counting().path() / "line.jsonl") << "{\"text\": \"" + [&] {
    std::string escaped;
    for (const char c : result.out) {
      if (static_cast<unsigned char>(c) >= 0x20 && c != '"' && c != '\\') escaped.push_back(c);
    }
    return escaped;
  }() + "\"}\n";
  data::TokenizeOptions options;  // refuses text that is not UTF-8
  options.inputs = {counting().path() / "line.jsonl"};
  options.output = counting().path() / "line.bin";
  CHECK_NOTHROW(data::tokenize(*data::byte_tokenizer(), options));
}

TEST_CASE("text goes on past the context, whose later half is read again") {
  const ProgramResult result = counting().generate(
      {counting().run(), "--prompt", "0123456789", "--temperature", "0", "--max-new-tokens", "50", "--context", "16"});
  REQUIRE(result.exit_code == 0);
  std::string wanted;
  for (int i = 0; i < 60; ++i) wanted.push_back(static_cast<char>('0' + i % 10));
  CHECK(result.out == wanted + "\n");
  CHECK_THAT(result.err, Catch::Contains("its later half was read again"));
  // A prompt longer than the context: its end counts.
  const ProgramResult longer =
      counting().generate({counting().run(), "--prompt", "aaaaaaaaaaaaaaaaaaaaaaaa3456", "--temperature", "0",
                           "--max-new-tokens", "2", "--context", "8", "--only-new"});
  CHECK(longer.out == "78\n");
}

TEST_CASE("ids in, ids out, and stop ids and end ids end the text and are not part of it") {
  const ProgramResult ids =
      counting().generate({counting().run(), "--prompt-ids", "48,49,50", "--temperature", "0", "--max-new-tokens", "4"});
  CHECK(ids.out == "48 49 50 51 52 53 54\n");
  const ProgramResult stopped = counting().generate(
      {counting().run(), "--prompt", "012", "--temperature", "0", "--max-new-tokens", "40", "--stop-ids", "55,56"});
  CHECK(stopped.out == "0123456\n");
  CHECK_THAT(stopped.err, Catch::Contains("end of text (id 55)"));

  // eos_token_id of a model's folder, a list.
  const Path folder = counting().path() / "hf";
  std::filesystem::copy(counting().checkpoint(), folder);
  std::string config = read_text(folder / "config.json");
  config.insert(config.find('{') + 1, "\"eos_token_id\": [52, 9],");
  write_text_atomic(folder / "config.json", config);
  const std::vector<std::string> arguments = {folder.string(), "--prompt", "01", "--temperature", "0", "--max-new-tokens", "6"};
  CHECK(counting().generate(arguments).out == "0123\n");
  std::vector<std::string> ignoring = arguments;
  ignoring.emplace_back("--ignore-end");
  CHECK(counting().generate(ignoring).out == "01234567\n");
  write_text_atomic(folder / "generation_config.json", "{\"eos_token_id\": 50}");
  CHECK(counting().generate(arguments).out == "01\n");
  write_text_atomic(folder / "generation_config.json", "{\"eos_token_id\": \"two\"}");
  CHECK_THAT(counting().generate(arguments).err, Catch::Contains("eos_token_id"));
  std::filesystem::remove(folder / "generation_config.json");
  // Text for a model that has another tokenizer would be rubbish.
  write_text_atomic(folder / "tokenizer.json", "{}");
  check_refused(arguments, "tokenizer (tokenizer.json) is not built");
  std::filesystem::remove_all(folder);
}

TEST_CASE("a prompt comes from a file or from standard input, and may be empty") {
  const Path file = counting().path() / "prompt.txt";
  write_text_atomic(file, "456");
  CHECK(counting()
            .generate({counting().run(), "--prompt-file", file.string(), "--temperature", "0", "--max-new-tokens", "2"})
            .out == "45678\n");
  const ProgramResult empty =
      counting().generate({counting().run(), "--prompt", "", "--temperature", "0", "--max-new-tokens", "3", "--ignore-end"});
  CHECK(empty.exit_code == 0);
  CHECK(empty.out.size() >= 4);
}

TEST_CASE("generate refuses what makes no sense in one line") {
  const std::string run = counting().run();
  check_refused({run}, "--prompt");
  check_refused({run, "--prompt", "a", "--prompt-ids", "1"}, "--prompt");
  check_refused({"no/such/run", "--prompt", "a"}, "no such folder");
  check_refused({counting().path().string(), "--prompt", "a"}, "no complete checkpoint and no config.json");
  check_refused({run, "--prompt", "a", "--step", "31"}, "no complete checkpoint of step 31; it has steps 30, 60");
  check_refused({counting().checkpoint(), "--prompt", "a", "--step", "30"}, "leave --step out");
  check_refused({run, "--prompt-ids", "1,264"}, "id 264 is not in the model's vocabulary of 264");
  check_refused({run, "--prompt-ids", "1,x"}, "--prompt-ids");
  check_refused({run, "--prompt", "a", "--temperature", "-1"}, "--temperature");
  check_refused({run, "--prompt", "a", "--temperature", "nan"}, "--temperature");
  check_refused({run, "--prompt", "a", "--top-p", "0"}, "--top-p");
  check_refused({run, "--prompt", "a", "--top-k", "-1"}, "--top-k");
  check_refused({run, "--prompt", "a", "--max-new-tokens", "0"}, "--max-new-tokens");
  check_refused({run, "--prompt", "a", "--repetition-penalty", "0"}, "--repetition-penalty");
  check_refused({run, "--prompt-file", "no/such/file"}, "no/such/file");
}

TEST_CASE("a model with another vocabulary than the byte tokenizer's takes ids, not text, and positions are a limit") {
  const TempFolder folder;
  TinyRun run{.model_json = tiny_gpt2_json(), .settings = {"train.steps=2"}};
  (void)run_tiny(folder.path(), run);
  const std::string place = (folder.path() / "run").string();
  check_refused({place, "--prompt", "a"}, "a vocabulary of 97 is not the byte tokenizer's (257)");
  check_refused({place, "--prompt-ids", "1", "--context", "65"}, "the model has 64 positions");
  const ProgramResult ids = counting().generate({place, "--prompt-ids", "1,2", "--max-new-tokens", "80"});
  INFO(ids.err);
  CHECK(ids.exit_code == 0);
  CHECK(std::count(ids.out.begin(), ids.out.end(), ' ') == 81);
}

TEST_CASE("a broken newest checkpoint is passed over with a warning, and only broken ones are an error") {
  const TempFolder folder;
  std::filesystem::copy(counting().run(), folder.path() / "run", std::filesystem::copy_options::recursive);
  const Path run = folder.path() / "run";
  std::filesystem::remove(run / "step-00000060" / "MANIFEST.json");
  const ProgramResult older = counting().generate({run.string(), "--prompt", "1", "--max-new-tokens", "1"});
  CHECK(older.exit_code == 0);
  CHECK_THAT(older.err, Catch::Contains("step-00000060") && Catch::Contains("step 30: "));
  std::filesystem::remove(run / "step-00000030" / "MANIFEST.json");
  check_refused({run.string(), "--prompt", "1"}, "broken: ");
}
