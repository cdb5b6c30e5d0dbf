// What becomes of a row's spans that several blocks have made: they are merged in position order,
// by the block that is done last, or by a kernel behind. Both take the same steps.
#pragma once

#include "kernels/cuda/attention/tiled_rows.cuh"

namespace llmserve::cuda {
namespace {

// Spans whose results are asked for before the first of them is merged: what is far away (L2, some
// 700 ns) is waited for once for so many. 48 registers hold them.
constexpr int kSpansAhead = 8;

// Four neighbouring elements of a row, which begin at `column`: its spans' merged, then ended. What
// other blocks of this kernel wrote is not read from the L1, whose lines may be older.
template <int kDim>
__device__ __forceinline__ void merge_four(const AttentionParams& p, const TiledPartials& partials,
                                           const RowTile& rows, int row, int column) {
  const int first_span = rows.first_seen / kTiledSpan;
  const int last_span = rows.last_seen / kTiledSpan;
  float m = -INFINITY;
  float sum = 0.0f;
  float value[4] = {};
  for (int begin = first_span; begin <= last_span; begin += kSpansAhead) {
    float maxima[kSpansAhead] = {};
    float sums[kSpansAhead] = {};
    float4 outputs[kSpansAhead] = {};
#pragma unroll
    for (int i = 0; i < kSpansAhead; ++i) {
      if (begin + i > last_span) continue;
      const int64_t at = partial_index(partials, rows.sequence, rows.kv_head, begin + i, row);
      maxima[i] = __ldcg(partials.maxima + at);
      sums[i] = __ldcg(partials.sums + at);
      outputs[i] = __ldcg(reinterpret_cast<const float4*>(partials.outputs + at * kDim + column));
    }
#pragma unroll
    for (int i = 0; i < kSpansAhead; ++i) {
      if (begin + i > last_span) continue;
      const Merge both = merge(m, maxima[i]);
      m = both.m;
      sum = merged(both, sum, sums[i]);
      value[0] = merged(both, value[0], outputs[i].x);
      value[1] = merged(both, value[1], outputs[i].y);
      value[2] = merged(both, value[2], outputs[i].z);
      value[3] = merged(both, value[3], outputs[i].w);
    }
  }
  const Ending ending = end_row(p, rows, row, m, sum);
  float* out = output_of(p, rows, row) + column;
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = value[i] * ending.kept / ending.divisor;
}

template <int kThreads>
__device__ __forceinline__ void sync_block() {
  if constexpr (kThreads == 32)
    __syncwarp();
  else
    __syncthreads();
}

// Whether this block is the last of those that make spans of the tile's rows, each of which calls
// this once it has written its own. For every thread. The count is zero again afterwards, for the
// next kernel.
template <int kThreads>
__device__ __forceinline__ bool is_last_to_arrive(const TiledPartials& partials,
                                                  const RowTile& rows, int walk) {
  sync_block<kThreads>();  // all of the block have written, and thread 0's fence is theirs, too
  int is_last = 0;
  if (threadIdx.x == 0) {
    const auto num_blocks =
        static_cast<uint32_t>(rows.last_seen / walk - rows.first_seen / walk + 1);
    uint32_t* arrived = partials.arrived + rows.sequence * partials.kv_heads + rows.kv_head;
    __threadfence();
    is_last = atomicAdd(arrived, 1u) + 1 == num_blocks ? 1 : 0;
    if (is_last != 0) *arrived = 0;
    __threadfence();
  }
  if constexpr (kThreads == 32)
    return __shfl_sync(kAllLanes, is_last, 0) != 0;
  else
    return __syncthreads_or(is_last) != 0;
}

// By the last block, all rows of the tile.
template <int kDim, int kThreads>
__device__ __forceinline__ void merge_if_last(const AttentionParams& p,
                                              const TiledPartials& partials, const RowTile& rows,
                                              int walk) {
  if (!is_last_to_arrive<kThreads>(partials, rows, walk)) return;
  constexpr int kFours = kDim / 4;
  for (int e = threadIdx.x; e < rows.num_rows * kFours; e += kThreads)
    merge_four<kDim>(p, partials, rows, e / kFours, e % kFours * 4);
}

// blockIdx: (row, KV head, sequence); a thread has four elements.
template <int kDim>
__global__ void merge_spans_kernel(AttentionParams p, TiledPartials partials) {
  wait_for_previous();
  const int row = static_cast<int>(blockIdx.x);
  const RowTile rows = find_rows(p, blockIdx.z, blockIdx.y, 0, kTiledRows);
  if (row >= rows.num_rows || rows.num_rows > kTiledRows ||
      rows.first_seen / kTiledSpan / partials.walk == rows.last_seen / kTiledSpan / partials.walk)
    return;
  for (int column = 4 * static_cast<int>(threadIdx.x); column < kDim; column += 4 * blockDim.x)
    merge_four<kDim>(p, partials, rows, row, column);
}

}  // namespace
}  // namespace llmserve::cuda
