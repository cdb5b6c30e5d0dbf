// Attention by columns: what it takes, and what it passes on in working memory.
#include <algorithm>
#include <utility>

#include "kernels/cuda/attention/column_kernels.h"
#include "kernels/cuda/cuda_backend.h"

namespace llmserve::cuda {
namespace {

ColumnShape shape_of(const AttentionParams& p) {
  return {.key_width = static_cast<int>(p.keys.width),
          .value_width = static_cast<int>(p.values.width),
          .has_values_in_keys = p.values.data == p.keys.data,
          .is_f8 = p.storage == Storage::kF8};
}

}  // namespace

bool CudaBackend::can_attend_by_columns(const AttentionParams& p) const {
  const bool is_bf16 = p.storage == Storage::kBF16;
  const bool has_aligned_codes =
      p.storage == Storage::kF8 && p.keys.head_stride % 16 == 0 && p.values.head_stride % 16 == 0;
  const int64_t rows = p.num_tokens * (p.num_heads / p.keys.num_heads);
  return (is_bf16 || has_aligned_codes) && p.keys.width <= kMaxGridYZ &&
         p.values.width <= kMaxGridYZ && columns_fit(shape_of(p), tiled_shared_bytes_) &&
         is_aligned(p.keys.data) && is_aligned(p.values.data) && p.keys.num_heads <= kMaxGridYZ &&
         p.num_sequences <= kMaxGridYZ && (rows / kTiledRows + 1) * p.keys.num_heads <= kMaxGridX;
}

void CudaBackend::attend_by_columns(const PagedAttentionArgs& args, const AttentionParams& params) {
  const ColumnShape shape = shape_of(params);
  const int64_t kv_heads = params.keys.num_heads;
  const int64_t group = params.num_heads / kv_heads;
  const bool is_narrow = column_class_fits(kNarrowColumns, params.keys.width, params.values.width);
  const ColumnKernels kernels =
      shape.is_f8 ? column_kernels_f8(is_narrow) : column_kernels_bf16(is_narrow);
  const std::pair prepared(is_narrow, params.storage);
  if (std::ranges::find(column_kernels_, prepared) == column_kernels_.end()) {
    kernels.prepare(tiled_shared_bytes_);
    column_kernels_.push_back(prepared);
  }
  ColumnPlan plan;
  int64_t long_begin = params.num_sequences;
  int64_t long_end = 0;
  for (int64_t b = 0; b < params.num_sequences; ++b) {
    const auto i = static_cast<size_t>(b);
    const int64_t num_rows = (args.query_starts[i + 1] - args.query_starts[i]) * group;
    // What is recorded runs for longer contexts, too: all that the tables have room for.
    plan.add(num_rows, block_.is_recorded ? args.max_blocks * params.keys.block_size
                                          : int64_t{args.kv_lens[i]});
    if (num_rows <= kColumnSplitRows) continue;
    long_begin = std::min(long_begin, b);
    long_end = b + 1;
  }
  if (block_.is_recorded) {  // perhaps for others than those that it was recorded with
    long_begin = 0;
    long_end = params.num_sequences;
  }
  const auto run = [&](int64_t begin, int64_t end, int64_t num_rows, ColumnParams c) {
    const ColumnForm form = column_form(shape, num_rows, tiled_shared_bytes_);
    c.tile_rows = static_cast<int32_t>(kTiledRows * form.row_tiles);
    c.ring = form.ring;
    c.rows = num_rows;
    AttentionParams part = params;
    part.query_starts += begin;
    part.kv_lens += begin;
    part.block_tables += begin * params.max_blocks;
    part.num_sequences = end - begin;
    kernels.run(part, c, shape, num_rows, stream());
  };
  if (plan.long_rows > 0)
    run(long_begin, long_end, plan.long_rows, {.slots = 1, .is_split = false});
  if (plan.split_rows == 0) return;
  const int64_t sequences = params.num_sequences;
  const int64_t width = params.values.width;
  const int64_t at_once = plan.at_once(sequences, kv_heads, width);
  const int64_t slots = plan.slots(sequences, kv_heads, width);
  const int64_t num_partials = slots > 1 ? at_once * kv_heads * plan.split_rows * slots : 0;
  float* memory = num_partials > 0
                      ? reinterpret_cast<float*>(scratch(num_partials * (width + 2) * 4))
                      : nullptr;
  for (int64_t begin = 0; begin < sequences; begin += at_once)
    run(begin, std::min(begin + at_once, sequences), plan.split_rows,
        {.outputs = memory,
         .maxima = memory + num_partials * width,
         .sums = memory + num_partials * (width + 1),
         .slots = slots,
         .is_split = true,
         .takes_stretches = decode_spans_ == DecodeSpans::kAll});
}

}  // namespace llmserve::cuda
