// Reads the #include lines of the tree and checks them against the arrows between rooms.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace includes {

// What is wrong in the tree below `root` (folders src, include, kernels, tools): one line each,
// "src/plan/x.cpp:3: plan must not include io (spipe/io/y.h)". Empty when all is well.
[[nodiscard]] std::vector<std::string> check_tree(const std::filesystem::path& root);

// How many files and include lines of our own the last check_tree looked at.
struct Counts {
  int files = 0, own_includes = 0;
};
[[nodiscard]] Counts last_counts();

}  // namespace includes
