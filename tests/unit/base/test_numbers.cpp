// Sizes, units, dtypes, shapes, errors, versions.
#include <bit>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <regex>
#include <string>
#include <vector>

#include "spipe/base/checked.h"
#include "spipe/base/dtype.h"
#include "spipe/base/error.h"
#include "spipe/base/tensor.h"
#include "spipe/base/units.h"
#include "spipe/base/version.h"

using namespace spipe;

TEST_CASE("an error is one line: where, what, hint") {
  CHECK(std::string(Error("bad value", "run.yaml:3", "use 1").what()) == "run.yaml:3: bad value; use 1");
  CHECK(std::string(Error("bad value").what()) == "bad value");
  CHECK(std::string(Error("a\nb", "x\r").what()) == "x : a b");
  CHECK(Error("x").code() == ExitCode::kUser);
}

TEST_CASE("a broken invariant names condition, message and place, and evaluates its message only then") {
  bool evaluated = false;
  const auto message = [&] {
    evaluated = true;
    return std::string("two is not three");
  };
  SPIPE_CHECK(2 == 2, message());
  CHECK_FALSE(evaluated);
  CHECK_THROWS_WITH([&] { SPIPE_CHECK(2 == 3, message()); }(),
                    Catch::Contains("two is not three (2 == 3 at ") && Catch::Contains("test_numbers.cpp:"));
}

TEST_CASE("size arithmetic refuses to wrap") {
  constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
  CHECK(checked_mul(std::uint64_t{1} << 32, (std::uint64_t{1} << 32) - 1) == kMax - ((std::uint64_t{1} << 32) - 1));
  CHECK_THROWS_WITH(checked_mul(std::uint64_t{1} << 32, std::uint64_t{1} << 32), Catch::Contains("size overflow"));
  CHECK(checked_add(kMax - 1, 1) == kMax);
  CHECK_THROWS_AS(checked_add(kMax, 1), Error);
  CHECK(ceil_div(kMax, 2) == (std::uint64_t{1} << 63));
  CHECK(round_up(5, 4) == 8);
  CHECK(round_up(8, 4) == 8);
  CHECK(div_exact(12, 4) == 3);
  CHECK_THROWS_AS(div_exact(13, 4), InternalError);
  CHECK_THROWS_AS(div_exact(13, 0), InternalError);
  CHECK(narrow<std::int32_t>(std::int64_t{-5}) == -5);
  CHECK_THROWS_AS(narrow<std::uint32_t>(std::int64_t{-5}), InternalError);
  CHECK_THROWS_AS(narrow<std::int32_t>(std::int64_t{1} << 31), InternalError);
}

