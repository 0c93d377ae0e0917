#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>

#include "spipe/io/safetensors.h"
#include "test_files.h"

namespace spipe::io {
namespace {

using test::contains;
using test::error_line;
using test::read_file;
using test::TempFolder;
using test::write_file;

std::string length_bytes(std::uint64_t length) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes;
}
std::string file_of(const std::string& header, const std::string& data, std::uint64_t header_length) {
  return length_bytes(header_length) + header + data;
}
std::string file_of(const std::string& header, const std::string& data) { return file_of(header, data, header.size()); }
std::string tensor(const std::string& shape, const std::string& offsets, const std::string& dtype = "F32") {
  return R"({"w": {"dtype": ")" + dtype + R"(", "shape": )" + shape + R"(, "data_offsets": )" + offsets + "}}";
}

const std::string kOk = tensor("[2, 2]", "[0, 16]");
const std::string kData(16, '\0');

// CASES Appendix 1: every file but "ok", and what its refusal must mention.
struct Hostile {
  std::string name, bytes, mentions;
};
std::vector<Hostile> hostile_files() {
  const std::string ok = file_of(kOk, kData);
  return {
      {"len_max", file_of(kOk, kData, ~0ULL), "18446744073709551615 bytes"},
      {"len_past_eof", file_of(kOk, kData, 1'000'000), "1000000 bytes"},
      {"len_zero", file_of(kOk, kData, 0), "not valid JSON"},
      {"reversed", file_of(tensor("[2, 2]", "[16, 0]"), kData), "run backwards"},
      {"negative", file_of(tensor("[2, 2]", "[-16, 0]"), kData), "negative number -16"},
      {"past_eof", file_of(tensor("[2, 2]", "[0, 4096]"), kData), "takes 16 bytes, but data_offsets [0, 4096]"},
      {"huge_end", file_of(tensor("[2, 2]", "[0, 18446744073709551608]"), kData), "[0, 18446744073709551608]"},
      {"span_short", file_of(tensor("[1024, 1024]", "[0, 16]"), kData), "takes 4194304 bytes"},
      {"shape_wrap", file_of(tensor("[4294967296, 4294967296]", "[0, 0]"), ""), "does not fit in 64 bits"},
      {"one_offset", file_of(tensor("[2, 2]", "[0]"), kData), "two numbers"},
      {"float_offset", file_of(tensor("[2, 2]", "[0, 16.5]"), kData), "16.5"},
      {"not_object", file_of("[1,2,3]", kData), "unexpected '['"},
      {"bad_utf8", file_of("{\"w\xff\":{}}", kData), "invalid UTF-8"},
      {"cut_json", file_of(kOk.substr(0, kOk.size() - 3), kData), "ends too early"},
      {"deep", file_of("{\"w\":" + std::string(200'000, '['), kData), "unexpected '['"},
      {"tiny", std::string("\x05\x00\x00", 3), "at least 8 bytes"},
      {"empty", "", "at least 8 bytes"},
      {"truncated", ok.substr(0, ok.size() - 4),
       "expected " + std::to_string(ok.size()) + " bytes, file has " + std::to_string(ok.size() - 4)},
  };
}

TEST_CASE("of the nineteen files of the fixture maker only ok loads, the others are refused in one line") {
  const TempFolder folder;
  write_file(folder / "ok.safetensors", file_of(kOk, kData));
  const SafetensorsFile ok(folder / "ok.safetensors");
  REQUIRE(ok.tensors().size() == 1);
  CHECK(ok.tensors()[0].shape == std::vector<std::uint64_t>{2, 2});

  const auto files = hostile_files();
  REQUIRE(files.size() == 18);
  for (const Hostile& file : files) {
    INFO(file.name);
    const auto path = folder / (file.name + ".safetensors");
    write_file(path, file.bytes);
    const std::string line = error_line([&] { const SafetensorsFile opened(path); });
    INFO(line);
    CHECK(contains(line, file.name + ".safetensors"));
    CHECK(contains(line, file.mentions));
  }
}

TEST_CASE("a refusal about a tensor names it") {
  const TempFolder folder;
  for (const std::string& header :
       {tensor("[2, 2]", "[16, 0]"), tensor("[2, 2]", "[-16, 0]"), tensor("[2, 2]", "[0, 4096]"), tensor("[3]", "[0, 16]"),
        tensor("[2, 2]", "[0]"), tensor("[2, 2]", "[0, 16.5]"), tensor("[2, -2]", "[0, 16]"), tensor("[4]", "[0, 16]", "F17"),
        tensor("[4]", "[0, 1e1]"), std::string(R"({"w": {"dtype": "F32", "shape": [4]}})"), std::string(R"({"w": 3})"),
        std::string(R"({"w": {"dtype": "F32", "shape": [[4]], "data_offsets": [0, 16]}})"),
        std::string(R"({"w": {"dtype": "F32", "dtype": "F32", "shape": [4], "data_offsets": [0, 16]}})"),
        std::string(R"({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], "more": 1}})")}) {
    INFO(header);
    write_file(folder / "x.safetensors", file_of(header, kData));
    CHECK(contains(error_line([&] { const SafetensorsFile opened(folder / "x.safetensors"); }), "tensor 'w'"));
  }
}

TEST_CASE("duplicates, holes, overlaps and tails are refused") {
  const TempFolder folder;
  const auto line_for = [&](const std::string& header, const std::string& data) {
    write_file(folder / "x.safetensors", file_of(header, data));
    return error_line([&] { const SafetensorsFile opened(folder / "x.safetensors"); });
  };
  const auto entry = [](const std::string& name, int begin, int end) {
    return "\"" + name + R"(": {"dtype": "F32", "shape": [)" + std::to_string((end - begin) / 4) + R"(], "data_offsets": [)" +
           std::to_string(begin) + ", " + std::to_string(end) + "]}";
  };
  CHECK(contains(line_for("{" + entry("a", 0, 8) + "," + entry("a", 8, 16) + "}", kData), "'a' appears twice"));
  CHECK(contains(line_for("{" + entry("a", 0, 8) + "," + entry("b", 4, 16) + "}", kData), "'b' begins at byte 4"));
  CHECK(contains(line_for("{" + entry("a", 0, 4) + "," + entry("b", 8, 16) + "}", kData), "'b' begins at byte 8"));
  CHECK(contains(line_for("{" + entry("a", 0, 8) + "}", kData), "expected"));
  CHECK(contains(line_for("{" + entry("a", 0, 16) + R"(,"__metadata__":{"k":1}})", kData), "__metadata__"));
  CHECK(contains(line_for(R"({"__metadata__":{"k":"1","k":"2"}})", ""), "'k' appears twice"));
  CHECK(contains(line_for("{} x", ""), "not valid JSON"));
}

TEST_CASE("a header above 100 MB is refused by its length, before it is read") {
  const TempFolder folder;
  const auto path = folder / "big.safetensors";
  write_file(path, length_bytes(100'000'001));
  std::filesystem::resize_file(path, 8 + 100'000'001);  // sparse
  CHECK(contains(error_line([&] { const SafetensorsFile opened(path); }), "limit of 100 MB"));
}

TEST_CASE("odd but valid files load: no tensors, empty tensors, scalars, metadata, unsorted and unaligned data") {
  const TempFolder folder;
  write_file(folder / "none.safetensors", file_of("{}", ""));
  CHECK(SafetensorsFile(folder / "none.safetensors").tensors().empty());

  const std::string header =
      R"({"z":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"__metadata__":{"format":"pt"},)"
      R"("s":{"data_offsets":[1,5],"shape":[],"dtype":"F32"},"e":{"dtype":"F32","shape":[0,3],"data_offsets":[1,1]}} )";
  std::string data(5, '\0');
  const float value = -2.5F;
  std::memcpy(data.data() + 1, &value, 4);
  write_file(folder / "odd.safetensors", file_of(header, data));
  const SafetensorsFile file(folder / "odd.safetensors");
  REQUIRE(file.tensors().size() == 3);
  CHECK(file.tensors()[0].name == "e");
  CHECK(file.tensors()[2].name == "z");
  CHECK(file.metadata().at("format") == "pt");
  CHECK(file.find("missing") == nullptr);
  float read = 0;
  file.read_f32(*file.find("s"), &read);
  CHECK(read == value);
  CHECK(contains(error_line([&] { file.read_f32(*file.find("z"), &read); }), "'z' is U8"));
}

TEST_CASE("what the writer streams, the reader gives back - the header is padded to eight bytes") {
  const TempFolder folder;
  const auto path = folder / "out.safetensors";
  const std::array<float, 6> weights{1, -2, 3.5F, std::nanf(""), -0.0F, 6e-39F};
  // CASES O25: bf16 bit patterns of 1e5, -3e38, 1e-7, NaN, -0.0 come back bit for bit.
  const std::array<std::uint16_t, 5> halves{0x47c3, 0xff62, 0x33d7, 0x7fc0, 0x8000};
  {
    SafetensorsWriter writer(path,
                             {{.name = "model.w", .dtype = DType::f32, .shape = {2, 3}},
                              {.name = "a.bias", .dtype = DType::bf16, .shape = {5}},
                              {.name = "nothing", .dtype = DType::f32, .shape = {0}}},
                             {{"format", "pt"}});
    writer.write("model.w", std::as_bytes(std::span(weights)));
    writer.write("a.bias", std::as_bytes(std::span(halves)));
    writer.write("nothing", {});
    writer.finish();
  }
  const std::string bytes = read_file(path);
  CHECK(static_cast<unsigned char>(bytes[0]) % 8 == 0);

  const SafetensorsFile file(path);
  CHECK(file.metadata().at("format") == "pt");
  REQUIRE(file.find("model.w") != nullptr);
  CHECK(file.find("model.w")->begin == 0);  // in the order given, not by name
  CHECK(std::memcmp(file.data(*file.find("model.w")).data(), weights.data(), sizeof(weights)) == 0);
  CHECK(std::memcmp(file.data(*file.find("a.bias")).data(), halves.data(), sizeof(halves)) == 0);
  std::array<float, 5> wide{};
  file.read_f32(*file.find("a.bias"), wide.data());
  for (std::size_t i = 0; i < wide.size(); ++i) {
    CHECK(std::bit_cast<std::uint32_t>(wide[i]) == static_cast<std::uint32_t>(halves[i]) << 16);
  }
}

TEST_CASE("the writer refuses tensors out of order, of a wrong size or left out") {
  const TempFolder folder;
  const std::vector<TensorInfo> tensors{{.name = "a", .dtype = DType::u8, .shape = {2}},
                                        {.name = "b", .dtype = DType::u8, .shape = {2}}};
  const std::array<std::byte, 3> bytes{};
  const std::span<const std::byte> two = std::span(bytes).first(2);
  SafetensorsWriter writer(folder / "x.safetensors", tensors);
  CHECK_THROWS_AS(writer.write("b", two), InternalError);
  CHECK_THROWS_AS(writer.write("a", bytes), InternalError);
  writer.write("a", two);
  CHECK_THROWS_AS(writer.finish(), InternalError);
  writer.write("b", two);
  writer.finish();
  CHECK_THROWS_AS(SafetensorsWriter(folder / "y.safetensors", {tensors[0], tensors[0]}), InternalError);
}

TEST_CASE("float types are widened exactly") {
  const TempFolder folder;
  const auto path = folder / "types.safetensors";
  const std::array<std::uint16_t, 3> half{0x3c00, 0x0001, 0xfbff};  // 1, the smallest subnormal, -65504
  const std::array<double, 2> wide{0.1, -1e300};
  SafetensorsWriter writer(
      path, {{.name = "h", .dtype = DType::f16, .shape = {3}}, {.name = "d", .dtype = DType::f64, .shape = {2}}});
  writer.write("h", std::as_bytes(std::span(half)));
  writer.write("d", std::as_bytes(std::span(wide)));
  writer.finish();
  const SafetensorsFile file(path);
  std::array<float, 3> out{};
  file.read_f32(*file.find("h"), out.data());
  CHECK(out == std::array<float, 3>{1.0F, std::ldexp(1.0F, -24), -65504.0F});
  file.read_f32(*file.find("d"), out.data());
  CHECK(out[0] == 0.1F);
  CHECK(std::isinf(out[1]));
}

TEST_CASE("the golden models open") {
  for (const std::string name : {"gpt2", "opt", "llama", "qwen3"}) {
    const SafetensorsFile file("tests/golden/data/" + name + "/model.safetensors");
    CHECK(file.tensors().size() > 10);
    for (const TensorInfo& tensor_info : file.tensors()) {
      CHECK(file.data(tensor_info).size() == tensor_info.elements() * dtype_size(tensor_info.dtype));
    }
  }
}

}  // namespace
}  // namespace spipe::io
