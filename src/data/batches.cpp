// The batches of a step and of an evaluation: pure functions of (files, seed, step), so that resuming needs a step number only.
#include <algorithm>

#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/base/log.h"
#include "spipe/base/random.h"
#include "spipe/data/data.h"

namespace spipe::data {
namespace {

std::vector<TokenFile> open_files(const std::vector<Path>& paths, std::uint64_t vocab_size, const char* purpose) {
  if (paths.empty()) throw Error(std::string("no token files for ") + purpose);
  std::vector<TokenFile> files;
  for (const Path& path : paths) {
    files.emplace_back(path);
    const TokenFileHeader& header = files.back().header();
    if (header.vocab_size > vocab_size) {
      throw Error("its tokenizer has " + std::to_string(header.vocab_size) + " ids, the model's vocabulary only " +
                      std::to_string(vocab_size),
                  path.string(), "use the model's own tokenizer, or a model with a larger vocab_size");
    }
    if (header.tokenizer_hash != files.front().header().tokenizer_hash) {
      throw Error("made with another tokenizer than " + paths.front().string(), path.string(),
                  "tokenize all files with one tokenizer");
    }
    files.back().check_ids(header.vocab_size);
  }
  return files;
}

std::uint64_t total_tokens(const std::vector<TokenFile>& files) {
  std::uint64_t total = 0;
  for (const TokenFile& file : files) total += file.size();
  return total;
}

std::uint64_t hash_files(const std::vector<TokenFile>& files, std::int64_t seq_len) {
  std::vector<std::uint64_t> parts{static_cast<std::uint64_t>(seq_len)};
  for (const TokenFile& file : files) parts.push_back(file.fingerprint());
  return hash64(std::as_bytes(std::span(parts)));
}

// The file of a window: first_window[f] <= w < first_window[f + 1]; files without windows are passed over.
std::size_t file_of(const std::vector<std::uint64_t>& first_window, std::uint64_t w) {
  const auto after = std::upper_bound(first_window.begin(), first_window.end(), w);
  return static_cast<std::size_t>(after - first_window.begin()) - 1;
}

// A permutation of its own for every (seed, epoch).
PhiloxKey epoch_key(std::uint64_t seed, std::uint64_t epoch) {
  const PhiloxKey key = make_key(seed, static_cast<std::uint64_t>(RandomPurpose::shuffle));
  const auto words = philox4x32({static_cast<std::uint32_t>(epoch), static_cast<std::uint32_t>(epoch >> 32), 0, 0}, key);
  return {words[0], words[1]};
}

// "seq_len + 1 = 17 tokens" with what is there.
std::string too_short(std::uint64_t wanted, const std::vector<TokenFile>& files) {
  std::uint64_t longest = 0;
  for (const TokenFile& file : files) longest = std::max(longest, file.size());
  return "needs " + std::to_string(wanted) + " tokens in a row, the " +
         (files.size() == 1 ? "file has " : "longest file has ") + std::to_string(longest);
}

}  // namespace

TrainData::TrainData(std::vector<Path> files, std::int64_t seq_len, std::int64_t global_batch, std::uint64_t shuffle_seed,
                     std::uint64_t vocab_size)
    : files_(open_files(files, vocab_size, "training")),
      seq_len_(seq_len),
      global_batch_(global_batch),
      seed_(shuffle_seed),
      windows_(0) {
  SPIPE_CHECK(seq_len > 0 && global_batch > 0, "sequence length and global batch");
  const auto length = static_cast<std::uint64_t>(seq_len);
  for (std::size_t f = 0; f < files_.size(); ++f) {
    first_window_.push_back(windows_);
    windows_ += files_[f].size() == 0 ? 0 : (files_[f].size() - 1) / length;
  }
  first_window_.push_back(windows_);
  if (windows_ == 0) {
    throw Error("too little training data: a window of data.seq_len + 1 " + too_short(length + 1, files_), files[0].string(),
                "use more text or a smaller data.seq_len");
  }
  for (std::size_t f = 0; f < files_.size(); ++f) {
    if (first_window_[f] == first_window_[f + 1]) {
      log_warning(files[f].string() + ": not used, its " + std::to_string(files_[f].size()) +
                  " tokens are fewer than data.seq_len + 1 = " + std::to_string(length + 1));
    }
  }
}

std::uint64_t TrainData::window_of(std::uint64_t step, std::int64_t row) const {
  SPIPE_CHECK(row >= 0 && row < global_batch_, "row outside the global batch");
  const std::uint64_t sequence =
      checked_add(checked_mul(step, static_cast<std::uint64_t>(global_batch_)), static_cast<std::uint64_t>(row));
  return permuted_index(epoch_key(seed_, sequence / windows_), windows_, sequence % windows_);
}

void TrainData::batch(std::uint64_t step, std::int64_t first, std::int64_t rows, std::int32_t* tokens,
                      std::int32_t* targets) const {
  const auto length = static_cast<std::uint64_t>(seq_len_);
  std::vector<std::int32_t> window(length + 1);
  for (std::int64_t row = first; row < first + rows; ++row) {
    const std::uint64_t w = window_of(step, row);
    const std::size_t f = file_of(first_window_, w);
    files_[f].read((w - first_window_[f]) * length, window);
    tokens = std::copy(window.begin(), window.end() - 1, tokens);
    targets = std::copy(window.begin() + 1, window.end(), targets);
  }
}

std::uint64_t TrainData::targets_of_step(std::uint64_t /*step*/) const {
  return static_cast<std::uint64_t>(global_batch_) * static_cast<std::uint64_t>(seq_len_);  // pretraining windows mask nothing
}

std::uint64_t TrainData::windows() const { return windows_; }
std::uint64_t TrainData::tokens() const { return total_tokens(files_); }
std::uint64_t TrainData::fingerprint() const { return hash_files(files_, seq_len_); }

EvalData::EvalData(std::vector<Path> files, std::int64_t seq_len, std::uint64_t vocab_size)
    : files_(open_files(files, vocab_size, "evaluation")), seq_len_(seq_len) {
  SPIPE_CHECK(seq_len > 0, "sequence length");
  std::uint64_t windows = 0;
  for (const TokenFile& file : files_) {
    first_window_.push_back(windows);
    windows += file.size() == 0 ? 0 : ceil_div(file.size() - 1, static_cast<std::uint64_t>(seq_len));
  }
  first_window_.push_back(windows);
  if (windows == 0) {
    throw Error("too little evaluation data: a prediction " + too_short(2, files_), files[0].string(),
                "use a longer held-out text");
  }
}

std::uint64_t EvalData::windows() const { return first_window_.back(); }

void EvalData::batch(std::uint64_t first_window, std::int64_t rows, std::int32_t* tokens, std::int32_t* targets) const {
  const auto length = static_cast<std::uint64_t>(seq_len_);
  std::vector<std::int32_t> window(length + 1);
  for (std::uint64_t w = first_window; w < first_window + static_cast<std::uint64_t>(rows); ++w) {
    std::uint64_t predictions = 0;
    if (w < windows()) {
      const std::size_t f = file_of(first_window_, w);
      const std::uint64_t begin = (w - first_window_[f]) * length;
      predictions = std::min(length, files_[f].size() - 1 - begin);
      files_[f].read(begin, std::span(window).first(predictions + 1));
    }
    // Positions without a prediction hold id 0, which no scored position attends to, and a masked target.
    for (std::uint64_t i = 0; i < length; ++i) {
      *tokens++ = i < predictions ? window[i] : 0;
      *targets++ = i < predictions ? window[i + 1] : -1;
    }
  }
}

std::uint64_t EvalData::targets() const {
  std::uint64_t total = 0;
  for (const TokenFile& file : files_) total += file.size() == 0 ? 0 : file.size() - 1;
  return total;
}

std::uint64_t EvalData::fingerprint() const { return hash_files(files_, seq_len_); }

}  // namespace spipe::data
