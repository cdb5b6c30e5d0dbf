// The kernels of the product by wgmma (wgmma_product.cu), on sm_90 alone, where the build has them.
#pragma once

#include <cuda.h>

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/linear/wgmma_shapes.h"

namespace llmserve::cuda {

// Of x [M, K] and a weight [N, K], both bf16, which are told by maps.
struct WgmmaProduct {
  CUtensorMap weight;  // boxes of form.groups * 64 rows; gated, of either half by turns
  CUtensorMap x;       // boxes of form.columns rows
  WgmmaForm form;
  const float* bias;     // [N] or null
  Rows out;              // [M, N]; gated [M, N / 2]
  uint16_t* rounded;     // the same as bf16, contiguous, in place of out; or null
  float* partials;       // kWgmmaPartialBytes of working memory
  int32_t* arrivals;     // [kWgmmaArrivals], zero before and after
  int64_t num_rows;      // M
  int64_t out_features;  // N
  int64_t in_features;   // K, a multiple of 8
  bool accumulate;       // not gated
  bool is_gated;         // the first half of N makes the gate; each half is a multiple of 8
  Activation activation;
};

#ifdef LLMSERVE_WGMMA
inline constexpr bool kHasWgmmaProduct = true;
// Once before the first run, on the device, and not within a capture.
void prepare_wgmma_product();
// On so many SMs.
void run_wgmma_product(const WgmmaProduct& product, int num_sms, cudaStream_t stream);
#else
inline constexpr bool kHasWgmmaProduct = false;
inline void prepare_wgmma_product() {}
inline void run_wgmma_product(const WgmmaProduct&, int, cudaStream_t) {}
#endif

}  // namespace llmserve::cuda
