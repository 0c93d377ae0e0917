#!/usr/bin/env bash
# On a machine with a GPU: builds the CUDA kernels for it and nothing else, runs the conformance suite on it, then the kernels'
# benchmark, and writes its figures to build/gpu/bench.json. Needs CUDA 12 or newer, CMake 3.25 and g++; the libraries of
# scripts/gpu-bundle.sh from the system or from build/gpu-bundle. No network.
set -euo pipefail
cd "$(dirname "$0")/.."

prefix=()
if [ -d build/gpu-bundle/usr ]; then
  prefix=(-DCMAKE_PREFIX_PATH="$PWD/build/gpu-bundle/usr")
  libraries=$(dirname "$(find "$PWD/build/gpu-bundle/usr/lib" -name 'libxxhash.so*' | head -n 1)")
  export LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi
cmake -S . -B build/gpu -DCMAKE_BUILD_TYPE=Release -DSPIPE_CUDA=ON -DSPIPE_KERNELS_ONLY=ON \
  -DCMAKE_CUDA_ARCHITECTURES="${SPIPE_CUDA_ARCHITECTURES:-native}" "${prefix[@]}"
cmake --build build/gpu --parallel "$(nproc)" --target test_conformance_cuda bench_cuda

if ! build/gpu/bench/cuda/bench_cuda --probe; then
  echo "gpu-check: built, but there is no CUDA device here: nothing ran" >&2
  exit 2
fi
build/gpu/tests/kernels/test_conformance_cuda --durations yes
if command -v compute-sanitizer >/dev/null; then
  compute-sanitizer --error-exitcode 1 build/gpu/tests/kernels/test_conformance_cuda "cuda: rope" "cuda: column sum" >/dev/null
  echo "gpu-check: compute-sanitizer found nothing"
else
  echo "SKIPPED: compute-sanitizer is not installed"
fi
build/gpu/bench/cuda/bench_cuda | tee build/gpu/bench.txt
tail -n 1 build/gpu/bench.txt >build/gpu/bench.json
