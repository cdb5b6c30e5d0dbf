// Attention by columns: caches in bf16 or f8 whose widths columns_fit(), of any group of query
// heads, with values of their own or in the keys, sm_80 and later. Queries and weights are rounded
// to bf16, sums are float32. The kernels of one kind of cache are a translation unit.
#pragma once

#include "kernels/cuda/attention/column_plan.h"
#include "kernels/cuda/kernels.h"

namespace llmserve::cuda {

// What a launch has beside AttentionParams.
struct ColumnParams {
  float* outputs;        // [B, K, rows, slots, Dv] of pieces of a context, not divided by the sums
  float* maxima;         // [B, K, rows, slots], as powers of 2
  float* sums;           // likewise
  int64_t rows;          // of a sequence and KV head, at most
  int64_t slots;         // pieces, at most
  int32_t tile_rows;     // rows of a block
  int32_t ring;          // halves of units that a block has
  bool is_split;         // sequences of up to kColumnSplitRows rows; or else those of more
  bool takes_stretches;  // whole, however few they are; changes no bit
};
struct ColumnKernels {
  // Once before the first run(), on the device, whose blocks may ask for so much shared memory, and
  // not within a capture.
  void (*prepare)(int64_t shared_bytes);
  // Of rows up to `num_rows` a sequence and KV head; c.slots of 1 pass nothing on.
  void (*run)(const AttentionParams& p, const ColumnParams& c, const ColumnShape& shape,
              int64_t num_rows, cudaStream_t stream);
};
ColumnKernels column_kernels_bf16(bool is_narrow);
ColumnKernels column_kernels_f8(bool is_narrow);

}  // namespace llmserve::cuda
