#include "spipe/base/file.h"
#include "spipe/config/config.h"

namespace spipe::config {

std::string NumericsBlock::text() const {
  std::string text;
  for (const auto& [key, value] : values) text += key + " = " + value + "\n";
  return text;
}

std::string NumericsBlock::hash() const {
  const std::string content = text();
  return hash_text(hash64(std::as_bytes(std::span(content))));
}

}  // namespace spipe::config
