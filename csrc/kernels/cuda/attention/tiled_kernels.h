// Paged attention by tensor cores: caches in bf16 or f8 whose D = Dv has kernels and whose rows are
// aligned to 16 bytes, sm_80 and later. Queries and weights are rounded to bf16, sums are float32.
// The kernels of one kind of cache are a translation unit (tiled_attention_*.cu): they are most of
// what nvcc has to do.
#pragma once

#include "kernels/cuda/kernels.h"

namespace llmserve::cuda {

// What the blocks of a split row's spans pass on: working memory of B' sequences, which are split
// together.
struct TiledPartials {
  float* outputs;     // [B', K, spans, rows, D], not divided by the sums
  float* maxima;      // [B', K, spans, rows], as powers of 2
  float* sums;        // likewise
  int64_t sequences;  // B'
  int64_t kv_heads;
  int64_t spans;
  int64_t rows;
  int64_t shared_bytes;  // that a block may ask for
  int64_t walk = 1;      // spans that a warp takes one after another; changes no bit
  // [B', K]: how many blocks of a sequence and KV head have passed theirs on; zero before a kernel
  // and after it.
  uint32_t* arrived = nullptr;
  SpanMerge merge = SpanMerge::kFew;  // whether by the last of these blocks; changes no bit
  bool holds_codes = false;  // f8 is widened as it is multiplied, and not before; changes no bit
};
struct TiledKernels {
  // Once before the first run(), on the device, whose blocks may ask for so much shared memory, and
  // not within a capture.
  void (*prepare)(int64_t shared_bytes);
  // The plan covers every sequence of the step; it may be that of a larger one.
  void (*run)(const AttentionParams& params, const TiledPlan& plan, const TiledPartials& partials,
              cudaStream_t stream);
  // The same of sequences of one token each, whose heads `qkv` has as they are before prepare_qkv,
  // can_hold_heads(), and whose slots are those of their positions or -1: with that kernel's bits.
  // Null where has_preparing_kernel() says so; plan.row_tiles is 0, and partials.walk 1.
  void (*run_preparing)(const AttentionParams& params, const QkvParams& qkv, const TiledPlan& plan,
                        const TiledPartials& partials, cudaStream_t stream);
};
// Of a width that has_tiled_kernel().
TiledKernels tiled_kernels_bf16(int64_t width);
TiledKernels tiled_kernels_f8(int64_t width);

}  // namespace llmserve::cuda
