#include "kernels/cuda/nvtx.h"

#include <nvtx3/nvToolsExt.h>
#include <nvtx3/nvToolsExtCudaRt.h>

namespace llmserve::cuda {

const RangeSink& nvtx_sink() {
  static constexpr RangeSink kSink{
      .push = [](const char* name) { nvtxRangePushA(name); },
      .pop = [] { nvtxRangePop(); },
  };
  return kSink;
}

void name_stream(cudaStream_t stream, const char* name) { nvtxNameCudaStreamA(stream, name); }

}  // namespace llmserve::cuda
