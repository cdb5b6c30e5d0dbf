// Count, prefix sum and stable scatter of rows by their weights: a warp for each weight, which
// looks at all ids.
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/linear/grouped.h"

namespace llmserve::cuda {
namespace {

constexpr int kWarps = 8;

__device__ __forceinline__ int32_t warp_total(int32_t value) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// Warp w of block b has weight b * kWarps + w.
__global__ void __launch_bounds__(32 * kWarps)
    count_rows_kernel(const int32_t* weight_ids, int64_t num_rows, int64_t num_weights,
                      int32_t* counts) {
  wait_for_previous();
  const int64_t weight = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (weight >= num_weights) return;
  int32_t count = 0;
  for (int64_t r = lane; r < num_rows; r += 32) count += weight_ids[r] == weight ? 1 : 0;
  count = warp_total(count);
  if (lane == 0) counts[weight] = count;
}

__global__ void __launch_bounds__(32 * kWarps)
    place_rows_kernel(const int32_t* weight_ids, int64_t num_rows, int64_t num_weights,
                      int32_t rows_at_once, const int32_t* counts, RowGroups groups) {
  wait_for_previous();
  const int64_t weight = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (weight >= num_weights) return;
  const auto tasks_of = [&](int32_t count) { return (count + rows_at_once - 1) / rows_at_once; };
  int32_t begin = 0;
  int32_t first_task = 0;
  for (int64_t w = lane; w < weight; w += 32) {
    begin += counts[w];
    first_task += tasks_of(counts[w]);
  }
  begin = warp_total(begin);
  first_task = warp_total(first_task);
  const int32_t count = counts[weight];
  for (int32_t i = lane; i < tasks_of(count); i += 32) {
    const int32_t at = i * rows_at_once;
    groups.tasks[first_task + i] = {static_cast<int32_t>(weight), begin + at,
                                    count - at < rows_at_once ? count - at : rows_at_once};
  }
  if (weight == num_weights - 1 && lane == 0) *groups.num_tasks = first_task + tasks_of(count);
  int32_t to = begin;
  for (int64_t r0 = 0; r0 < num_rows && to < begin + count; r0 += 32) {
    const int64_t r = r0 + lane;
    const bool is_mine = r < num_rows && weight_ids[r] == weight;
    const uint32_t mine = __ballot_sync(kAllLanes, is_mine);
    if (is_mine) groups.order[to + __popc(mine & ((1u << lane) - 1))] = static_cast<int32_t>(r);
    to += __popc(mine);
  }
}

}  // namespace

void group_rows(const int32_t* weight_ids, int64_t num_rows, int64_t num_weights,
                int64_t rows_at_once, int32_t* counts, const RowGroups& groups,
                cudaStream_t stream) {
  const dim3 grid = blocks(ceil_div(num_weights, kWarps));
  launch_early("grouped_linear", count_rows_kernel, grid, 32 * kWarps, 0, stream, weight_ids,
               num_rows, num_weights, counts);
  launch_early("grouped_linear", place_rows_kernel, grid, 32 * kWarps, 0, stream, weight_ids,
               num_rows, num_weights, static_cast<int32_t>(rows_at_once), counts, groups);
}

}  // namespace llmserve::cuda
