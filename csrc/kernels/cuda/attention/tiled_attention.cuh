// Paged attention by tensor cores, over caches in bf16 or, widened to it in shared memory, f8.
// Three kernels for decoding, small and large, and prompts: the rows of a tile are query heads of
// tokens that read the same KV head, 16 to a warp, whatever tokens they belong to.
//
// A row walks the KV in units of kTiledUnit positions and spans of kTiledSpan, both anchored at
// position 0. A unit's weights are relative to the largest score of the span so far, and its sums
// start at zero: what came before is rescaled to that maximum, then the unit's sums are added.
// Spans start afresh and are merged in position order. A unit or span of which a row sees nothing
// leaves it as it is. So a row's bits depend on its own tokens alone: not on whether units and
// spans are computed one after another (prompts), by a block a span or by a warp a unit (decoding),
// nor on which rows are beside it. Dao 2023 (FlashAttention-2), section 3.1; Dao et al. 2023
// (Flash-Decoding).
#pragma once

#include <type_traits>

#include "kernels/cuda/attention/merge_spans.cuh"
#include "kernels/cuda/attention/prepared_rows.cuh"

namespace llmserve::cuda {
namespace {

// A span of a sequence whose rows fit 16: blockIdx (span, KV head, sequence). One warp takes the
// span's units one after another, half a unit's keys ahead; or there is a warp for each unit, which
// learns from the others the maximum of the units before its own, and the units' sums are put
// together in shared memory. Where a warp walks, it takes partials.walk spans one after another,
// and merges them where they are all of the sequence. Otherwise the block that is done last merges
// the spans, if partials.arrived is there, or a kernel behind. Shared memory of a warp: a unit's
// keys and values in bf16; or one unit, in bf16, of what was widened last, and the codes of keys
// and values. Then the queries, unless registers hold them.
// With QkvParams a sequence's one token is prepared on the way, and the queries have memory of
// their own.
template <int kDim, int kWarps, Storage kStorage, bool kWalks = false, class Qkv = Prepared>
__global__ void __launch_bounds__(32 * kWarps)
    split_kernel(AttentionParams p, TiledPartials partials, [[maybe_unused]] Qkv qkv) {
  constexpr bool kPrepares = std::is_same_v<Qkv, QkvParams>;
  constexpr bool kIsWide = kWarps > 1;
  static_assert(!kIsWide || (kWarps * kUnit == kTiledSpan && !kWalks));
  constexpr bool kIsF8 = kStorage == Storage::kF8;
  constexpr int kStride = kStrideOf<kDim>;
  constexpr bool kHoldsQuery = kHoldsQueryOf<kDim>;
  constexpr int kHalfBytes = kHalf * kRowBytes<kDim, kStorage>;
  constexpr int kWarpElements = kSplitWarpElements<kDim, kStorage>;
  LLMSERVE_DYNAMIC_SHARED(uint16_t, shared);
  __shared__ float unit_m[kIsWide ? kWarps : 1][kTiledRows];
  __shared__ float unit_sum[kIsWide ? kWarps : 1][kTiledRows];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  uint16_t* tile = shared + warp * kWarpElements;
  auto* copied = reinterpret_cast<std::byte*>(kIsF8 ? tile + kUnit * kStride : tile);
  const auto copied_half = [&](int half) { return copied + half * kHalfBytes; };  // K, K, V, V
  // The queries wait where the first values, or what is widened first, will be.
  uint16_t* query = !kHoldsQuery || kPrepares ? shared + kWarps * kWarpElements
                    : kIsF8                   ? shared
                                              : shared + kUnit * kStride;

  const RowTile rows = find_rows(p, blockIdx.z, blockIdx.y, 0, kTiledRows);
  const int walk = kWalks ? static_cast<int>(partials.walk) * kTiledSpan : kTiledSpan;
  const int span_begin = static_cast<int>(blockIdx.x) * walk;
  if (rows.num_rows <= 0 || rows.num_rows > kTiledRows || span_begin + walk <= rows.first_seen ||
      span_begin > rows.last_seen) {
    wait_for_previous();
    return;
  }
  const int begin_seen = rows.first_seen / kUnit * kUnit;
  const int end = span_begin + walk < rows.last_seen + 1 ? span_begin + walk : rows.last_seen + 1;
  int unit = kIsWide                   ? span_begin + warp * kUnit
             : begin_seen > span_begin ? begin_seen
                                       : span_begin;
  const bool has_unit = unit < end && unit >= begin_seen;
  // What is loaded: all but the newest position, if its slot is this kernel's to write.
  RowTile loaded = rows;
  int64_t token = 0;
  int64_t slot = -1;
  if constexpr (kPrepares) {
    token = p.query_starts[rows.sequence];
    slot = qkv.slots[token];
    if (slot >= 0) --loaded.last_seen;
  }
  // Of the units that are the warp's.
  const int warp_end = kIsWide ? unit + kUnit : end;
  const bool has_newest =
      kPrepares && slot >= 0 && has_unit && unit <= rows.last_seen && rows.last_seen < warp_end;
  Newest<kPrepares ? kDim : 16, kStorage> newest{};
  // Whether it is among so many positions from `from` on.
  const auto is_newest_in = [&](int from, int count) {
    return has_newest && rows.last_seen >= from && rows.last_seen < from + count;
  };

  // Of the lane's positions in both halves of a unit: the blocks, of the unit that is to be loaded
  // next, so that nobody waits for them then, and where they lie, of the unit loaded last.
  int32_t blocks[2] = {find_block(p, loaded, unit + lane),
                       find_block(p, loaded, unit + kHalf + lane)};
  int64_t offsets[2];
  float key_scales[2];
  float value_scales_ahead[2] = {};
  float value_scales[2];
  const auto load_keys = [&](int half, int from) {
    const int position = from + half * kHalf + lane;
    offsets[half] = find_position(p, rows, blocks[half], position);
    key_scales[half] = find_scale<kStorage>(p, p.keys, rows, blocks[half], position);
    value_scales_ahead[half] = find_scale<kStorage>(p, p.values, rows, blocks[half], position);
    load_half<kDim, 32, kStorage>(p.keys.data, nullptr, offsets[half], loaded.sees_unit(from),
                                  copied_half(half), nullptr);
    if constexpr (!kIsWide) blocks[half] = find_block(p, loaded, position + kUnit);
  };
  const auto load_values = [&](int from) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      value_scales[half] = value_scales_ahead[half];
      load_half<kDim, 32, kStorage>(p.values.data, nullptr, offsets[half], loaded.sees_unit(from),
                                    copied_half(2 + half), nullptr);
    }
  };
  const auto load_first_keys = [&] {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (has_unit) load_keys(half, unit);
      commit_copies();
    }
  };
  // What earlier steps wrote need not be waited for; no sequence reads what another one of the same
  // step writes, since prefixes are shared when they are committed.
  const bool is_old = kPrepares || unit + kUnit <= rows.first_position;
  if (is_old) load_first_keys();
  if constexpr (kPrepares) {  // all values are old, too
    if (has_unit) load_values(unit);
    commit_copies();
    wait_for_previous();
    if (has_newest) newest.load(qkv, token, rows.kv_head);
    prepare_queries<kDim, kWarps>(qkv, rows, token, query);
  } else {
    wait_for_previous();
    if (!is_old) load_first_keys();
    load_queries<kDim, kTiledRows, 32 * kWarps>(p, rows, query);
  }
  __syncthreads();
  uint32_t held[kDim / 16][4] = {};
  if constexpr (kHoldsQuery) {
    hold_queries<kDim>(held, query);
    if constexpr (!kPrepares) __syncthreads();
  }
  if constexpr (kPrepares) {
    if (has_newest) newest.prepare(qkv, token, rows.kv_head, slot);
  } else {
    if (has_unit) load_values(unit);
    commit_copies();
  }

  const Sight sight = find_sight(rows, 0, p.window);
  Running<kIsWide ? 8 : kDim> run;
  run.clear();
  float s[8][4];
  uint16_t* values = kIsF8 ? tile : tile + kUnit * kStride;
  const auto find_scores = [&](int next, bool has_next) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      wait_for_all_but<2>();
      __syncwarp();  // the keys are there
      uint16_t* keys = tile + half * kHalf * kStride;
      if constexpr (kIsF8) {
        widen_half<kDim, 32>(copied_half(half), key_scales[half], keys);
        __syncwarp();
      }
      if (is_newest_in(unit + half * kHalf, kHalf)) {
        newest.key.put(keys + (rows.last_seen - unit - half * kHalf) * kStride);
        __syncwarp();
      }
      scores<kDim, kHoldsQuery, 2>(s + 4 * half, held, query, keys);
      __syncwarp();  // and have been read
      if (has_next) load_keys(half, next);
      commit_copies();
    }
    scale_and_mask(s, p, sight, unit);
    wait_for_all_but<2>();
    __syncwarp();  // the values are there
    if constexpr (kIsF8) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        widen_half<kDim, 32>(copied_half(2 + half), value_scales[half],
                             tile + half * kHalf * kStride);
      }
      __syncwarp();
    }
    if (is_newest_in(unit, kUnit)) {
      newest.value.put(values + (rows.last_seen - unit) * kStride);
      __syncwarp();
    }
  };
  // A sequence that has one span is done with it: merging it alone would change nothing.
  const bool is_partial = rows.first_seen / walk != rows.last_seen / walk;

  if constexpr (!kIsWide) {
    const auto write = [&](const Running<kDim>& result, int span) {
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        const int row = lane / 4 + g * 8;
        if (row >= rows.num_rows) continue;
        float* to = output_of(p, rows, row);
        if (is_partial) {
          const int64_t at = partial_index(partials, rows.sequence, rows.kv_head, span, row);
          to = partials.outputs + at * kDim;
          if (lane % 4 == 0) {
            partials.maxima[at] = result.m[g];
            partials.sums[at] = result.sum[g];
          }
        }
        const Ending ending =
            is_partial ? Ending{1.0f, 1.0f} : end_row(p, rows, row, result.m[g], result.sum[g]);
#pragma unroll
        for (int e = 0; e < kDim / 4; ++e)  // two of each fragment
          to[e / 2 * 8 + lane % 4 * 2 + e % 2] =
              result.o[e / 2][2 * g + e % 2] * ending.kept / ending.divisor;
      }
    };
    Running<kWalks ? kDim : 8> whole;
    if constexpr (kWalks) whole.clear();
    for (bool has_next = true; has_next; unit += kUnit) {
      has_next = unit + kUnit < end;
      find_scores(unit + kUnit, has_next);
      run.add(s, values);
      __syncwarp();
      if (has_next) load_values(unit + kUnit);
      commit_copies();
      if constexpr (kWalks) {
        if (has_next && (unit + kUnit) % kTiledSpan != 0) continue;
        if (is_partial)
          write(run, unit / kTiledSpan);
        else
          merge_span(whole, run);
        run.clear();
      }
    }
    if constexpr (!kWalks)
      write(run, static_cast<int>(blockIdx.x));
    else if (!is_partial)
      write(whole, 0);
    if (is_partial && partials.arrived != nullptr) merge_if_last<kDim, 32>(p, partials, rows, walk);
  } else {
    float largest[2] = {-INFINITY, -INFINITY};
    if (has_unit) {
      find_scores(0, false);
      largest_scores(s, largest);
    }
    if (lane % 4 == 0) {
      unit_m[warp][lane / 4] = largest[0];
      unit_m[warp][lane / 4 + 8] = largest[1];
    }
    __syncthreads();
    // The units' sums lie where their keys did, [16, kDim].
    const auto sums_of = [&](int w) {
      return reinterpret_cast<float*>(shared + w * kWarpElements + (kIsF8 ? kUnit * kStride : 0));
    };
    if (has_unit) {
      for (int w = 0; w < warp; ++w) {
        largest[0] = fmaxf(largest[0], unit_m[w][lane / 4]);
        largest[1] = fmaxf(largest[1], unit_m[w][lane / 4 + 8]);
      }
      uint32_t weights[4][4];
      weigh(s, largest, weights);
      float sums[4];
      sum_weights(weights, sums);
      if (lane % 4 == 0) {
        unit_sum[warp][lane / 4] = sums[0];
        unit_sum[warp][lane / 4 + 8] = sums[2];
      }
      float* to = sums_of(warp) + lane / 4 * kDim + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n) {
        float left[4];
        float right[4];
        weigh_values<kDim>(weights, values, n, left, right);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (lane / 4 + i / 2 * 8 >= rows.num_rows) continue;
          to[i / 2 * 8 * kDim + n * 16 + i % 2] = left[i];
          to[i / 2 * 8 * kDim + n * 16 + 8 + i % 2] = right[i];
        }
      }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < rows.num_rows * kDim; e += 32 * kWarps) {
      const int row = e / kDim;
      float m = -INFINITY;
      float sum = 0.0f;
      float value = 0.0f;
      for (int w = 0; w < kWarps; ++w) {  // as Running::add does it
        const int begin = span_begin + w * kUnit;
        if (begin < begin_seen || begin >= end) continue;
        const float new_m = fmaxf(m, unit_m[w][row]);
        const float scale = fast_exp2(m - finite_or_zero(new_m));
        m = new_m;
        sum = v_fma(sum, scale, unit_sum[w][row]);
        value = v_fma(value, scale, sums_of(w)[e]);
      }
      if (!is_partial) {
        const Ending ending = end_row(p, rows, row, m, sum);
        output_of(p, rows, row)[e % kDim] = value * ending.kept / ending.divisor;
        continue;
      }
      const int64_t at = partial_index(partials, rows.sequence, rows.kv_head, blockIdx.x, row);
      partials.outputs[at * kDim + e % kDim] = value;
      if (e % kDim == 0) {
        partials.maxima[at] = m;
        partials.sums[at] = sum;
      }
    }
    if (is_partial && partials.arrived != nullptr)
      merge_if_last<kDim, 32 * kWarps>(p, partials, rows, walk);
  }
}

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

