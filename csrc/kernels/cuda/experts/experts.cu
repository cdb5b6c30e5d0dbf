// Routers by a warp a token, and sums of experts' outputs by a thread an element. The arithmetic is
// that of router.inc: functions are of single numbers, which lanes share, and sums are one lane's.
#include "kernels/cuda/experts/experts.h"

#include "kernels/cuda/device_math.cuh"

namespace llmserve::cuda {
namespace {

// The shim of one lane, as far as rows go.
constexpr int64_t kLanes = 1;
__device__ __forceinline__ Vec v_load_n(const float* from, int64_t) { return *from; }
__device__ __forceinline__ void v_store_n(float* to, Vec x, int64_t) { *to = x; }
#define inline __device__ __forceinline__
#include "kernels/router.inc"
#undef inline

constexpr int kThreads = 256;

// index_of_largest() of router.inc, for all lanes.
__device__ __forceinline__ int64_t warp_index_of_largest(const float* x, int64_t n) {
  const int64_t lane = threadIdx.x % 32;
  const auto is_better = [&](int64_t a, int64_t b) {  // than b, both below n
    if (x[a] > x[b] || (x[b] != x[b] && x[a] == x[a])) return true;
    if (x[b] > x[a] || (x[a] != x[a] && x[b] == x[b])) return false;
    return a < b;
  };
  int64_t best = lane < n ? lane : 0;
  for (int64_t i = best + 32; i < n; i += 32)
    if (is_better(i, best)) best = i;
  for (int offset = 16; offset > 0; offset /= 2) {
    const int64_t other = __shfl_xor_sync(kAllLanes, best, offset);
    if (is_better(other, best)) best = other;
  }
  return best;
}

// The scores of a token's experts, by all lanes; ends with them seen by all.
__device__ __forceinline__ void warp_scores(const float* logits, int64_t n, RouterScore score,
                                            float* scores) {
  const int64_t lane = threadIdx.x % 32;
  for (int64_t i = lane; i < n; i += 32) scores[i] = logits[i];
  __syncwarp();
  if (score == RouterScore::kSigmoid) {
    for (int64_t i = lane; i < n; i += 32) sigmoid_of(scores + i, 1, scores + i);
    __syncwarp();
  }
  if (score != RouterScore::kSoftmax) return;
  const float max = scores[warp_index_of_largest(scores, n)];
  __syncwarp();  // the largest has been read
  for (int64_t i = lane; i < n; i += 32) exp_and_sum(scores + i, 1, max, scores + i);
  __syncwarp();
  float sum = 0.0f;
  if (lane == 0)
    for (int64_t i = 0; i < n; ++i) sum += scores[i];
  sum = __shfl_sync(kAllLanes, sum, 0);
  for (int64_t i = lane; i < n; i += 32) scores[i] = scores[i] / sum;
  __syncwarp();
}

// Warp w of block b has token b * kRouterWarps + w.
__global__ void __launch_bounds__(32 * kRouterWarps) route_kernel(RouteParams p) {
  LLMSERVE_DYNAMIC_SHARED(float, shared);
  wait_for_previous();
  const int lane = threadIdx.x % 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kRouterWarps + threadIdx.x / 32;
  if (token >= p.num_tokens) return;
  const int64_t n = p.num_experts;
  float* scores = shared + threadIdx.x / 32 * 3 * n;
  float* choice = scores + n;
  const float* logits = p.logits.data + token * p.logits.stride;
  int32_t* ids = p.ids + token * p.top_k;
  float* weights = p.weights + token * p.top_k;
  if (p.numbers.score == RouterScore::kSparsemixer) {
    if (lane == 0)
      route_row(logits, n, p.choice_bias, p.expert_scales, &p.numbers, p.top_k, ids, weights,
                scores);
    return;
  }
  warp_scores(logits, n, p.numbers.score, scores);
  for (int64_t i = lane; i < n; i += 32)
    choice[i] = p.choice_bias ? scores[i] + p.choice_bias[i] : scores[i];
  __syncwarp();
  if (p.numbers.top_groups < p.numbers.num_groups) {
    if (lane == 0) keep_best_groups(choice, n, p.numbers, scores + 2 * n);
    __syncwarp();
  }
  for (int64_t slot = 0; slot < p.top_k; ++slot) {
    const int64_t best = warp_index_of_largest(choice, n);
    __syncwarp();  // all have read it
    if (lane == 0) {
      choice[best] = least();
      ids[slot] = static_cast<int32_t>(best);
      weights[slot] = scores[best];
    }
    __syncwarp();
  }
  if (lane == 0) weigh_chosen(p.numbers, p.top_k, ids, p.expert_scales, weights);
}

// blockIdx.x: token. blockIdx.y: part of a row.
__global__ void __launch_bounds__(kThreads) combine_kernel(CombineParams p) {
  wait_for_previous();
  const int64_t token = blockIdx.x;
  const int64_t i = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (i >= p.width) return;
  float* out = p.out.data + token * p.out.stride + i;
  combine_row(p.x.data + token * p.top_k * p.x.stride + i, p.x.stride, nullptr,
              p.weights + token * p.top_k, p.top_k, 1, p.accumulate ? out : nullptr, out);
}

// blockIdx.x: row.
__global__ void __launch_bounds__(kThreads) own_kernel(OwnParams p) {
  wait_for_previous();
  const int64_t row = blockIdx.x;
  int32_t expert = p.ids[row] - p.begin;
  bool is_own = expert >= 0 && expert < p.count;
  if (p.homes != nullptr) {
    const int32_t* home = p.homes + 3 * static_cast<int64_t>(p.ids[row]);
    is_own = row / p.rows_per_token % home[0] == home[1];
    expert = home[2];
  }
  if (threadIdx.x == 0) {
    p.local[row] = is_own ? expert : -1;
    if (!is_own && p.weights != nullptr) p.weights[row] = 0;
  }
  if (is_own || p.rows.data == nullptr) return;
  float* out = p.rows.data + row * p.rows.stride;
  for (int64_t i = threadIdx.x; i < p.width; i += kThreads) out[i] = 0;
}

// One block: the ids of a layer are a few thousand at most, and no other block adds to its totals.
__global__ void __launch_bounds__(kThreads) count_kernel(CountParams p) {
  LLMSERVE_DYNAMIC_SHARED(int32_t, counts);  // [num_ids]
  for (int64_t i = threadIdx.x; i < p.num_ids; i += kThreads) counts[i] = 0;
  wait_for_previous();
  __syncthreads();
  int64_t num_tokens = p.num_tokens;
  if (p.header != nullptr && p.header->num_rows < num_tokens) num_tokens = p.header->num_rows;
  for (int64_t i = threadIdx.x; i < num_tokens * p.top_k; i += kThreads)
    atomicAdd(counts + p.ids[i], 1);
  __syncthreads();
  for (int64_t i = threadIdx.x; i < p.num_ids; i += kThreads) {
    if (counts[i] == 0) continue;
    p.totals[i] += counts[i];
    p.seen[i] = p.totals[i];
  }
}

}  // namespace

void route_experts(const RouteParams& params, cudaStream_t stream) {
  if (params.num_tokens == 0) return;
  launch_early("route_experts", route_kernel, blocks(ceil_div(params.num_tokens, kRouterWarps)),
               32 * kRouterWarps, static_cast<size_t>(router_shared_bytes(params.num_experts)),
               stream, params);
}

void combine_experts(const CombineParams& params, cudaStream_t stream) {
  if (params.num_tokens == 0 || params.width == 0) return;
  const dim3 grid(static_cast<unsigned>(params.num_tokens),
                  static_cast<unsigned>(ceil_div(params.width, kThreads)));
  launch_early("combine_experts", combine_kernel, grid, kThreads, 0, stream, params);
}

void own_experts(const OwnParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return;
  launch_early("own_experts", own_kernel, blocks(params.num_rows), kThreads, 0, stream, params);
}

void count_ids(const CountParams& params, cudaStream_t stream) {
  if (params.num_tokens == 0) return;
  launch_early("count_ids", count_kernel, dim3(1), kThreads,
               static_cast<size_t>(params.num_ids) * sizeof(int32_t), stream, params);
}

}  // namespace llmserve::cuda
