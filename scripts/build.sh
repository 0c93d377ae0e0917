#!/usr/bin/env bash
# Configures and builds build/release on all cores; arguments are targets (default: everything).
set -euo pipefail
cd "$(dirname "$0")/.."

launcher=()
if command -v ccache >/dev/null; then
  launcher=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
fi
cmake --preset release "${launcher[@]}"
targets=()
if [ "$#" -gt 0 ]; then
  targets=(--target "$@")
fi
cmake --build build/release --parallel "$(nproc)" "${targets[@]}"
