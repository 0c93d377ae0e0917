// Small things that benches of whole runs share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <vector>

#include "spipe/base/random.h"
#include "spipe/data/data.h"

namespace spipe::bench {

// The upper one of two middles; 0 of nothing.
inline double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values.empty() ? 0 : values[values.size() / 2];
}

// A token file of one document of 20,000 tokens, all equally likely.
inline void write_tokens(const std::filesystem::path& file, int vocabulary) {
  data::TokenFileWriter writer(file, static_cast<std::uint64_t>(vocabulary), 1, -1);
  std::vector<std::int32_t> tokens;
  for (std::uint64_t i = 0; i < 20000; ++i) {
    tokens.push_back(static_cast<std::int32_t>(uniform_at(make_key(1, 1), 0, i) * static_cast<float>(vocabulary)));
  }
  writer.document(tokens);
  writer.finish();
}

}  // namespace spipe::bench
