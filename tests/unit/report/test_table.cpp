#include <catch2/catch.hpp>

#include "spipe/report/report.h"

namespace spipe::report {

TEST_CASE("texts are aligned left and numbers right, without trailing blanks") {
  CHECK(table({{"what", "bytes", "note"}, {"saved", "1.50 GiB", "kept"}, {"boundary", "12 MiB", ""}}) ==
        "what         bytes  note\n"
        "saved     1.50 GiB  kept\n"
        "boundary    12 MiB\n");
}

TEST_CASE("missing numbers do not make a column text, one word does") {
  CHECK(table({{"a", "b"}, {"x", "-"}, {"y", "100"}, {"z", ""}}) ==
        "a    b\n"
        "x    -\n"
        "y  100\n"
        "z\n");
  CHECK(table({{"b", "c"}, {"auto", "1"}, {"100", "2"}}) ==
        "b     c\n"
        "auto  1\n"
        "100   2\n");
}

TEST_CASE("negative numbers, percentages and lone fractions are numbers, options are not") {
  CHECK(table({{"n", "x"}, {"-1", "a"}, {"+30 %", "a"}, {".5", "a"}}) ==
        "    n  x\n"
        "   -1  a\n"
        "+30 %  a\n"
        "   .5  a\n");
  CHECK(table({{"flag", "x"}, {"--a", "1"}}) ==
        "flag  x\n"
        "--a   1\n");
}

TEST_CASE("rows may be ragged, headings wide, and letters beyond ASCII take one column") {
  CHECK(table({{"long heading"}, {"1", "b"}, {"2"}}) ==
        "long heading\n"
        "           1  b\n"
        "           2\n");
  CHECK(table({{"a", "b"}, {"\u00fc", "x"}, {"uu", "x"}}) ==
        "a   b\n"
        "\u00fc   x\n"
        "uu  x\n");
  CHECK(table({}).empty());
  CHECK(table({{"only", "headings"}}) == "only  headings\n");
}

}  // namespace spipe::report
