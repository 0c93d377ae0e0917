// What a launch says when it fails.
#include <string>

#include "kernels/cuda/device.cuh"

namespace spipe::cuda {

void check_launch(cudaError_t error) {
  SPIPE_CHECK(error == cudaSuccess, std::string("CUDA kernel: ") + cudaGetErrorString(error));
}

}  // namespace spipe::cuda
