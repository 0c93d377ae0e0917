#include <numeric>
#include <set>

#include "spipe/data/data.h"
#include "tests/unit/io/test_files.h"

namespace spipe::data {
namespace {

using test::contains;
using test::error_line;
using test::TempFolder;
using Ids = std::vector<std::int32_t>;

// A file whose tokens are first, first + 1, ...
std::filesystem::path numbered(const std::filesystem::path& path, int count, int first = 0, std::uint64_t vocab = 1000,
                               std::uint64_t tokenizer = 1) {
  TokenFileWriter writer(path, vocab, tokenizer, -1);
  Ids ids(static_cast<std::size_t>(count));
  std::iota(ids.begin(), ids.end(), first);
  writer.document(ids);
  writer.finish();
  return path;
}

struct Rows {
  Ids tokens, targets;
};
Rows rows_of(const TrainData& data, std::uint64_t step, std::int64_t first, std::int64_t rows, std::size_t seq_len) {
  Rows result{Ids(static_cast<std::size_t>(rows) * seq_len), Ids(static_cast<std::size_t>(rows) * seq_len)};
  data.batch(step, first, rows, result.tokens.data(), result.targets.data());
  return result;
}
Rows rows_of(const EvalData& data, std::uint64_t first, std::int64_t rows, std::size_t seq_len) {
  Rows result{Ids(static_cast<std::size_t>(rows) * seq_len), Ids(static_cast<std::size_t>(rows) * seq_len)};
  data.batch(first, rows, result.tokens.data(), result.targets.data());
  return result;
}

TEST_CASE("less data than one window is refused with both numbers (CASES O8)") {
  const TempFolder folder;
  for (const int tokens : {1, 16}) {
    const std::string line = error_line([&] { const TrainData data({numbered(folder / "t.bin", tokens)}, 16, 8, 7, 1000); });
    INFO(line);
    CHECK(contains(line, "needs 17 tokens"));
    CHECK(contains(line, "the file has " + std::to_string(tokens)));
  }
  CHECK(contains(error_line([&] { const EvalData data({numbered(folder / "t.bin", 1)}, 16, 1000); }), "needs 2 tokens"));
  // A file of 0 tokens cannot be written by us, but it can be read.
  std::string empty = test::read_file(folder / "t.bin");
  empty = empty.substr(0, 64) + std::string(8, '\0');
  empty.replace(24, 16, std::string(16, '\0'));
  test::write_file(folder / "zero.bin", empty);
  CHECK(contains(error_line([&] { const TrainData data({folder / "zero.bin"}, 16, 8, 7, 1000); }), "the file has 0"));
  CHECK(contains(error_line([&] { const EvalData data({folder / "zero.bin"}, 16, 1000); }), "the file has 0"));
  CHECK(contains(error_line([&] { const TrainData data({}, 16, 8, 7, 1000); }), "no token files"));
}

TEST_CASE("17 and 18 tokens give one window of 16 whose targets are the next tokens (CASES O8, O34)") {
  const TempFolder folder;
  for (const int tokens : {17, 18}) {
    const TrainData data({numbered(folder / "t.bin", tokens)}, 16, 8, 7, 1000);
    CHECK(data.windows() == 1);
    // A global batch of 8 (4 x 2) from one window: the step runs through 8 epochs.
    for (std::int64_t row = 0; row < 8; ++row) {
      const Rows rows = rows_of(data, 3, row, 1, 16);
      for (std::int32_t i = 0; i < 16; ++i) {
        CHECK(rows.tokens[static_cast<std::size_t>(i)] == i);
        CHECK(rows.targets[static_cast<std::size_t>(i)] == i + 1);
      }
    }
    CHECK(data.targets_of_step(0) == 128);
  }
}

TEST_CASE("targets are shifted once, within the row, and windows overlap by the one token both need (CASES O34)") {
  const TempFolder folder;
  const TrainData data({numbered(folder / "t.bin", 41)}, 4, 10, 7, 1000);
  CHECK(data.windows() == 10);
  const Rows rows = rows_of(data, 0, 0, 10, 4);
  std::set<std::int32_t> predicted;
  for (std::size_t row = 0; row < 10; ++row) {
    CHECK(rows.tokens[row * 4] == static_cast<std::int32_t>(4 * data.window_of(0, static_cast<std::int64_t>(row))));
    for (std::size_t i = 0; i < 4; ++i) {
      CHECK(rows.targets[row * 4 + i] == rows.tokens[row * 4 + i] + 1);
      predicted.insert(rows.targets[row * 4 + i]);
    }
  }
  CHECK(predicted.size() == 40);  // every token but the first is predicted once an epoch
}

TEST_CASE("windows never cross files, and short files are passed over") {
  const TempFolder folder;
  const std::vector<Path> files{numbered(folder / "a.bin", 3, 100), numbered(folder / "b.bin", 9, 200),
                                numbered(folder / "c.bin", 4, 300), numbered(folder / "d.bin", 14, 400),
                                numbered(folder / "e.bin", 1, 500)};
  const TrainData data(files, 4, 5, 7, 1000);
  REQUIRE(data.windows() == 5);
  CHECK(data.tokens() == 31);
  const Rows rows = rows_of(data, 0, 0, 5, 4);
  std::set<std::int32_t> starts;
  for (std::size_t row = 0; row < 5; ++row) {
    starts.insert(rows.tokens[row * 4]);
    for (std::size_t i = 0; i < 4; ++i)
      CHECK(rows.targets[row * 4 + i] == rows.tokens[row * 4] + static_cast<std::int32_t>(i) + 1);
  }
  CHECK(starts == std::set<std::int32_t>{200, 204, 400, 404, 408});
}

TEST_CASE("each epoch is a permutation of its own, also across a step that spans two (CASES O45)") {
  const TempFolder folder;
  const TrainData data({numbered(folder / "t.bin", 41)}, 1, 4, 7, 1000);
  REQUIRE(data.windows() == 40);
  const auto order = [](const TrainData& from, std::uint64_t epoch, std::int64_t global) {
    std::vector<std::uint64_t> windows;
    for (std::uint64_t i = epoch * 40; i < (epoch + 1) * 40; ++i) {
      const auto batch = static_cast<std::uint64_t>(global);
      windows.push_back(from.window_of(i / batch, static_cast<std::int64_t>(i % batch)));
    }
    return windows;
  };
  std::set<std::vector<std::uint64_t>> orders;
  for (std::uint64_t epoch = 0; epoch < 4; ++epoch) {
    const auto windows = order(data, epoch, 4);
    CHECK(std::set(windows.begin(), windows.end()).size() == 40);
    orders.insert(windows);
  }
  CHECK(orders.size() == 4);

  // A batch of 12 does not divide 40: step 3 takes the last 4 windows of epoch 0 and the first 8 of epoch 1.
  const TrainData twelve({folder / "t.bin"}, 1, 12, 7, 1000);
  CHECK(order(twelve, 0, 12) == order(data, 0, 4));
  CHECK(order(twelve, 1, 12) == order(data, 1, 4));

  const TrainData other_seed({folder / "t.bin"}, 1, 4, 8, 1000);
  CHECK(order(other_seed, 0, 4) != order(data, 0, 4));
}

TEST_CASE("a step's batch depends on the step alone, however it was reached (CASES O45)") {
  const TempFolder folder;
  const TrainData straight({numbered(folder / "t.bin", 41)}, 1, 4, 7, 1000);
  std::vector<Ids> wanted;
  for (std::uint64_t step = 0; step < 20; ++step) wanted.push_back(rows_of(straight, step, 0, 4, 1).tokens);
  for (const std::uint64_t resumed_at : {3U, 10U, 13U}) {
    const TrainData resumed({folder / "t.bin"}, 1, 4, 7, 1000);
    for (std::uint64_t step = resumed_at; step < 20; ++step) {
      CHECK(rows_of(resumed, step, 0, 4, 1).tokens == wanted[step]);
      CHECK(rows_of(resumed, step, 2, 2, 1).tokens == Ids(wanted[step].begin() + 2, wanted[step].end()));
    }
  }
  CHECK(wanted[3] != wanted[4]);
}

TEST_CASE("changed data or another window length changes the fingerprint (CASES O45)") {
  const TempFolder folder;
  const auto path = numbered(folder / "t.bin", 41);
  const auto fingerprint = [&](std::int64_t seq_len) { return TrainData({path}, seq_len, 4, 7, 1000).fingerprint(); };
  const std::uint64_t before = fingerprint(4);
  CHECK(fingerprint(4) == before);
  CHECK(fingerprint(5) != before);
  CHECK(TrainData({path, path}, 4, 4, 7, 1000).fingerprint() != before);
  std::string bytes = test::read_file(path);
  bytes[66] = 9;
  test::write_file(path, bytes);
  CHECK(fingerprint(4) != before);
}

TEST_CASE("vocabularies and tokenizers that do not fit are refused (CASES O7, O26)") {
  const TempFolder folder;
  const auto path = numbered(folder / "t.bin", 41, 0, 98);
  CHECK(contains(error_line([&] { const TrainData data({path}, 4, 4, 7, 97); }), "has 98 ids, the model's vocabulary only 97"));
  CHECK_NOTHROW(TrainData({path}, 4, 4, 7, 128));
  const auto other = numbered(folder / "u.bin", 41, 0, 98, 2);
  CHECK(contains(error_line([&] { const TrainData data({path, other}, 4, 4, 7, 98); }), "another tokenizer"));
  // The last id is as large as the vocabulary: file and position are named.
  std::string bytes = test::read_file(path);
  bytes[64 + 2 * 40] = 98;
  test::write_file(path, bytes);
  const std::string line = error_line([&] { const EvalData data({path}, 4, 128); });
  CHECK(contains(line, "t.bin"));
  CHECK(contains(line, "token 40 is id 98"));
}

TEST_CASE("evaluation predicts every token once - the last window is padded, rows beyond the end are masked") {
  const TempFolder folder;
  const EvalData data(
      {numbered(folder / "a.bin", 11, 100), numbered(folder / "b.bin", 1, 200), numbered(folder / "c.bin", 6, 300)}, 4, 1000);
  CHECK(data.windows() == 3 + 0 + 2);
  CHECK(data.targets() == 10 + 5);
  std::multiset<std::int32_t> predicted;
  for (std::uint64_t first = 0; first < 6; first += 3) {  // the second batch has one row beyond the end
    const Rows rows = rows_of(data, first, 3, 4);
    for (std::size_t i = 0; i < rows.tokens.size(); ++i) {
      if (rows.targets[i] < 0) {
        CHECK(rows.tokens[i] == 0);
        continue;
      }
      CHECK(rows.targets[i] == rows.tokens[i] + 1);
      predicted.insert(rows.targets[i]);
    }
  }
  std::multiset<std::int32_t> wanted;
  for (std::int32_t id = 101; id <= 110; ++id) wanted.insert(id);
  for (std::int32_t id = 301; id <= 305; ++id) wanted.insert(id);
  CHECK(predicted == wanted);
  CHECK(rows_of(data, 2, 1, 4).targets == Ids{109, 110, -1, -1});
  CHECK(rows_of(data, 5, 1, 4).targets == Ids{-1, -1, -1, -1});
}

TEST_CASE("globs: sorted by bytes, each file once, nothing found is an error naming the pattern") {
  const TempFolder folder;
  for (const char* name : {"b.bin", "a.bin", "B.bin", "c.txt"}) test::write_file(folder / name, "x");
  const std::string stem = folder.path().string();
  CHECK(expand_globs({stem + "/*.bin", stem + "/a.bin", stem + "/c.txt"}, "run.yaml") ==
        std::vector<Path>{folder / "B.bin", folder / "a.bin", folder / "b.bin", folder / "c.txt"});
  const std::string line = error_line([&] { (void)expand_globs({stem + "/*.tok"}, "run.yaml:4"); });
  CHECK(contains(line, "run.yaml:4"));
  CHECK(contains(line, "/*.tok'"));
  CHECK(contains(error_line([&] { (void)expand_globs({stem}, "run.yaml"); }), "is a folder"));
}

}  // namespace
}  // namespace spipe::data
