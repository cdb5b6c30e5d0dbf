#include "kernels/cuda/pinned_memory.h"

#include <cstring>

#include "core/error.h"
#include "core/human_bytes.h"
#include "kernels/cuda/cuda_check.h"

namespace llmserve::cuda {

std::byte* PinnedMemory::allocate(int64_t num_bytes) {
  if (num_bytes == 0) return nullptr;
  check("cudaSetDevice", cudaSetDevice(device_));
  void* data = nullptr;
  const cudaError_t code = num_bytes < 0
                               ? cudaErrorMemoryAllocation
                               : cudaHostAlloc(&data, static_cast<size_t>(num_bytes),
                                               cudaHostAllocMapped | cudaHostAllocPortable);
  if (code == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // it is told here; later calls need not hear of it
    throw ResourceExhausted(concat("the system does not pin ", human_bytes(num_bytes),
                                   " of host memory for the GPU; raise `ulimit -l`, or free "
                                   "memory"));
  }
  check("cudaHostAlloc", code);
  std::memset(data, 0, static_cast<size_t>(num_bytes));
  return static_cast<std::byte*>(data);
}

void PinnedMemory::release(std::byte* data, int64_t) noexcept {
  cudaSetDevice(device_);
  cudaDeviceSynchronize();
  cudaFreeHost(data);
}

void PinnedMemory::copy_from_host(void* to, const void* from, int64_t num_bytes) {
  std::memcpy(to, from, static_cast<size_t>(num_bytes));
}

void PinnedMemory::copy_to_host(void* to, const void* from, int64_t num_bytes) {
  std::memcpy(to, from, static_cast<size_t>(num_bytes));
}

}  // namespace llmserve::cuda
