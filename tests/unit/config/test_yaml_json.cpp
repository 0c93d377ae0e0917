#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/config/yaml_json.h"

using namespace spipe;
using config::yaml_to_json_text;

namespace {

class YamlFile {
 public:
  explicit YamlFile(const std::string& text)
      : path_(std::filesystem::temp_directory_path() /
              ("spipe-yaml-" + hash_text(hash64(std::as_bytes(std::span(text)))) + ".yaml")) {
    std::ofstream(path_, std::ios::binary) << text;
  }
  ~YamlFile() { std::filesystem::remove(path_); }
  YamlFile(const YamlFile&) = delete;
  YamlFile& operator=(const YamlFile&) = delete;
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// JSON without the blanks between tokens (the test texts hold none inside).
std::string compact(const std::string& yaml) {
  std::string text = yaml_to_json_text(YamlFile(yaml).path());
  std::erase_if(text, [](char c) { return c == ' ' || c == '\n'; });
  return text;
}

}  // namespace

TEST_CASE("YAML scalars become JSON of the right type, in the file's order") {
  CHECK(
      compact("z: 1\na: -5\nb: 1e-5\nc: 10000.0\nd: true\ne: false\nf: null\ng: ~\nh: text\ni: \"5\"\nj: 'true'\nk: .5\nl: "
              "1e4\n") ==
      R"({"z":1,"a":-5,"b":1e-05,"c":10000.0,"d":true,"e":false,"f":null,"g":null,"h":"text","i":"5","j":"true","k":0.5,"l":10000.0})");
  CHECK(compact("a: [1, [x, null], {b: 2}]\nc: {d: {}}\n") == R"({"a":[1,["x",null],{"b":2}],"c":{"d":{}}})");
  CHECK(compact("a: 9223372036854775807\nname: gpt2-xl_v1.5\nq: \"\\\"\\\\\"\n") ==
        R"({"a":9223372036854775807,"name":"gpt2-xl_v1.5","q":"\"\\"})");
}

TEST_CASE("what YAML readers disagree about is refused with its line") {
  for (const char* bad : {"yes", "No", "on", "OFF", "True", "FALSE", "010", "1_000", "12:30", "0x10", ".inf", "-.inf", ".nan",
                          "NaN", "+5", "1e999", "99999999999999999999", "1,000"}) {
    INFO(bad);
    const YamlFile file("a: 1\nb: " + std::string(bad) + "\n");
    CHECK_THROWS_WITH(
        yaml_to_json_text(file.path()),
        file.path().string() + ":2: '" + bad +
            "' can be read in more than one way; write true or false, a plain decimal number, or quote it if it is text");
  }
  CHECK_THROWS_WITH(yaml_to_json_text(YamlFile("a: 1\na: 2\n").path()),
                    Catch::Contains(":2: key 'a' is given twice, first on line 1"));
  CHECK_THROWS_WITH(yaml_to_json_text(YamlFile("- 1\n").path()), Catch::Contains(":1: must be a map of keys, not a list"));
  CHECK_THROWS_WITH(yaml_to_json_text(YamlFile("").path()), Catch::Contains("the file is empty"));
  CHECK_THROWS_WITH(yaml_to_json_text("no/such/file.yaml"), "no/such/file.yaml: cannot open: No such file or directory");
}

TEST_CASE("the model files that come with us are maps with a model_type") {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator("configs/models")) {
    INFO(entry.path());
    CHECK_THAT(yaml_to_json_text(entry.path()), Catch::Contains("\"model_type\": \""));
    ++files;
  }
  CHECK(files >= 3);
}
