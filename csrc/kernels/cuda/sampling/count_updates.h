// Entries of the lists of counts that stay on the device (device_counts.h), as they are brought up.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/kernels.h"

namespace llmserve::cuda {

struct CountUpdate {
  DrawCount* at;
  DrawCount count;
};

// Those of one entry are equal.
void update_counts(const CountUpdate* updates, int64_t num_updates, cudaStream_t stream);

}  // namespace llmserve::cuda
