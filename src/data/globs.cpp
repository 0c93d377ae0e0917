#include <glob.h>

#include <algorithm>

#include "spipe/base/error.h"
#include "spipe/data/data.h"

namespace spipe::data {

std::vector<Path> expand_globs(const std::vector<std::string>& patterns, const std::string& where) {
  std::vector<Path> files;
  for (const std::string& pattern : patterns) {
    glob_t found{};
    // Sorted below: glob's own order depends on the locale.
    const int result = glob(pattern.c_str(), GLOB_NOSORT | GLOB_ERR, nullptr, &found);
    const std::vector<Path> matches(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    globfree(&found);
    if (result != 0 && result != GLOB_NOMATCH) throw Error("cannot search for '" + pattern + "'", where);
    if (matches.empty()) throw Error("no file matches '" + pattern + "'", where, "paths are relative to the working folder");
    for (const Path& match : matches) {
      if (std::filesystem::is_directory(match)) {
        throw Error("'" + match.string() + "' is a folder", where, "write '" + (match / "*.bin").string() + "' for its files");
      }
    }
    files.insert(files.end(), matches.begin(), matches.end());
  }
  std::sort(files.begin(), files.end());
  files.erase(std::unique(files.begin(), files.end()), files.end());
  return files;
}

}  // namespace spipe::data
