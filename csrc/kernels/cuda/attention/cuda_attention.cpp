// Attention: which kernels do it, and what they pass on in working memory.
#include <algorithm>
#include <utility>

#include "kernels/cuda/argument_views.h"
#include "kernels/cuda/attention/tiled_kernels.h"
#include "kernels/cuda/attention/wgmma_check.h"
#include "kernels/cuda/attention/wgmma_kernels.h"
#include "kernels/cuda/cuda_backend.h"

namespace llmserve::cuda {

static_assert(kKvTile == 64, "attention.cu is written for tiles of 64");

namespace {

// Neighbours, from the first to the last that a kernel works on: its grid has blocks for each of
// them, and the few prompts of a step lie side by side among hundreds that decode.
struct Sequences {
  int64_t begin = 0;
  int64_t end = 0;

  void include(int64_t b) {
    if (end == 0) begin = b;
    end = b + 1;
  }
  AttentionParams of(AttentionParams params) const {
    params.query_starts += begin;
    params.kv_lens += begin;
    params.block_tables += begin * params.max_blocks;
    params.num_sequences = end - begin;
    return params;
  }
};

}  // namespace

AttentionParams CudaBackend::attention_params(const PagedAttentionArgs& args) {
  check_layout("paged_attention", args.cache);
  return {.q = args.q.as<float>(),
          .q_token_stride = args.q.strides[0],
          .q_head_stride = args.q.strides[1],
          .keys = part_of(args.cache.keys),
          .values = part_of(args.cache.values),
          .storage = storage_of(args.cache.keys.dtype),
          .query_starts = query_starts_(args.query_starts),
          .kv_lens = kv_lens_(args.kv_lens),
          .block_tables = block_tables_(args.block_tables),
          .num_sequences = static_cast<int64_t>(args.kv_lens.size()),
          .max_blocks = args.max_blocks,
          .num_tokens = args.q.shape[0],
          .num_heads = args.q.shape[1],
          .scale = args.scale,
          .window = args.window,
          .soft_cap = args.soft_cap,
          .sinks = args.sinks ? args.sinks.as<float>() : nullptr,
          .out = args.out.as<float>(),
          .out_token_stride = args.out.strides[0],
          .out_head_stride = args.out.strides[1]};
}

void CudaBackend::do_paged_attention(const PagedAttentionArgs& args) {
  memory_.make_current();
  const AttentionParams params = attention_params(args);
  if (can_tile(params)) return attend_in_tiles(args, params, nullptr);
  if (can_attend_by_columns(params)) return attend_by_columns(args, params);
  if (!attention_fits(params.keys.width, params.values.width, kKvTile)) {
    throw NotSupported(concat("cuda attention: heads of ", params.keys.width, " (values ",
                              params.values.width, ") do not fit a block's ", kMaxSharedBytes,
                              " bytes of shared memory; use device='cpu'"));
  }
  check_grid("paged_attention", args.q.shape[0] * args.q.shape[1]);
  cuda::paged_attention(params, stream());
}

void CudaBackend::do_fused_attention(const FusedAttentionArgs& args) {
  if (!args.prepare || !attend_unprepared(*args.prepare, args.attention))
    return Backend::do_fused_attention(args);
  do_linear(args.output);
}

// Of what is recorded, other steps of the shape are like this one.
bool CudaBackend::attend_unprepared(const PrepareQkvArgs& prepare, const PagedAttentionArgs& args) {
  if (!prepares_in_attention(preparation_, args.q.shape[0]) || decode_spans_ != DecodeSpans::kOne ||
      !has_preparing_kernel(args.q.shape[2]) ||
      args.q.shape[0] != static_cast<int64_t>(args.kv_lens.size()))
    return false;
  const int64_t block_size = args.cache.keys.shape[2];
  for (size_t b = 0; b < args.kv_lens.size(); ++b) {
    const int64_t newest = int64_t{args.kv_lens[b]} - 1;
    const size_t at = b * static_cast<size_t>(args.max_blocks) +
                      static_cast<size_t>(std::max<int64_t>(newest, 0) / block_size);
    if (args.query_starts[b + 1] - args.query_starts[b] != 1 || newest < 0 ||
        (prepare.slots[b] >= 0 &&
         prepare.slots[b] != args.block_tables[at] * block_size + newest % block_size))
      return false;
  }
  memory_.make_current();
  const std::optional<QkvParams> qkv = qkv_params(prepare);
  if (!qkv || !can_hold_heads(*qkv)) return false;
  const AttentionParams params = attention_params(args);
  if (!can_tile(params)) return false;
  attend_in_tiles(args, params, &*qkv);
  return true;
}

bool CudaBackend::can_tile(const AttentionParams& p) const {
  const bool is_bf16 = p.storage == Storage::kBF16;
  const bool has_aligned_codes = p.storage == Storage::kF8 && p.keys.head_stride % 16 == 0;
  return (is_bf16 || has_aligned_codes) && p.keys.width == p.values.width &&
         tiled_fits(p.keys.width, tiled_shared_bytes_) && is_aligned(p.keys.data) &&
         is_aligned(p.values.data) && p.num_heads / p.keys.num_heads <= kTiledRows &&
         p.keys.num_heads <= kMaxGridYZ && p.num_sequences <= kMaxGridYZ &&
         p.num_tokens * (p.num_heads / p.keys.num_heads) <= kMaxGridYZ * kTiledRows;
}

bool CudaBackend::can_wgmma(const AttentionParams& p) {
  // Rows of the pool are counted in 32 bits: they are 128 bytes and more of one GPU's memory.
  return may_wgmma_ && !block_.is_recorded && p.storage == Storage::kBF16 && p.scale > 0 &&
         p.keys.head_stride % p.keys.width == 0 && is_aligned(p.q, p.q_token_stride) &&
         p.q_head_stride % 4 == 0 && is_aligned(p.out, p.out_token_stride) &&
         p.out_head_stride % 4 == 0 && passes_wgmma(p.keys.width);
}

bool CudaBackend::passes_wgmma(int64_t width) {
  if (!has_wgmma_kernel(width) || wgmma_bytes(static_cast<int>(width)) > tiled_shared_bytes_)
    return false;
  if (const auto known = wgmma_widths_.find(width); known != wgmma_widths_.end())
    return known->second;
  const float difference = wgmma_difference(width, tiled_shared_bytes_, memory_);
  const bool passes = difference <= kWgmmaTolerance;
  if (!passes) {
    const std::string what = concat("wgmma differs from mma by ", difference, " at D=", width);
    if (insists_on_wgmma_) throw NotSupported(concat("LLMSERVE_CUDA_ATTENTION=wgmma: ", what));
    wgmma_problem_ += concat(", ", what);
  }
  wgmma_widths_[width] = passes;
  return passes;
}

// Zeros, which every kernel leaves as it found them.
uint32_t* CudaBackend::arrivals(int64_t count) {
  const int64_t num_bytes = count * static_cast<int64_t>(sizeof(uint32_t));
  if (arrivals_.num_bytes() < num_bytes) {
    block_.move();
    arrivals_ = Buffer();
    arrivals_ = Buffer(num_bytes, memory_);
  }
  return reinterpret_cast<uint32_t*>(arrivals_.data());
}

void CudaBackend::attend_in_tiles(const PagedAttentionArgs& args, AttentionParams params,
                                  const QkvParams* unprepared) {
  const int64_t width = params.keys.width;
  const int64_t kv_heads = params.keys.num_heads;
  const TiledKernels kernels =
      params.storage == Storage::kF8 ? tiled_kernels_f8(width) : tiled_kernels_bf16(width);
  const std::pair prepared(width, params.storage);
  if (std::ranges::find(tiled_kernels_, prepared) == tiled_kernels_.end()) {
    kernels.prepare(tiled_shared_bytes_);
    tiled_kernels_.push_back(prepared);
  }
  if (can_wgmma(params)) params.wgmma_rows = wgmma_from_rows(params.num_heads / kv_heads);
  TiledPlan plan{.wgmma_rows = params.wgmma_rows};
  Sequences long_ones;
  Sequences wgmma_ones;
  for (size_t b = 0; b < args.kv_lens.size(); ++b) {
    const int64_t num_tokens = args.query_starts[b + 1] - args.query_starts[b];
    // What is recorded runs for longer contexts, too: all that the tables have room for.
    const int64_t kv_len =
        block_.is_recorded ? args.max_blocks * params.keys.block_size : int64_t{args.kv_lens[b]};
    const int64_t num_rows = num_tokens * (params.num_heads / kv_heads);
    plan.add(num_rows, kv_len, static_cast<int>(width));
    if (num_rows > kTiledRows)
      (num_rows >= plan.wgmma_rows ? wgmma_ones : long_ones).include(static_cast<int64_t>(b));
  }
  // What is recorded may run for others than those that it was recorded with.
  if (block_.is_recorded) long_ones = {0, params.num_sequences};
  const int64_t at_once = plan.sequences_at_once(params.num_sequences, kv_heads, width);
  const int64_t n = at_once * plan.num_partials(kv_heads);
  float* memory = n > 0 ? reinterpret_cast<float*>(scratch(n * (width + 2) * 4)) : nullptr;
  const TiledPartials partials{
      .outputs = memory,
      .maxima = memory + n * width,
      .sums = memory + n * (width + 1),
      .sequences = at_once,
      .kv_heads = kv_heads,
      .spans = plan.spans,
      .rows = plan.split_rows,
      .shared_bytes = tiled_shared_bytes_,
      .walk = tiled_walk(decode_spans_, plan.spans, params.num_sequences * kv_heads),
      .arrived = n > 0 ? arrivals(at_once * kv_heads) : nullptr,
      .merge = span_merge_,
      .holds_codes = holds_codes_};
  if (unprepared != nullptr)
    return kernels.run_preparing(params, *unprepared, plan, partials, stream());
  if (plan.row_tiles > 0)
    kernels.run(long_ones.of(params), {.row_tiles = plan.row_tiles}, partials, stream());
  if (plan.wgmma_tiles > 0)
    wgmma_kernels(width).run(wgmma_ones.of(params), plan.wgmma_tiles, stream());
  plan.row_tiles = 0;
  kernels.run(params, plan, partials, stream());
}

}  // namespace llmserve::cuda
