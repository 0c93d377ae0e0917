#include "scan.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <regex>
#include <set>

namespace includes {
namespace {

namespace fs = std::filesystem;

// The arrows: a room and the rooms whose headers it may include. Rooms further down the list know nothing of those above.
const std::map<std::string, std::set<std::string>>& arrows() {
  static const std::set<std::string> below_model = {"config", "device", "kernels", "base"};
  static const auto with = [](std::set<std::string> rooms, const std::set<std::string>& more) {
    rooms.insert(more.begin(), more.end());
    return rooms;
  };
  static const std::set<std::string> below_exec = with({"model", "optim", "store", "comm"}, below_model);
  static const std::map<std::string, std::set<std::string>> table = {
      {"tools", with({"exec", "plan", "io", "data", "report"}, below_exec)},
      {"exec", with({"plan", "io", "data"}, below_exec)},
      {"report", with({"plan"}, below_exec)},
      {"io", below_exec},
      {"data", below_exec},
      {"plan", {"config", "base"}},  // and the shape of a model: see kShapeHeaders
      {"optim", with({"model", "store"}, below_model)},
      {"store", with({"model"}, below_model)},
      {"comm", below_model},
      {"model", below_model},
      {"device", {"config", "kernels", "base"}},
      {"config", {"base"}},
      {"kernels", {"base"}},
      {"base", {}},
  };
  return table;
}

// A model as data: all that planning may know of it.
const std::set<std::string> kShapeHeaders = {"include/spipe/model/shape.h", "include/spipe/model/architecture.h"};
// The shape itself must stay plannable without a device: base and config only.
const std::set<std::string> kShapeMayUse = {"base", "config", "model"};

const std::regex kInclude(R"(^\s*#\s*include\s*([<"])([^>"]+)[>"])");
const std::regex kCudaHeader(
    R"((cuda|cublas|cudnn|curand|cusparse|cusolver|nvrtc|nvml|nvtx|nccl|cub/|thrust/|cooperative_groups|mma\.h).*)");

struct Include {
  int line = 0;
  bool angle = false;
  std::string text;
};

struct SourceFile {
  std::vector<Include> includes;
  std::vector<std::string> own;  // the tree's files among them
};

Counts counts;

// "include/spipe/plan/plan.h" -> "plan", "src/plan/x.cpp" -> "plan", "kernels/cpu/y.h" -> "kernels".
std::string room_of(const std::string& path) {
  std::vector<std::string> parts;
  for (const fs::path& part : fs::path(path)) parts.push_back(part.string());
  if (parts.size() >= 3 && parts[0] == "src") return parts[1];
  if (parts.size() >= 4 && parts[0] == "include") return parts[2];
  return parts[0];
}

bool may_use_cuda(const std::string& path) {
  for (const char* folder : {"src/device/cuda/", "include/spipe/device/cuda/", "kernels/cuda/"}) {
    if (path.starts_with(folder)) return true;
  }
  return path.starts_with("src/comm/") && path.find("nccl") != std::string::npos;
}

bool is_source(const fs::path& path) {
  static const std::set<std::string> extensions = {".h", ".hpp", ".cpp", ".cu", ".cuh", ".in"};
  return extensions.contains(path.extension().string()) && path.filename() != "CMakeLists.txt";
}

std::map<std::string, SourceFile> read_tree(const fs::path& root) {
  std::map<std::string, SourceFile> files;
  for (const char* folder : {"src", "include", "kernels", "tools"}) {
    if (!fs::exists(root / folder)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
      if (!entry.is_regular_file() || !is_source(entry.path())) continue;
      SourceFile& file = files[entry.path().lexically_relative(root).generic_string()];
      std::ifstream stream(entry.path());
      int number = 0;
      for (std::string line; std::getline(stream, line);) {
        ++number;
        std::smatch match;
        if (std::regex_search(line, match, kInclude)) file.includes.push_back({number, match[1] == "<", match[2]});
      }
    }
  }
  return files;
}

// The tree's file that an include names: beside the includer, below include/, or below the root; "" when there is none.
std::string resolve(const std::map<std::string, SourceFile>& files, const std::string& includer, const Include& include) {
  std::vector<fs::path> candidates = {fs::path("include") / include.text, fs::path(include.text)};
  if (!include.angle) candidates.insert(candidates.begin(), fs::path(includer).parent_path() / include.text);
  for (const fs::path& candidate : candidates) {
    const std::string path = candidate.lexically_normal().generic_string();
    if (files.contains(path)) return path;
  }
  return "";
}

// Why `from` must not include `to`, or "".
std::string forbidden(const std::string& from, const std::string& to) {
  const std::string source = room_of(from);
  const std::string target = room_of(to);
  if (kShapeHeaders.contains(from) && !kShapeMayUse.contains(target)) return "the shape of a model must not include " + target;
  if (source == target) {
    if (kShapeHeaders.contains(from) && !kShapeHeaders.contains(to)) return "the shape of a model must not include its layers";
    return "";
  }
  const auto found = arrows().find(source);
  if (found == arrows().end()) return "room " + source + " is not in the table of arrows";
  if (to.starts_with("src/")) return source + " must not include a private header of " + target;
  if (source == "plan" && kShapeHeaders.contains(to)) return "";
  return found->second.contains(target) ? "" : source + " must not include " + target;
}

void find_circles(const std::map<std::string, SourceFile>& files, std::vector<std::string>& problems) {
  std::map<std::string, int> state;  // 1: on the path, 2: done
  std::vector<std::string> path;
  const auto visit = [&](const auto& self, const std::string& name) -> void {
    state[name] = 1;
    path.push_back(name);
    for (const std::string& next : files.at(name).own) {
      if (state[next] == 1) {
        std::string circle = next;
        for (auto at = std::ranges::find(path, next) + 1; at != path.end(); ++at) circle += " -> " + *at;
        problems.push_back("circle of includes: " + circle + " -> " + next);
      } else if (state[next] == 0) {
        self(self, next);
      }
    }
    path.pop_back();
    state[name] = 2;
  };
  for (const auto& [name, file] : files) {
    if (state[name] == 0) visit(visit, name);
  }
}

}  // namespace

std::vector<std::string> check_tree(const fs::path& root) {
  std::map<std::string, SourceFile> files = read_tree(root);
  counts = {.files = static_cast<int>(files.size()), .own_includes = 0};
  std::vector<std::string> problems;
  for (auto& [name, file] : files) {
    for (const Include& include : file.includes) {
      const std::string place = name + ":" + std::to_string(include.line) + ": ";
      const std::string target = resolve(files, name, include);
      if (target.empty()) {
        if (!include.angle || include.text.starts_with("spipe/")) problems.push_back(place + "no such file: " + include.text);
        if (std::regex_match(include.text, kCudaHeader) && !may_use_cuda(name)) {
          problems.push_back(place + "a CUDA header outside device/cuda, kernels/cuda and comm's NCCL file: " + include.text);
        }
        continue;
      }
      ++counts.own_includes;
      file.own.push_back(target);
      const std::string why = forbidden(name, target);
      if (!why.empty()) problems.push_back(place + why + " (" + include.text + ")");
    }
  }
  find_circles(files, problems);
  return problems;
}

Counts last_counts() { return counts; }

}  // namespace includes
