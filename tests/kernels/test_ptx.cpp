// The update kernels' PTX names every rounding, and no kernel adds floating-point numbers atomically.
#include <catch2/catch.hpp>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <sstream>

#include "tests/kernels/ptx_rules.h"

namespace spipe::test {
namespace {

std::vector<std::string> ptx_files() {
  std::vector<std::string> files;
  std::istringstream list(SPIPE_PTX_FILES);  // separated by commas; none without a CUDA compiler
  for (std::string file; std::getline(list, file, ',');) files.push_back(file);
  return files;
}

std::string text_of(const std::string& path) {
  std::ifstream stream(path);
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

}  // namespace

TEST_CASE("instructions that could change bits are found in PTX") {
  CHECK(inexact_instructions("\tfma.rn.f32 \t%f1, %f2, %f3, %f4;\n\tadd.rn.f64 %fd1, %fd2, %fd3;\n").empty());
  CHECK(inexact_instructions("\tadd.s64 %rd1, %rd2, %rd3;\n\tmad.lo.s32 %r1, %r2, %r3, %r4;\n// mul.ftz.f32\n").empty());
  CHECK(inexact_instructions("\tld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];\n").empty());
  CHECK(inexact_instructions("\tcvt.f32.f16 %f1, %rs1;\n\tcvt.f64.f32 %fd1, %f1;\n").empty());  // widening is exact
  for (const char* bad : {"mul.ftz.f32", "sqrt.approx.f32", "div.full.f32", "fma.rz.f32", "add.f32", "rcp.approx.ftz.f32",
                          "ex2.approx.ftz.f32", "mad.f32", "cvt.rz.f16.f32", "mul.rn.ftz.f32", "cvt.rn.ftz.f16.f32"}) {
    CAPTURE(bad);
    CHECK(inexact_instructions(std::string("\t") + bad + " \t%f1, %f2, %f3;\n").size() == 1);
    CHECK(inexact_instructions(std::string("\t@%p1 ") + bad + " \t%f1, %f2, %f3;\n").size() == 1);
  }
}

TEST_CASE("floating-point atomics are found in PTX") {
  CHECK(floating_atomics("\tatom.global.or.b32 %r1, [%rd1], 1;\n\tred.global.or.b32 [%rd1], 1;\n").empty());
  CHECK(floating_atomics("\tatom.global.add.f32 %f1, [%rd1], %f2;\n").size() == 1);
  CHECK(floating_atomics("\t@%p1 red.global.add.f64 [%rd1], %fd2;\n").size() == 1);
  CHECK(floating_atomics("\tred.global.add.noftz.bf16 [%rd1], %rs2;\n").size() == 1);
}

TEST_CASE("the PTX of the update kernels names every rounding") {
  if (ptx_files().empty()) std::cout << "SKIPPED: built without a CUDA compiler, no PTX to read\n";
  bool found = false;
  for (const std::string& path : ptx_files()) {
    if (path.find("ops_update") == std::string::npos) continue;
    found = true;
    const std::string text = text_of(path);
    CHECK(rounding_instructions(text) > 100);
    for (const std::string& instruction : inexact_instructions(text)) FAIL_CHECK(path << ": " << instruction);
  }
  CHECK((found || ptx_files().empty()));
}

TEST_CASE("no kernel adds floating-point numbers atomically") {
  for (const std::string& path : ptx_files()) {
    const std::string text = text_of(path);
    CHECK(text.find(".version") != std::string::npos);
    for (const std::string& instruction : floating_atomics(text)) FAIL_CHECK(path << ": " << instruction);
  }
}

}  // namespace spipe::test
