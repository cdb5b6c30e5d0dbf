#include "kernels/cuda/named_stream.h"

#include <nvtx3/nvToolsExtCudaRt.h>

#include "kernels/cuda/cuda_check.h"

namespace llmserve::cuda {

cudaStream_t make_stream(const char* name, StreamPriority priority) {
  int last = 0;
  int first = 0;
  check("cudaDeviceGetStreamPriorityRange", cudaDeviceGetStreamPriorityRange(&last, &first));
  cudaStream_t stream = nullptr;
  check("cudaStreamCreateWithPriority",
        cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                     priority == StreamPriority::kFirst ? first : last));
  nvtxNameCudaStreamA(stream, name);
  return stream;
}

}  // namespace llmserve::cuda