template <int kDim, Storage kStorage>
struct Kernels {
  static constexpr bool kIsF8 = kStorage == Storage::kF8;
  static constexpr int kWarps = tiled_warps(kDim);
  static constexpr int kWideWarps = has_wide_kernel(kDim) ? kTiledSpan / kUnit : 1;
  static constexpr auto narrow = split_kernel<kDim, 1, kStorage>;
  static constexpr auto wide = split_kernel<kDim, kWideWarps, kStorage>;
  // Tried for widths that models have; elsewhere as narrow.
  static constexpr bool kHasWalk = !kIsF8 && (kDim == 64 || kDim == 128);
  static constexpr auto walking = split_kernel<kDim, 1, kStorage, kHasWalk>;
  // Likewise, that prepare a step's queries, keys and values.
  static constexpr bool kHasPreparing = has_preparing_kernel(kDim);
  using Qkv = std::conditional_t<kHasPreparing, QkvParams, Prepared>;
  static constexpr auto narrow_preparing = split_kernel<kDim, 1, kStorage, false, Qkv>;
  static constexpr auto wide_preparing = split_kernel<kDim, kWideWarps, kStorage, false, Qkv>;
  static constexpr auto rows = rows_kernel<kDim, kWarps, kStorage>;
  static constexpr int64_t kNarrowBytes = tiled_split_bytes(kDim, 1, kIsF8);
  static constexpr int64_t kWideBytes = tiled_split_bytes(kDim, kWideWarps, kIsF8);
  static constexpr int64_t kQueryBytes = kHasPreparing ? tiled_query_bytes(kDim) : 0;
  static constexpr int64_t kRowsBytes = tiled_rows_bytes(kDim, kIsF8);

