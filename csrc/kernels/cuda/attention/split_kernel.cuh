// Attention of sequences whose rows of a KV head are at most 16, as in decoding: spans of the
// context are blocks' work. tiled_attention.cuh says which sums there are and in which order.
#pragma once

#include <type_traits>

#include "kernels/cuda/attention/code_tiles.cuh"
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
// and values; or, if kHoldsCodes, these codes alone. Then the queries, unless registers hold them.
// With QkvParams a sequence's one token is prepared on the way, and the queries have memory of
// their own.
template <int kDim, int kWarps, Storage kStorage, bool kWalks = false, class Qkv = Prepared,
          bool kHoldsCodes = false>
__global__ void __launch_bounds__(32 * kWarps)
    split_kernel(AttentionParams p, TiledPartials partials, [[maybe_unused]] Qkv qkv) {
  constexpr bool kPrepares = std::is_same_v<Qkv, QkvParams>;
  constexpr bool kIsWide = kWarps > 1;
  static_assert(!kIsWide || (kWarps * kUnit == kTiledSpan && !kWalks));
  constexpr bool kIsF8 = kStorage == Storage::kF8;
  static_assert(kIsF8 || !kHoldsCodes);
  constexpr bool kWidens = kIsF8 && !kHoldsCodes;  // to a tile in bf16
  constexpr int kStride = kStrideOf<kDim>;
  constexpr bool kHoldsQuery = kHoldsQueryOf<kDim>;
  constexpr int kRow = kHoldsCodes ? kCodeStride<kDim> : kRowBytes<kDim, kStorage>;
  constexpr int kHalfBytes = kHalf * kRow;
  constexpr int kWarpElements = kHoldsCodes ? 2 * kHalfBytes : kSplitWarpElements<kDim, kStorage>;
  LLMSERVE_DYNAMIC_SHARED(uint16_t, shared);
  __shared__ float unit_m[kIsWide ? kWarps : 1][kTiledRows];
  __shared__ float unit_sum[kIsWide ? kWarps : 1][kTiledRows];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  uint16_t* tile = shared + warp * kWarpElements;
  auto* copied = reinterpret_cast<std::byte*>(kWidens ? tile + kUnit * kStride : tile);
  const auto copied_half = [&](int half) { return copied + half * kHalfBytes; };  // K, K, V, V
  // The queries wait where the first values, or what is widened first, will be.
  uint16_t* query = !kHoldsQuery || kPrepares ? shared + kWarps * kWarpElements
                    : kWidens                 ? shared
                                              : shared + kHalfBytes;  // behind both halves of keys

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
  Newest<kPrepares ? kDim : 16, kStorage, kHoldsCodes> newest{};
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
    load_half<kDim, 32, kStorage, kRow>(p.keys.data, nullptr, offsets[half], loaded.sees_unit(from),
                                        copied_half(half), nullptr);
    if constexpr (!kIsWide) blocks[half] = find_block(p, loaded, position + kUnit);
  };
  const auto load_values = [&](int from) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      value_scales[half] = value_scales_ahead[half];
      load_half<kDim, 32, kStorage, kRow>(p.values.data, nullptr, offsets[half],
                                          loaded.sees_unit(from), copied_half(2 + half), nullptr);
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
  uint16_t* values = kWidens ? tile : tile + kUnit * kStride;
  [[maybe_unused]] uint32_t factors[2][2][2];  // of values, both halves
  // A row of a tile becomes the newest key or value.
  const auto put_newest = [&](const auto& row, int half, void* to, float (&scales)[2]) {
    row.put(to);
    if constexpr (kHoldsCodes) {
      if (lane == rows.last_seen % kHalf) scales[half] = row.scale;
    }
    __syncwarp();
  };
  const auto find_scores = [&](int next, bool has_next) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      wait_for_all_but<2>();
      __syncwarp();  // the keys are there
      uint16_t* keys = tile + half * kHalf * kStride;
      if constexpr (kWidens) {
        widen_half<kDim, 32>(copied_half(half), key_scales[half], keys);
        __syncwarp();
      }
      if (is_newest_in(unit + half * kHalf, kHalf)) {
        const int row = rows.last_seen % kHalf;
        put_newest(
            newest.key, half,
            kHoldsCodes ? static_cast<void*>(copied_half(half) + row * kRow) : keys + row * kStride,
            key_scales);
      }
      if constexpr (kHoldsCodes)
        scores_of_codes<kDim, kHoldsQuery>(s + 4 * half, held, query, copied_half(half),
                                           key_scales[half]);
      else
        scores<kDim, kHoldsQuery, 2>(s + 4 * half, held, query, keys);
      __syncwarp();  // and have been read
      if (has_next) load_keys(half, next);
      commit_copies();
    }
    scale_and_mask(s, p, sight, unit);
    wait_for_all_but<2>();
    __syncwarp();  // the values are there
    if constexpr (kWidens) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        widen_half<kDim, 32>(copied_half(2 + half), value_scales[half],
                             tile + half * kHalf * kStride);
      }
      __syncwarp();
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!is_newest_in(unit + half * kHalf, kHalf)) continue;
      const int row = rows.last_seen % kHalf;
      put_newest(newest.value, half,
                 kHoldsCodes ? static_cast<void*>(copied_half(2 + half) + row * kRow)
                             : values + (half * kHalf + row) * kStride,
                 value_scales);
    }
    if constexpr (kHoldsCodes) {
#pragma unroll
      for (int half = 0; half < 2; ++half) value_factors(value_scales[half], factors[half]);
    }
  };
  const auto weigh_some = [&](const uint32_t (&weights)[4][4], int n, float (&left)[4],
                              float (&right)[4]) {
    if constexpr (kHoldsCodes)
      weigh_codes<kDim>(weights, copied_half(2), factors, n, left, right);
    else
      weigh_values<kDim>(weights, values, n, left, right);
  };
  // The column of element e of a lane's row, two a fragment: neighbouring fragments have the even
  // and the odd columns of codes.
  const auto column_of = [&](int e) {
    return kHoldsCodes ? e / 4 * 16 + (lane % 4 * 2 + e % 2) * 2 + e / 2 % 2
                       : e / 2 * 8 + lane % 4 * 2 + e % 2;
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
          to[column_of(e)] = result.o[e / 2][2 * g + e % 2] * ending.kept / ending.divisor;
      }
    };
    Running<kWalks ? kDim : 8> whole;
    if constexpr (kWalks) whole.clear();
    for (bool has_next = true; has_next; unit += kUnit) {
      has_next = unit + kUnit < end;
      find_scores(unit + kUnit, has_next);
      run.add(s, weigh_some);
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
      return reinterpret_cast<float*>(shared + w * kWarpElements + (kWidens ? kUnit * kStride : 0));
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
      float* to = sums_of(warp) + lane / 4 * kDim;
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n) {
        float left[4];
        float right[4];
        weigh_some(weights, n, left, right);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (lane / 4 + i / 2 * 8 >= rows.num_rows) continue;
          to[i / 2 * 8 * kDim + column_of(4 * n + i % 2)] = left[i];
          to[i / 2 * 8 * kDim + column_of(4 * n + 2 + i % 2)] = right[i];
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

}  // namespace
}  // namespace llmserve::cuda
