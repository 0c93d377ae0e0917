// The part of the CUDA runtime that host code uses. Everything runs to its end when it is enqueued. A fault of a kernel is
// returned as cudaErrorLaunchFailure, and cudaGetErrorString then tells what was found.
#pragma once

#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

#include "emulated_language.h"
#include "tests/emulator/machine.h"

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };
struct CUstream_st;
using cudaStream_t = CUstream_st*;

[[nodiscard]] const char* cudaGetErrorString(cudaError_t error);
[[nodiscard]] inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor = 75 };
[[nodiscard]] inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
[[nodiscard]] inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 9;
  return cudaSuccess;
}
[[nodiscard]] cudaError_t cudaMemsetAsync(void* device, int value, std::size_t bytes, cudaStream_t stream);

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
template <typename K>
[[nodiscard]] cudaError_t cudaFuncSetAttribute(K* kernel, cudaFuncAttribute, int bytes) {
  return kernel != nullptr && bytes >= 0 && static_cast<std::size_t>(bytes) <= ::spipe::emulator::kMaxDynamicShared
             ? cudaSuccess
             : cudaErrorInvalidValue;
}

struct cudaLaunchAttribute;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

namespace spipe::emulator {

// Runs the launch and keeps the fault for cudaGetErrorString.
[[nodiscard]] cudaError_t launch(const LaunchShape& shape);

template <typename... P>
struct KernelCall {
  void (*kernel)(P...);
  std::tuple<std::remove_cv_t<P>...> values;
  static void run(const void* call) {  // once for every thread: each gets copies of its own
    const auto* self = static_cast<const KernelCall*>(call);
    std::apply(self->kernel, self->values);
  }
};

}  // namespace spipe::emulator

template <typename... P, typename... A>
[[nodiscard]] cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), A&&... values) {
  using Call = ::spipe::emulator::KernelCall<P...>;
  const Call call{kernel, {std::forward<A>(values)...}};
  return ::spipe::emulator::launch({.grid = {config->gridDim.x, config->gridDim.y, config->gridDim.z},
                                    .block = {config->blockDim.x, config->blockDim.y, config->blockDim.z},
                                    .dynamic_shared_bytes = config->dynamicSmemBytes,
                                    .entry = Call::run,
                                    .arguments = &call,
                                    .arguments_bytes = sizeof(call)});
}
