#include "kernels/cuda/nvtx.h"

#include <nvtx3/nvToolsExt.h>

namespace llmserve::cuda {

const RangeSink& nvtx_sink() {
  static constexpr RangeSink kSink{
      .push = [](const char* name) { nvtxRangePushA(name); },
      .pop = [] { nvtxRangePop(); },
  };
  return kSink;
}

}  // namespace llmserve::cuda
