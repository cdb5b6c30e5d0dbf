// Attention of prompts by wgmma (wgmma_attention.cu): caches in bf16 whose D = Dv is 64 or 128, on
// sm_90 alone, where the build has it.
#pragma once

#include "kernels/cuda/kernels.h"

namespace llmserve::cuda {

struct WgmmaKernels {
  // Once before the first run(), on the device.
  void (*prepare)() = nullptr;
  // Sequences of params.wgmma_rows rows and more, of up to row_tiles times kWgmmaRows. Queries and
  // outputs begin at multiples of 16 bytes.
  void (*run)(const AttentionParams& params, int64_t row_tiles, cudaStream_t stream) = nullptr;
};
// Nulls of a width that has none, and in a build that has none for sm_90.
#ifdef LLMSERVE_WGMMA
WgmmaKernels wgmma_kernels(int64_t width);
#else
inline WgmmaKernels wgmma_kernels(int64_t) { return {}; }
#endif

}  // namespace llmserve::cuda
