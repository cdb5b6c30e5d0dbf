// Names for NVIDIA's profilers. NVTX is header-only: the first call looks for a profiler, and
// without one every later call is a test of a null pointer.
#pragma once

#include <cuda_runtime_api.h>

#include "core/trace_range.h"

namespace llmserve::cuda {

const RangeSink& nvtx_sink();
void name_stream(cudaStream_t stream, const char* name);

}  // namespace llmserve::cuda
