#include "kernels/cuda/sampling/count_updates.h"

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launch_math.h"

namespace llmserve::cuda {
namespace {

constexpr int kThreads = 256;

// Update i of [0, n) in steps of the grid.
__global__ void update_counts_kernel(const CountUpdate* updates, int64_t n) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride)
    *updates[i].at = updates[i].count;
}

}  // namespace

void update_counts(const CountUpdate* updates, int64_t num_updates, cudaStream_t stream) {
  if (num_updates == 0) return;
  launch("update_counts", update_counts_kernel, blocks(elementwise_blocks(num_updates, kThreads)),
         kThreads, 0, stream, updates, num_updates);
}

}  // namespace llmserve::cuda
