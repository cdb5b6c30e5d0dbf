// The norm of rows, which linear layers run, too, and how rows are dealt to threads.
#pragma once

#include "kernels/cpu/cpu_workers.h"

namespace llmserve {

// Less work than this many elements is not worth a thread: waking one and waiting for it costs a
// microsecond or two.
inline int64_t row_grain(int64_t width) {
  constexpr int64_t kMinElementsPerThread = 4096;
  return std::max<int64_t>(1, kMinElementsPerThread / std::max<int64_t>(1, width));
}

// The rms_norm op.
void norm_rows(CpuWorkers& workers, const RmsNormArgs& args);

}  // namespace llmserve
