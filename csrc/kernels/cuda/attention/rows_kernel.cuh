// Attention of prompts: row tiles of a sequence are blocks' work. tiled_attention.cuh says which
// sums there are and in which order.
#pragma once

#include "kernels/cuda/attention/tiled_rows.cuh"

namespace llmserve::cuda {
namespace {

// Prompts: blockIdx (KV head, sequence, row tile from the last to the first: the longest work
// begins first), for sequences of more than 16 rows. The warps share a unit's keys and values.
// Shared memory: kStages times a unit of both; or one unit of both, in bf16, of what was widened
// last, and kStages times their codes; then, unless registers hold them, the queries and what was
// merged of the spans, element i of thread t at [i * threads + t].
template <int kDim, int kWarps, Storage kStorage>
__global__ void __launch_bounds__(32 * kWarps, kDim <= 128 ? 2 : 1) rows_kernel(AttentionParams p) {
  constexpr int kThreads = 32 * kWarps;
  constexpr int kRows = kTiledRows * kWarps;
  constexpr int kStride = kStrideOf<kDim>;
  constexpr bool kIsF8 = kStorage == Storage::kF8;
  constexpr bool kHoldsQuery = kRowsHoldQueryOf<kDim>;
  constexpr bool kHoldsMerged = kRowsHoldMergedOf<kDim>;
  constexpr int kStages = kStagesOf<kDim>;
  constexpr int kUnitBytes = kUnit * kRowBytes<kDim, kStorage>;
  static_assert(kRows <= 2 * kUnit);
  LLMSERVE_DYNAMIC_SHARED(uint16_t, shared);
  auto* copied = reinterpret_cast<std::byte*>(kIsF8 ? shared + 2 * kUnit * kStride : shared);
  uint16_t* past_tiles = reinterpret_cast<uint16_t*>(copied + 2 * kStages * kUnitBytes);
  uint16_t* query = kHoldsQuery ? shared : past_tiles;
  auto* merged_outputs = reinterpret_cast<float*>(past_tiles + kRows * kStride);

  const int64_t first_row = (static_cast<int64_t>(gridDim.z) - 1 - blockIdx.z) * kRows;
  wait_for_previous();
  const RowTile rows = find_rows(p, blockIdx.y, blockIdx.x, first_row, kRows);
  if (first_row >= rows.num_rows || rows.num_rows <= kTiledRows || rows.num_rows >= p.wgmma_rows)
    return;

  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t warp_row = first_row + warp * kTiledRows;
  const bool has_rows = warp_row < rows.num_rows;
  load_queries<kDim, kRows, kThreads>(p, rows, query);
  __syncthreads();
  const uint16_t* warp_query = query + warp * kTiledRows * kStride;
  uint32_t held[kDim / 16][4] = {};
  if constexpr (kHoldsQuery) {
    hold_queries<kDim>(held, warp_query);
    __syncthreads();
  }

  Sight sight{};
  if (has_rows) sight = find_sight(rows, warp_row, p.window);
  Running<kDim> run;
  // Of all spans so far; its outputs may be in `merged_outputs`.
  Running<kHoldsMerged ? kDim : 8> whole;
  whole.clear();
  if constexpr (!kHoldsMerged) {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) merged_outputs[i * kThreads + threadIdx.x] = 0.0f;
  }

  int begin = rows.first_seen / kUnit * kUnit;
  // Of the unit that is to be loaded next, so that nobody waits for them then.
  int32_t blocks[2] = {find_block(p, rows, begin + lane),
                       find_block(p, rows, begin + kHalf + lane)};
  float key_scales[2];
  float value_scales[2];
  const auto load_unit = [&](int from, int stage) {
    std::byte* to = copied + stage * 2 * kUnitBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = from + half * kHalf + lane;
      const int64_t offset = find_position(p, rows, blocks[half], position);
      key_scales[half] = find_scale<kStorage>(p, p.keys, rows, blocks[half], position);
      value_scales[half] = find_scale<kStorage>(p, p.values, rows, blocks[half], position);
      load_half<kDim, kThreads, kStorage>(p.keys.data, p.values.data, offset, rows.sees_unit(from),
                                          to + half * (kUnitBytes / 2),
                                          to + kUnitBytes + half * (kUnitBytes / 2));
      blocks[half] = find_block(p, rows, position + kUnit);
    }
  };
  const auto widen_unit = [&](int stage) {
#pragma unroll
    for (int half = 0; half < 4; ++half) {  // of keys, then of values
      widen_half<kDim, kThreads>(copied + stage * 2 * kUnitBytes + half * (kUnitBytes / 2),
                                 half < 2 ? key_scales[half] : value_scales[half - 2],
                                 shared + half * kHalf * kStride);
    }
  };
  int stage = 0;
  load_unit(begin, stage);
  for (int span = begin / kTiledSpan; span <= rows.last_seen / kTiledSpan; ++span) {
    run.clear();
    const int span_end = (span + 1) * kTiledSpan;
    for (; begin < span_end && begin <= rows.last_seen; begin += kUnit) {
      wait_for_copies();
      __syncthreads();  // the unit is there, and nobody reads the one before any more
      const bool has_next = begin + kUnit <= rows.last_seen;
      const uint16_t* tile = kIsF8 ? shared : shared + stage * kUnitBytes;  // two units of 2 bytes
      if constexpr (kIsF8) {
        widen_unit(stage);
        __syncthreads();
      }
      if constexpr (kStages == 2) {
        stage ^= 1;
        if (has_next) load_unit(begin + kUnit, stage);
      }
      if (has_rows && begin <= sight.warp_last && begin + kUnit > sight.warp_first) {
        float s[8][4];
        scores<kDim, kHoldsQuery, 4>(s, held, warp_query, tile);
        scale_and_mask(s, p, sight, begin);
        run.add(s, tile + kUnit * kStride);
      }
      if constexpr (kStages == 1) {
        __syncthreads();
        if (has_next) load_unit(begin + kUnit, stage);
      }
    }
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const Merge both = merge(whole.m[g], run.m[g]);
      whole.m[g] = both.m;
      whole.sum[g] = merged(both, whole.sum[g], run.sum[g]);
#pragma unroll
      for (int e = 0; e < kDim / 4; ++e) {  // two of each fragment
        const float value = run.o[e / 2][2 * g + e % 2];
        if constexpr (kHoldsMerged) {
          float& to = whole.o[e / 2][2 * g + e % 2];
          to = merged(both, to, value);
        } else {
          float& to = merged_outputs[(g * (kDim / 4) + e) * kThreads + threadIdx.x];
          to = merged(both, to, value);
        }
      }
    }
  }
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    const int64_t row = warp_row + lane / 4 + g * 8;
    if (row >= rows.num_rows) continue;
    float* to = output_of(p, rows, row);
    const Ending ending = end_row(p, rows, row, whole.m[g], whole.sum[g]);
#pragma unroll
    for (int e = 0; e < kDim / 4; ++e) {
      float value;
      if constexpr (kHoldsMerged)
        value = whole.o[e / 2][2 * g + e % 2];
      else
        value = merged_outputs[(g * (kDim / 4) + e) * kThreads + threadIdx.x];
      to[e / 2 * 8 + lane % 4 * 2 + e % 2] = value * ending.kept / ending.divisor;
    }
  }
}

}  // namespace
}  // namespace llmserve::cuda
