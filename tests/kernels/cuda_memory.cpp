#include "tests/kernels/cuda_memory.h"

#include <cuda_runtime_api.h>

#include "spipe/base/error.h"

namespace spipe::test {
namespace {

void check_cuda(cudaError_t error) { SPIPE_CHECK(error == cudaSuccess, std::string("CUDA: ") + cudaGetErrorString(error)); }

class CudaMemory final : public Memory {
 public:
  void* allocate(std::size_t bytes) override {
    void* pointer = nullptr;
    check_cuda(cudaMalloc(&pointer, bytes > 0 ? bytes : 1));
    return pointer;
  }
  void release(void* pointer) override { check_cuda(cudaFree(pointer)); }
  void upload(void* device, const void* host, std::size_t bytes) override {
    check_cuda(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice));
  }
  void download(void* host, const void* device, std::size_t bytes) override {
    check_cuda(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost));
  }
};

}  // namespace

Memory& cuda_memory() {
  static CudaMemory memory;
  return memory;
}

}  // namespace spipe::test
