// The CUDA backend's only exported symbol.
#include "kernels/cuda/cuda_plugin.h"

#include <cuda_runtime_api.h>

#include "core/error.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/nvtx.h"

namespace llmserve {
namespace {

// The kernels' oldest target.
constexpr int kMinMajor = 8;

std::string unavailable_reason() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code == cudaErrorInsufficientDriver) {
    return "there is no NVIDIA driver, or it is older than CUDA 13 needs (580); install a newer "
           "one, or use device='cpu'";
  }
  if (code == cudaErrorNoDevice || (code == cudaSuccess && count == 0)) {
    return "no NVIDIA GPU is visible (CUDA_VISIBLE_DEVICES may hide it); use device='cpu'";
  }
  if (code != cudaSuccess) {
    return concat("cudaGetDeviceCount failed with ", cudaGetErrorName(code), ": ",
                  cudaGetErrorString(code));
  }
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess)
    return "the GPU does not say what it is";
  if (properties.major < kMinMajor) {
    return concat(properties.name, " has compute capability ", properties.major, ".",
                  properties.minor, " and ", kMinMajor, ".0 is needed; use device='cpu'");
  }
  return {};
}

int num_devices() {
  int count = 0;
  cuda::check("cudaGetDeviceCount", cudaGetDeviceCount(&count));
  return count;
}

int64_t free_bytes(int device) {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  int before = 0;
  cuda::check("cudaGetDevice", cudaGetDevice(&before));
  cuda::check("cudaSetDevice", cudaSetDevice(device));
  const cudaError_t code = cudaMemGetInfo(&free_bytes, &total_bytes);
  cudaSetDevice(before);
  cuda::check("cudaMemGetInfo", code);
  return static_cast<int64_t>(free_bytes);
}

std::unique_ptr<Backend> make(const BackendOptions& options, int device) {
  return std::make_unique<cuda::CudaBackend>(options, device);
}

DeviceQueue queue(Backend& backend) { return static_cast<cuda::CudaBackend&>(backend).queue(); }

std::unique_ptr<DeviceCopies> make_copies(Backend& backend, int64_t max_bytes) {
  return static_cast<cuda::CudaBackend&>(backend).make_copies(max_bytes);
}

constexpr CudaPlugin kPlugin{kCudaPluginAbi, LLMSERVE_BUILD_ID, &unavailable_reason,
                             &num_devices,   &free_bytes,       &make,
                             &queue,         &make_copies,      &cuda::nvtx_sink};

}  // namespace
}  // namespace llmserve

extern "C" __attribute__((visibility("default"))) const llmserve::CudaPlugin*
llmserve_cuda_plugin() {
  return &llmserve::kPlugin;
}
