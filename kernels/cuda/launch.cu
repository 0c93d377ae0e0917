// The backend's making, and what a launch says when it fails.
#include <string>

#include "kernels/cuda/cuda_ops.cuh"
#include "kernels/cuda/device.cuh"

namespace spipe::cuda {

void check_launch(cudaError_t error) {
  SPIPE_CHECK(error == cudaSuccess, std::string("CUDA kernel: ") + cudaGetErrorString(error));
}

}  // namespace spipe::cuda

namespace spipe {

std::unique_ptr<Ops> make_cuda_ops(void* scratch, CudaAttention attention) {
  int device = 0, major = 0;
  cuda::check_launch(cudaGetDevice(&device));
  cuda::check_launch(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return std::make_unique<cuda::CudaOps>(static_cast<float*>(scratch), major >= 8 && attention == CudaAttention::kBest);
}

int cuda_device_count() {
  int count = 0;  // left alone when there is no driver
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

}  // namespace spipe
