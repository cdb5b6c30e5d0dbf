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

#include "kernels/cuda/attention/rows_kernel.cuh"
#include "kernels/cuda/attention/split_kernel.cuh"

namespace llmserve::cuda {
namespace {

template <int kDim, Storage kStorage>
struct Kernels {
  static constexpr bool kIsF8 = kStorage == Storage::kF8;
  static constexpr int kWarps = tiled_warps(kDim);
  static constexpr int kWideWarps = has_wide_kernel(kDim) ? kTiledSpan / kUnit : 1;
  static constexpr auto rows = rows_kernel<kDim, kWarps, kStorage>;
  static constexpr int64_t kRowsBytes = tiled_rows_bytes(kDim, kIsF8);
  // Tried for widths that models have; elsewhere as narrow.
  static constexpr bool kHasWalk = !kIsF8 && (kDim == 64 || kDim == 128);
  static constexpr auto walking = split_kernel<kDim, 1, kStorage, kHasWalk>;
  static constexpr bool kHasPreparing = has_preparing_kernel(kDim);
  static constexpr bool kHasCodes = kIsF8 && has_code_kernel(kDim);

  // A warp for each span and a warp for each unit. Qkv: QkvParams, or Prepared.
  template <class Qkv, bool kHoldsCodes>
  struct Split {
    static constexpr auto narrow = split_kernel<kDim, 1, kStorage, false, Qkv, kHoldsCodes>;
    static constexpr auto wide = split_kernel<kDim, kWideWarps, kStorage, false, Qkv, kHoldsCodes>;
    static constexpr int64_t bytes(int warps) {
      const bool is_apart = std::is_same_v<Qkv, QkvParams> && tiled_holds_query(kDim);
      const int64_t tiles =
          kHoldsCodes ? warps * tiled_held_code_bytes(kDim) : tiled_split_bytes(kDim, warps, kIsF8);
      return tiles + (is_apart ? tiled_query_bytes(kDim) : 0);
    }
  };

  static bool may_be_wide(int64_t shared_bytes) {
    using Largest = Split<std::conditional_t<kHasPreparing, QkvParams, Prepared>, false>;
    return has_wide_kernel(kDim) && Largest::bytes(kWideWarps) + kTiledStaticBytes <= shared_bytes;
  }

  static void allow(const void* kernel, int64_t num_bytes) {
    check("cudaFuncSetAttribute of attention",
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(num_bytes)));
  }
  template <class Qkv, bool kHoldsCodes>
  static void allow_split(bool is_wide) {
    using Of = Split<Qkv, kHoldsCodes>;
    allow(reinterpret_cast<const void*>(Of::narrow), Of::bytes(1));
    if (is_wide) allow(reinterpret_cast<const void*>(Of::wide), Of::bytes(kWideWarps));
  }

  static void prepare(int64_t shared_bytes) {
    const bool is_wide = may_be_wide(shared_bytes);
    allow(reinterpret_cast<const void*>(rows), kRowsBytes);
    allow(reinterpret_cast<const void*>(walking), Split<Prepared, false>::bytes(1));
    allow_split<Prepared, false>(is_wide);
    if constexpr (kHasCodes) allow_split<Prepared, true>(is_wide);
    if constexpr (kHasPreparing) allow_split<QkvParams, false>(is_wide);
    if constexpr (kHasPreparing && kHasCodes) allow_split<QkvParams, true>(is_wide);
  }

  static void run(const AttentionParams& p, const TiledPlan& plan, const TiledPartials& partials,
                  cudaStream_t stream) {
    if (plan.row_tiles > 0) {
      const dim3 grid(static_cast<unsigned>(p.keys.num_heads),
                      static_cast<unsigned>(p.num_sequences),
                      static_cast<unsigned>(plan.row_tiles));
      launch_early("paged_attention", rows, grid, 32 * kWarps, static_cast<size_t>(kRowsBytes),
                   stream, p);
    }
    split(p, plan, partials, Prepared(), stream);
  }

  // Of a step that walks one span at a time.
  static void run_preparing(const AttentionParams& p, const QkvParams& qkv, const TiledPlan& plan,
                            const TiledPartials& partials, cudaStream_t stream) {
    if constexpr (kHasPreparing) split(p, plan, partials, qkv, stream);
  }

 private:
  template <class Qkv>
  static void split(const AttentionParams& p, const TiledPlan& plan, const TiledPartials& partials,
                    const Qkv& qkv, cudaStream_t stream) {
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
      const auto launch_split = [&](auto kernels) {
        using Of = decltype(kernels);
        const int warps = is_wide ? kWideWarps : 1;
        launch_early("paged_attention", is_wide ? Of::wide : Of::narrow, spans, 32 * warps,
                     static_cast<size_t>(Of::bytes(warps)), stream, part, passed, qkv);
      };
      if (passed.walk > 1)
        launch_early("paged_attention", walking, spans, 32,
                     static_cast<size_t>(Split<Prepared, false>::bytes(1)), stream, part, passed,
                     Prepared());
      else if (kHasCodes && partials.holds_codes)
        launch_split(Split<Qkv, kHasCodes>());
      else
        launch_split(Split<Qkv, false>());
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
