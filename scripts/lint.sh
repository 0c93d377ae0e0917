#!/usr/bin/env bash
# Checks formatting (clang-format) and runs clang-tidy on the given .cpp files, or on all; needs build/release configured.
set -euo pipefail
cd "$(dirname "$0")/.."

mapfile -t all < <(git ls-files 'src/*' 'include/*' 'kernels/*' 'tools/*' 'tests/*' 'bench/*' | grep -E '\.(cpp|h|cu|cuh)$')
clang-format --dry-run -Werror "${all[@]}"

files=("$@")
if [ "${#files[@]}" -eq 0 ]; then
  mapfile -t files < <(git ls-files 'src/*.cpp' 'kernels/*.cpp' 'tools/*.cpp')
fi
# The compile commands are GCC's; clang does not know all of its warning options.
printf '%s\n' "${files[@]}" |
  xargs -P "$(nproc)" -n 1 clang-tidy -p build/release --quiet --extra-arg=-Wno-unknown-warning-option
