// See include/emulated_host_api.h.
#include <cuda_runtime.h>

namespace {
thread_local std::string last_fault;
}

const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorLaunchFailure) return last_fault.c_str();
  return error == cudaSuccess ? "no error" : "invalid argument";
}

cudaError_t cudaMemsetAsync(void* device, int value, std::size_t bytes, cudaStream_t) {
  spipe::emulator::Machine::instance().heap().fill(device, value, bytes);
  return cudaSuccess;
}

namespace spipe::emulator {

cudaError_t launch(const LaunchShape& shape) {
  Machine& machine = Machine::instance();
  last_fault = machine.take_host_fault();
  if (last_fault.empty()) last_fault = machine.run(shape);
  return last_fault.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

}  // namespace spipe::emulator
