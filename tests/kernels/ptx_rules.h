// What the PTX of a kernel says about its arithmetic.
#pragma once

#include <string>
#include <vector>

namespace spipe::test {

// Instructions that could give other bits than the CPU: flushes to zero, approximations, fused operations that were not written
// so (mad), roundings other than to nearest even, arithmetic without a rounding mode. One line each.
[[nodiscard]] std::vector<std::string> inexact_instructions(const std::string& ptx);
// Atomic operations on floating-point numbers, whose order is not fixed.
[[nodiscard]] std::vector<std::string> floating_atomics(const std::string& ptx);
// How many floating-point instructions that round there are: a test that found none has read nothing.
[[nodiscard]] int rounding_instructions(const std::string& ptx);

}  // namespace spipe::test
