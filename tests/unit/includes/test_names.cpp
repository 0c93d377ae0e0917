// Names of test cases must survive the list that CMake makes of them.
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <string>
#include <vector>

namespace fs = std::filesystem;

namespace {

// The names in a source text that CMake's lists would split or mangle: those with ; [ ] or a backslash.
std::vector<std::string> mangled_names(const std::string& text) {
  static const std::regex name_of_case(R"~((?:TEST_CASE|SCENARIO)\s*\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+))~");
  std::vector<std::string> names;
  for (std::sregex_iterator match(text.begin(), text.end(), name_of_case), end; match != end; ++match) {
    const std::string name = (*match)[1].str();
    if (name.find_first_of(";[]\\") != std::string::npos) names.push_back(name);
  }
  return names;
}

}  // namespace

TEST_CASE("test names have nothing that the list of tests would split") {
  int files = 0;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator("tests")) {
    if (entry.path().extension() != ".cpp") continue;
    ++files;
    std::ifstream in(entry.path());
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    for (const std::string& name : mangled_names(text)) FAIL_CHECK(entry.path().string() << ": " << name);
  }
  CHECK(files > 50);  // the working folder is the repository
}

TEST_CASE("a name that would be split is caught, on one line and on two") {
  const std::string begin = "TEST_" + std::string("CASE(\n    ");
  CHECK(mangled_names(begin + "\"good, as it is\") {").empty());
  CHECK(mangled_names(begin + "\"first; second\") {").size() == 1);
  CHECK(mangled_names(begin + "\"first\"\n    \" [second]\") {").size() == 1);
}
