// Routers of mixtures of experts, and the sums of what experts give: the kernels' launch functions,
// as in kernels.h.
#pragma once

#include "kernels/cuda/kernels.h"

namespace llmserve::cuda {

// As in RouteExpertsArgs.
struct RouteParams {
  ConstRows logits;  // [T, X]
  const float* choice_bias;
  const float* expert_scales;
  RouterNumbers numbers;
  int64_t num_tokens;
  int64_t num_experts;
  int64_t top_k;
  int32_t* ids;    // [T, k]
  float* weights;  // [T, k]
};
void route_experts(const RouteParams& params, cudaStream_t stream);

// Tokens of a block, a warp each: the working memory of three numbers an expert is shared.
inline constexpr int kRouterWarps = 4;
constexpr int64_t router_shared_bytes(int64_t experts) {
  return kRouterWarps * 3 * experts * static_cast<int64_t>(sizeof(float));
}
constexpr bool router_fits(int64_t experts) {
  return router_shared_bytes(experts) <= kMaxSharedBytes;
}

// As in CombineExpertsArgs.
struct CombineParams {
  ConstRows x;           // [T * k, E]
  const float* weights;  // [T, k]
  Rows out;              // [T, E]
  int64_t num_tokens;
  int64_t top_k;
  int64_t width;
  bool accumulate;
};
void combine_experts(const CombineParams& params, cudaStream_t stream);

// As in OwnExperts.
struct OwnParams {
  const int32_t* ids;  // [R]
  int64_t num_rows;
  int32_t begin;
  int32_t count;
  const int32_t* homes;  // [X, 3] or null
  int64_t rows_per_token;
  int32_t* local;  // [R]
  Rows rows;       // [R, E], or without data
  int64_t width;
  float* weights;  // [R] or null
};
void own_experts(const OwnParams& params, cudaStream_t stream);

// As in IdCounts::add. header: of a recorded step, or null. totals and seen [num_ids]: the counts,
// and what of them the host reads, in mapped memory.
struct CountParams {
  const int32_t* ids;  // [T, k]
  int64_t num_tokens;
  int64_t top_k;
  int64_t num_ids;
  const StepHeader* header;
  int64_t* totals;
  int64_t* seen;
};
void count_ids(const CountParams& params, cudaStream_t stream);

}  // namespace llmserve::cuda