TEST_CASE("sizes in bytes are read as people write them") {
  CHECK(parse_bytes("0") == 0);
  CHECK(parse_bytes("4096") == 4096);
  CHECK(parse_bytes("8 GiB") == std::uint64_t{8} << 30);
  CHECK(parse_bytes("512MiB") == std::uint64_t{512} << 20);
  CHECK(parse_bytes("1.5 GB") == 1'500'000'000);
  CHECK(parse_bytes("0.5 KiB") == 512);
  CHECK(parse_bytes("2 kB") == 2000);
  CHECK(parse_bytes("7 B") == 7);
  CHECK(parse_bytes("18446744073709551615") == std::numeric_limits<std::uint64_t>::max());
}

TEST_CASE("anything else is not a size, and the message says what is") {
  for (const char* text : {"",
                           " ",
                           "GiB",
                           "-1",
                           "-1 GiB",
                           "+1",
                           "8 gb",
                           "8G",
                           "8  GiB",
                           "8 GiB ",
                           " 8",
                           "nan",
                           "inf",
                           "1e3",
                           "0x10",
                           "1,000",
                           "1_000",
                           "010",
                           "1.",
                           ".5 GiB",
                           "1.5",
                           "1.5 B",
                           "1..5 GiB",
                           "18446744073709551616",
                           "17179869184 GiB",
                           "16777216.5 TiB"}) {
    INFO(text);
    CHECK_THROWS_WITH(parse_bytes(text),
                      Catch::Contains("'" + std::string(text) + "' is not a size") && Catch::Contains("'8 GiB'"));
  }
}

TEST_CASE("numbers are written with three significant digits") {
  CHECK(format_bytes(0) == "0 B");
  CHECK(format_bytes(1023) == "1023 B");
  CHECK(format_bytes(1024) == "1.00 KiB");
  CHECK(format_bytes(3 * (std::uint64_t{1} << 29)) == "1.50 GiB");
  CHECK(format_bytes((std::uint64_t{1} << 20) - 1) == "1.00 MiB");
  CHECK(format_bytes(std::numeric_limits<std::uint64_t>::max()) == "16.0 EiB");
  CHECK(format_count(0) == "0");
  CHECK(format_count(999) == "999");
  CHECK(format_count(12'340) == "12.3 k");
  CHECK(format_count(1'870'000) == "1.87 M");
  CHECK(format_count(999'999) == "1.00 M");
  CHECK(format_count(-2500) == "-2.50 k");
  CHECK(format_count(0.41) == "0.41");
  CHECK(format_duration(0) == "0.00 s");
  CHECK(format_duration(0.0123) == "12.3 ms");
  CHECK(format_duration(0.41) == "0.41 s");
  CHECK(format_duration(59.96) == "1 m 00 s");
  CHECK(format_duration(187) == "3 m 07 s");
  CHECK(format_duration(3720) == "1 h 02 m");
  CHECK(format_duration(3599.7) == "1 h 00 m");
  CHECK(format_duration(86400 * 2 + 3600 * 3) == "2 d 03 h");
  CHECK(format_duration(-1) == "-1 s");
}

TEST_CASE("the nearest word is found within a third of its length") {
  const std::vector<std::string> words = {"learning_rate", "lr", "steps"};
  CHECK(nearest_word("learning_rat", words) == "learning_rate");
  CHECK(nearest_word("step", words) == "steps");
  CHECK(nearest_word("xyzzyq", words).empty());
  CHECK(edit_distance("kitten", "sitting") == 3);
  CHECK(edit_distance("", "abc") == 3);
}

TEST_CASE("dtypes have sizes and names") {
  CHECK(dtype_size(DType::f32) == 4);
  CHECK(dtype_size(DType::bf16) == 2);
  CHECK(dtype_size(DType::boolean) == 1);
  CHECK(dtype_name(DType::u16) == "uint16");
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) CHECK(dtype_from_name(dtype_name(dtype)) == dtype);
  CHECK_THROWS_WITH(dtype_from_name("float32"), "unknown dtype 'float32'; use fp32, bf16 or fp16");
}

TEST_CASE("bf16 rounding: half up for compute copies, nearest even for the rest") {
  const auto f = [](std::uint32_t bits) { return std::bit_cast<float>(bits); };
  CHECK(bf16_from_f32_half_up(f(0x3f808000)) == 0x3f81);  // a tie goes away from zero
  CHECK(bf16_from_f32(f(0x3f808000)) == 0x3f80);          // to even
  CHECK(bf16_from_f32(f(0x3f818000)) == 0x3f82);
  CHECK(bf16_from_f32(f(0x3f808001)) == 0x3f81);
  CHECK(bf16_from_f32_half_up(f(0x3f807fff)) == 0x3f80);
  CHECK(bf16_from_f32_half_up(f(0xbf808000)) == 0xbf81);
  for (const auto convert : {bf16_from_f32, bf16_from_f32_half_up}) {
    CHECK(convert(f(0x7fffffff)) == 0x7fc0);  // would wrap to -0 when added to
    CHECK(convert(f(0xff800001)) == 0xffc0);
    CHECK(convert(f(0x7f800000)) == 0x7f80);
    CHECK(convert(f(0x7f7fffff)) == 0x7f80);  // finite, rounds to infinity
    CHECK(convert(-0.0F) == 0x8000);
  }
}

TEST_CASE("every bf16 and fp16 pattern survives the way through fp32") {
  for (std::uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const auto pattern = static_cast<std::uint16_t>(bits);
    const float from_bf16 = f32_from_bf16(pattern);
    if (!std::isnan(from_bf16)) {
      if (bf16_from_f32(from_bf16) != pattern || bf16_from_f32_half_up(from_bf16) != pattern) FAIL("bf16 " << bits);
    }
    const float from_f16 = f32_from_f16(pattern);
    if (std::isnan(from_f16)) {
      if (!std::isnan(f32_from_f16(f16_from_f32(from_f16)))) FAIL("fp16 NaN " << bits);
    } else if (f16_from_f32(from_f16) != pattern) {
      FAIL("fp16 " << bits);
    }
  }
  CHECK(f32_from_f16(0x3c00) == 1.0F);
  CHECK(f32_from_f16(0x0001) == 0x1p-24F);
  CHECK(f32_from_f16(0x7bff) == 65504.0F);
  CHECK(std::isinf(f32_from_f16(0xfc00)));
}

TEST_CASE("fp16 is the nearest value with ties to even, also among subnormals") {
  for (std::uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const double below = f32_from_f16(static_cast<std::uint16_t>(bits));
    const double above = f32_from_f16(static_cast<std::uint16_t>(bits + 1));
    const auto middle = static_cast<float>((below + above) / 2);  // exact: one more bit
    const std::uint32_t even = bits + (bits & 1U);
    if (f16_from_f32(middle) != even) FAIL("tie above " << bits);
    if (f16_from_f32(std::nextafter(middle, 0.0F)) != bits) FAIL("just below the tie above " << bits);
    if (f16_from_f32(std::nextafter(middle, 1e9F)) != bits + 1) FAIL("just above the tie above " << bits);
  }
  CHECK(f16_from_f32(65519.99F) == 0x7bff);
  CHECK(f16_from_f32(65520.0F) == 0x7c00);
  CHECK(f16_from_f32(-1e30F) == 0xfc00);
  CHECK(f16_from_f32(-1e-30F) == 0x8000);
}

TEST_CASE("shapes count their elements and say what they are") {
  CHECK(Shape{}.elements() == 1);
  CHECK(Shape{2, 3, 4}.elements() == 24);
  CHECK(Shape{2, 0}.elements() == 0);
  CHECK(Shape{2, 3}.text() == "[2, 3]");
  CHECK(Shape{2, 3} == Shape{2, 3});
  CHECK_FALSE(Shape{2, 3} == Shape{2, 3, 1});
  CHECK_THROWS_AS((Shape{1, 1, 1, 1, 1}), InternalError);
  CHECK_THROWS_AS(Shape{-1}, InternalError);
  CHECK_THROWS_AS((Shape{std::int64_t{1} << 33, std::int64_t{1} << 33}.elements()), Error);
  CHECK(TensorView{nullptr, DType::bf16, {3, 5}}.bytes() == 30);
}

TEST_CASE("the build says what it is") {
  CHECK(std::regex_match(std::string(version()), std::regex("[0-9]+\\.[0-9]+\\.[0-9]+")));
  CHECK(std::regex_match(std::string(git_commit()), std::regex("unknown|[0-9a-f]{7,40}(\\+dirty)?")));
  CHECK_THAT(std::string(build_text()), Catch::Contains("oneDNN "));
}
