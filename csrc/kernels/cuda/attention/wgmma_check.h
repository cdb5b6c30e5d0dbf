// Whether a GPU's wgmma attention can be believed: wgmma_attention.cu beside tiled_attention.cuh.
#pragma once

#include <cstdint>

#include "kernels/cuda/cuda_memory.h"

namespace llmserve::cuda {

// The largest difference of the outputs of a small prompt with a prefix, as a share of the largest
// output: some 2^-8 where all is well, since both round weights to bf16; infinite where one is not
// finite. Takes and gives back less than 1 MB, and waits for it. Throws DeviceError.
float wgmma_difference(int64_t width, int64_t shared_bytes, DeviceMemory& memory);

// What is taken for the same.
inline constexpr float kWgmmaTolerance = 0x1p-6f;

}  // namespace llmserve::cuda