  static bool may_be_wide(int64_t shared_bytes) {
    return has_wide_kernel(kDim) && kWideBytes + kQueryBytes + kTiledStaticBytes <= shared_bytes;
  }

  static void prepare(int64_t shared_bytes) {
    const auto allow = [](auto kernel, int64_t num_bytes) {
      check("cudaFuncSetAttribute of attention",
            cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(num_bytes)));
    };
    allow(narrow, kNarrowBytes);
    allow(walking, kNarrowBytes);
    allow(narrow_preparing, kNarrowBytes + kQueryBytes);
    if (may_be_wide(shared_bytes)) {
      allow(wide, kWideBytes);
      allow(wide_preparing, kWideBytes + kQueryBytes);
    }
    allow(rows, kRowsBytes);
  }

  static void run(const AttentionParams& p, const TiledPlan& plan, const TiledPartials& partials,
                  cudaStream_t stream) {
    if (plan.row_tiles > 0) {
      const auto kv_heads = static_cast<unsigned>(p.keys.num_heads);
      const auto sequences = static_cast<unsigned>(p.num_sequences);
      launch_early("paged_attention", rows,
                   dim3(kv_heads, sequences, static_cast<unsigned>(plan.row_tiles)), 32 * kWarps,
                   static_cast<size_t>(kRowsBytes), stream, p);
    }
    split(p, plan, partials, nullptr, stream);
  }

  // Of a step that walks one span at a time.
  static void run_preparing(const AttentionParams& p, const QkvParams& qkv, const TiledPlan& plan,
                            const TiledPartials& partials, cudaStream_t stream) {
    if constexpr (kHasPreparing) split(p, plan, partials, &qkv, stream);
  }

 private:
  // `qkv`: null, or what prepares the queries on the way.
  static void split(const AttentionParams& p, const TiledPlan& plan, const TiledPartials& partials,
                    const QkvParams* qkv, cudaStream_t stream) {
    const auto kv_heads = static_cast<unsigned>(p.keys.num_heads);
    for (int64_t begin = 0; plan.spans > 0 && begin < p.num_sequences;
         begin += partials.sequences) {
      AttentionParams part = p;
      part.query_starts += begin;
      part.kv_lens += begin;
      part.block_tables += begin * p.max_blocks;
      const auto count = static_cast<unsigned>(p.num_sequences - begin < partials.sequences
                                                   ? p.num_sequences - begin
                                                   : partials.sequences);
      const int64_t num_blocks = plan.spans * p.keys.num_heads * count;
      const bool is_wide = may_be_wide(partials.shared_bytes) && tiled_is_wide(num_blocks);
      TiledPartials passed = partials;
      if (is_wide || !kHasWalk) passed.walk = 1;
      if (!merges_in_place(partials.merge, is_wide)) passed.arrived = nullptr;
      const auto walks = static_cast<unsigned>(ceil_div(plan.spans, passed.walk));
      const dim3 spans(walks, kv_heads, count);
      const auto launch_split = [&](auto kernel, int warps, int64_t num_bytes, const auto& of) {
        launch_early("paged_attention", kernel, spans, 32 * warps, static_cast<size_t>(num_bytes),
                     stream, part, passed, of);
      };
      if constexpr (kHasPreparing) {
        if (qkv != nullptr && is_wide)
          launch_split(wide_preparing, kWideWarps, kWideBytes + kQueryBytes, *qkv);
        else if (qkv != nullptr)
          launch_split(narrow_preparing, 1, kNarrowBytes + kQueryBytes, *qkv);
      }
      if (qkv == nullptr) {
        if (is_wide)
          launch_split(wide, kWideWarps, kWideBytes, Prepared());
        else
          launch_split(passed.walk > 1 ? walking : narrow, 1, kNarrowBytes, Prepared());
      }
      if (walks == 1 || passed.arrived != nullptr) continue;
      launch_early("paged_attention", merge_spans_kernel<kDim>,
                   dim3(static_cast<unsigned>(plan.split_rows), kv_heads, count),
                   row_threads(kDim / 4), 0, stream, part, passed);
    }
  }
};

template <Storage kStorage>
TiledKernels tiled_kernels_of(int64_t width) {
  const auto of = [](auto kernels) {
    using Of = decltype(kernels);
    return TiledKernels{&Of::prepare, &Of::run, Of::kHasPreparing ? &Of::run_preparing : nullptr};
  };
  switch (width) {
    case 64:
      return of(Kernels<64, kStorage>());
    case 80:
      return of(Kernels<80, kStorage>());
    case 96:
      return of(Kernels<96, kStorage>());
    case 128:
      return of(Kernels<128, kStorage>());
    case 256:
      return of(Kernels<256, kStorage>());
    default:
      return {};
  }
}

}  // namespace
}  // namespace llmserve::cuda
