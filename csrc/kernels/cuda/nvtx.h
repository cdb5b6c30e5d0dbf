// Ranges for NVIDIA's profilers. NVTX is header-only: the first call looks for a profiler, and
// without one every later call is a test of a null pointer.
#pragma once

#include "core/trace_range.h"

namespace llmserve::cuda {

const RangeSink& nvtx_sink();

}  // namespace llmserve::cuda
