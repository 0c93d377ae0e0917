// Errors: one line that says what is wrong, where, and what to do about it.
#pragma once

#include <exception>
#include <string>

namespace spipe {

// Process exit codes. The user's mistakes (config, files, flags, environment, budgets) end with kUser; kSaved: a signal asked
// for a save and an end, both done (run again with --resume).
enum class ExitCode : int { kOk = 0, kInternal = 1, kUser = 2, kNonFinite = 3, kSaved = 75, kInterrupted = 130 };

// A problem the user can act on. `what` is the finding ("unknown key 'lrr'"), `where` the place
// ("run.yaml:12", "rank 3", a file; may be empty), `hint` the way out ("did you mean 'lr'?"; may be empty).
class Error : public std::exception {
 public:
  explicit Error(std::string what, std::string where = {}, std::string hint = {}, ExitCode code = ExitCode::kUser);
  const char* what() const noexcept override { return line_.c_str(); }  // "where: what; hint", one line
  [[nodiscard]] const std::string& finding() const { return what_; }
  [[nodiscard]] const std::string& where() const { return where_; }
  [[nodiscard]] const std::string& hint() const { return hint_; }
  [[nodiscard]] ExitCode code() const { return code_; }

 private:
  std::string what_, where_, hint_, line_;
  ExitCode code_;
};

// A broken invariant of our own code. Never the user's fault; exit code kInternal.
class InternalError : public std::exception {
 public:
  InternalError(const char* condition, const std::string& message, const char* file, int line);
  const char* what() const noexcept override { return line_.c_str(); }

 private:
  std::string line_;
};

[[noreturn]] void fail_check(const char* condition, const std::string& message, const char* file, int line);

}  // namespace spipe

// Invariants of our own code, checked in every build. The message is evaluated only on failure.
#define SPIPE_CHECK(condition, message)                               \
  do {                                                                \
    if (!(condition)) [[unlikely]] {                                  \
      ::spipe::fail_check(#condition, (message), __FILE__, __LINE__); \
    }                                                                 \
  } while (false)
