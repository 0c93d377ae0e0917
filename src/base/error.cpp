#include "spipe/base/error.h"

#include <utility>

namespace spipe {

Error::Error(std::string what, std::string where, std::string hint, ExitCode code)
    : what_(std::move(what)), where_(std::move(where)), hint_(std::move(hint)), code_(code) {
  if (!where_.empty()) line_ = where_ + ": ";
  line_ += what_;
  if (!hint_.empty()) line_ += "; " + hint_;
  // One line by contract, whatever a file's content put into the parts.
  for (char& c : line_) {
    if (c == '\n' || c == '\r') c = ' ';
  }
}

InternalError::InternalError(const char* condition, const std::string& message, const char* file, int line)
    : line_("internal error: " + message + " (" + condition + " at " + file + ":" + std::to_string(line) + ")") {}

void fail_check(const char* condition, const std::string& message, const char* file, int line) {
  throw InternalError(condition, message, file, line);
}

}  // namespace spipe
