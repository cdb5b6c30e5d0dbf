// Calls of the CUDA runtime, checked.
#pragma once

#include <cuda_runtime_api.h>

namespace llmserve::cuda {

// Throws DeviceError with the call, the code, its name and its meaning.
[[noreturn]] void throw_device_error(const char* call, cudaError_t code);

inline void check(const char* call, cudaError_t code) {
  if (code != cudaSuccess) throw_device_error(call, code);
}

}  // namespace llmserve::cuda
