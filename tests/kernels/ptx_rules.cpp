#include "tests/kernels/ptx_rules.h"

#include <sstream>
#include <string_view>

namespace spipe::test {
namespace {

// The instructions of the text with all their suffixes: "fma.rn.f32".
std::vector<std::string> instructions(const std::string& ptx) {
  std::vector<std::string> found;
  std::istringstream lines(ptx);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string word;
    words >> word;
    if (word.starts_with("@")) words >> word;  // a predicate comes before its instruction
    if (word.empty() || word[0] == '.' || word[0] == '/' || word.find('.') == std::string::npos) continue;
    if (word.ends_with(';')) word.pop_back();
    found.push_back(word);
  }
  return found;
}

bool has(std::string_view instruction, std::string_view part) { return instruction.find(part) != std::string_view::npos; }

bool is_floating(std::string_view i) {
  for (const char* type : {".f16", ".bf16", ".f32", ".f64"}) {
    if (has(i, type)) return true;
  }
  return false;
}

bool rounds(std::string_view i) {
  for (const char* name :
       {"add.", "sub.", "mul.", "fma.", "mad.", "div.", "sqrt.", "rcp.", "rsqrt.", "ex2.", "lg2.", "sin.", "cos.", "tanh."}) {
    if (i.starts_with(name) && is_floating(i)) return true;
  }
  return i.starts_with("cvt.") && is_floating(i) && has(i, ".r");
}

}  // namespace

std::vector<std::string> inexact_instructions(const std::string& ptx) {
  std::vector<std::string> faults;
  for (const std::string& i : instructions(ptx)) {
    if (!is_floating(i)) continue;
    const bool bad = has(i, ".ftz") || has(i, ".approx") || has(i, ".full") || has(i, ".sat") || i.starts_with("mad.") ||
                     (rounds(i) && !has(i, ".rn"));
    if (bad) faults.push_back(i);
  }
  return faults;
}

std::vector<std::string> floating_atomics(const std::string& ptx) {
  std::vector<std::string> faults;
  for (const std::string& i : instructions(ptx)) {
    if ((i.starts_with("atom.") || i.starts_with("red.")) && is_floating(i)) faults.push_back(i);
  }
  return faults;
}

int rounding_instructions(const std::string& ptx) {
  int count = 0;
  for (const std::string& i : instructions(ptx)) count += rounds(i) ? 1 : 0;
  return count;
}

}  // namespace spipe::test
